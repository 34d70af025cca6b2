"""Define transports, ring collectives' byte counts, and messages with checksums."""

import abc
import hashlib
import itertools
import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_gc.core import (
    Exchange,
    Flow,
    Gather,
    Limits,
    Mean,
    MeanShard,
    Payload,
    Reply,
    Request,
    averaged,
)
from lightning_gc.core.digest import ReplicaError, digest
from lightning_gc.core.flow import described
from lightning_gc.core.message import Message
from lightning_gc.kernels.dispatch import SWITCH
from lightning_gc.transports.peer_error import MessageError


class Transport(abc.ABC):
    """Moves tensors between workers and counts the bytes that this worker sends.

    Attributes:
        worker: this worker's index.
        workers: W.
        sent_bytes: bytes sent since construction, by the volume of the algorithms used: a ring for
            all-reduce and all-gather. Not counted: network frame headers and the backend's
            handshakes (Gloo: 0.4 to 1.7 KB per request and other worker).
        node_bytes: bytes of all-to-alls sent to workers of the same node, which are not counted
            in ``sent_bytes``; 0 for schemes without nodes.
    """

    worker: int
    workers: int
    sent_bytes: int
    node_bytes: int = 0

    @abc.abstractmethod
    def fulfil(self, request: Request) -> Reply:
        """Carry out one request together with the other workers and return the reply."""


def by_leg(sizes: Sequence[int], sender: int, per_node: int) -> tuple[int, int]:
    """Return the bytes that go to other nodes, and the bytes that stay in the sender's node.

    Args:
        sizes: bytes for each worker.
        sender: the sending worker's index; nothing is sent to itself.
        per_node: number of workers, with consecutive indices, in a node.
    """
    away = within = 0
    for receiver, nbytes in enumerate(sizes):
        if receiver // per_node != sender // per_node:
            away += nbytes
        elif receiver != sender:
            within += nbytes
    return away, within


def all_reduce_bytes(nbytes: int, workers: int) -> int:
    """Return the bytes that one worker sends in a ring all-reduce of ``nbytes``."""
    return 2 * (workers - 1) * nbytes // workers


def reduce_scatter_bytes(nbytes: int, workers: int) -> int:
    """Return the bytes that one worker sends in a ring reduce-scatter of ``nbytes``."""
    return (workers - 1) * nbytes // workers


def all_gather_bytes(nbytes: int, workers: int) -> int:
    """Return the bytes that one worker sends in an all-gather of ``nbytes`` per worker."""
    return (workers - 1) * nbytes


def uneven_gather_bytes(sizes: Sequence[int], worker: int) -> int:
    """Return the bytes that a worker sends in a ring all-gather of messages of these sizes.

    It sends all but the message of the next worker, which has that. So no worker sends more than
    all messages together, however long one of them is.

    Args:
        sizes: of each worker's message, in bytes.
        worker: the sending worker's index.
    """
    return sum(sizes) - sizes[(worker + 1) % len(sizes)]


LENGTH_BYTES = 8


def lengths_of(payload: Payload) -> list[int]:
    """Return the number of elements of each tensor."""
    return [tensor.numel() for tensor in payload]


def laid_out(payload: Payload, limits: Limits | None) -> Message:
    """Return the layout of this worker's payload."""
    return Message.of(payload, None if limits is None else lengths_of(payload))


def check_lengths(lengths: Sequence[int], own: Payload, limits: Limits, sender: int) -> None:
    """Raise MessageError for a fixed length that differs, a negative or one above its limit."""
    for length, tensor, limit in zip(lengths, own, limits, strict=True):
        if limit is None and length != tensor.numel():
            raise MessageError(
                f"Worker {sender} announces {length} elements where all workers send "
                f"{tensor.numel()}; is its configuration or its model another one?"
            )
        if limit is not None and not 0 <= length <= limit:
            raise MessageError(
                f"Worker {sender} announces {length} elements where at most {limit} are possible; "
                f"the message is damaged or its model is another one."
            )


_LETTERS = 1 << 24  # of the text of a request, at most


def same_layout(request: Request, names: Iterable[str]) -> Flow:
    """Raise ReplicaError on all workers unless all make requests of the same layout.

    Args:
        request: this worker's.
        names: of the bucket's parameters.

    Communication pattern:
        One all-gather of 8 bytes. If layouts differ, another one of their texts.
    """
    text = described(request).encode()
    own = int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)
    ours = torch.tensor([own], dtype=torch.int64, device="cpu")
    if len({int(of_all) for (of_all,) in (yield Gather((ours,)))}) == 1:
        return
    letters = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    replies = yield Gather((letters,), (_LETTERS,))
    asks = [_cut(bytes(each.tolist()).decode()) for (each,) in replies]
    odd = [worker for worker, each in enumerate(asks) if each != asks[0]]
    if not odd:
        raise ReplicaError("The message that compares the layouts of requests was damaged.")
    there = odd[0]
    (kind, fields), (other_kind, others) = asks[0], asks[there]
    if kind != other_kind:
        said = f"worker {there} asks for {other_kind}, worker 0 for {kind}"
    else:
        pairs = enumerate(itertools.zip_longest(fields, others, fillvalue="nothing"), 1)
        place, first, other = next((i, a, b) for i, (a, b) in pairs if a != b)
        said = f"field {place} is {other} on worker {there}, and {first} on worker 0"
    who = f"Worker{'s'[: len(odd) > 1]} {', '.join(map(str, odd))}"
    raise ReplicaError(
        f"{who} would send {shortened(names)} in another layout than worker 0: {said}. Neither "
        f"network nor memory is at fault, and this message was not sent. Install the same versions "
        f"of lightning_gc and numba on all workers, give them the same settings, and start again. "
        f"If they have these, set {SWITCH}=torch on all."
    )


def _cut(text: str) -> tuple[str, list[str]]:
    """Return the kind of a request and its fields."""
    kind, _, fields = text.removesuffix("]").partition("[")
    return kind, re.split(r"(?<=[a-z0-9]), (?=[(a])", fields)


def shortened(names: Iterable[str]) -> str:
    """Return the names of a bucket's parameters, the first ones if they are many."""
    said = ", ".join(names)
    return said if len(said) <= 200 else f"{said[:200]}..."


class Checksummed(Transport):
    """Transport that adds an 8-byte digest to every message, which the receiver compares.

    It finds damage after packing; it does not find a wrong result that a worker computes and sends.
    Reading a digest makes the host wait for an accelerator.

    Args:
        inner: the transport that communicates.

    Communication pattern:
        ``Gather`` and ``Exchange`` as ``inner`` does them. An all-reduce happens within the
        backend, where nothing can be compared, so ``MeanShard`` is an all-to-all of shards, which
        are averaged in float32 or wider. ``Mean`` gathers these means, too. It sends the bytes of a
        ring all-reduce, and all workers have the same bits.

    Raises:
        MessageError: a message differs from what its sender packed; the error names the sender.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.worker = inner.worker
        self.workers = inner.workers

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        return self.inner.sent_bytes

    @property
    def node_bytes(self) -> int:  # type: ignore[override]
        return self.inner.node_bytes

    def fulfil(self, request: Request) -> Reply:
        if isinstance(request, Mean):
            return self._mean(request)
        if isinstance(request, Gather):
            known = request.lengths
            lengths = None if known is None else [[*each, 1] for each in known]  # and the digest
            summed = _summed(request.tensors), _with_sum(request.limits)
            return self._compared(Gather(*summed, lengths))
        if isinstance(request, MeanShard):
            return averaged(self.fulfil(request.as_exchange(self.workers)))
        payloads = tuple(_summed(payload) for payload in request.payloads)
        return self._compared(Exchange(payloads, _with_sum(request.limits)))

    def _compared(self, request: Gather | Exchange) -> Reply:
        """Return the reply without checksums."""
        reply = self.inner.fulfil(request)
        for sender, (*tensors, announced) in enumerate(reply):
            if sender != self.worker and int(digest(*tensors)) != int(announced):
                raise MessageError(
                    f"The message of worker {sender} does not match its checksum: it was damaged "
                    f"on the way to worker {self.worker}, or in the memory of one of them. Check "
                    f"their network and memory, and resume from a checkpoint."
                )
        return [payload[:-1] for payload in reply]

    def _mean(self, request: Mean) -> Reply:
        means: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(t.dtype for t in request.tensors):
            members = [i for i, t in enumerate(request.tensors) if t.dtype == dtype]
            given = [request.tensors[i] for i in members]
            flat = self._mean_of(torch.cat([t.reshape(-1) for t in given]))
            pieces = flat.split([t.numel() for t in given])
            for i, t, piece in zip(members, given, pieces, strict=True):
                means[i] = piece.view(t.shape)
        return [means[i] for i in range(len(means))]

    def _mean_of(self, flat: Tensor) -> Tensor:
        size = -(-flat.numel() // self.workers)
        full = pad(flat, (0, size * self.workers - flat.numel()))
        (mean,) = self.fulfil(MeanShard((full,)))
        gathered = self.fulfil(Gather((mean.to(flat.dtype),)))
        return torch.cat([shard for (shard,) in gathered])[: flat.numel()]


def _summed(payload: Payload) -> Payload:
    return (*payload, digest(*payload))


def _with_sum(limits: Limits | None) -> Limits | None:
    return None if limits is None else (*limits, None)
