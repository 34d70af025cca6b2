"""Island: processes that train as one worker; rank 0 talks to other workers, and all hear it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gc.core import Exchange, Mean, Payload, Reply, Request
from lightning_gc.core.copies import Single
from lightning_gc.core.digest import check_same, digest
from lightning_gc.core.message import Message, as_bytes
from lightning_gc.transports.base import Transport
from lightning_gc.transports.distributed import own_group
from lightning_gc.transports.peer_error import PeerError, is_from_backend

_DONE, _PEER, _VALUE, _END = range(4)
"""How an act of rank 0 has ended: well, by another worker, by a wrong value, by anything else."""


class IslandError(PeerError):
    """Another process of this worker has died, hangs or has failed, so this one must end too."""


class Island(Single):
    """Processes that train as one worker, such as the GPUs of a node.

    Every process holds the worker: the same weights, errors and flows. Rank 0 alone sends to other
    workers and receives from them. It broadcasts each reply, and every process decodes that. So all
    processes end a round with the same bits, for every compressor.

    The node would not send less if each rank sent a share of the message. With one sender a node
    sends the same bytes, and has the same errors, as a worker of one process. So a simulated worker
    repeats its training. The price: one network card of the node sends, and each process keeps the
    errors.

    Args:
        group: of these processes, by Gloo, for this only; None: one process, which hears itself.
            Its timeout is how long rank 0's acts may take.
        timeout: of each message from rank 0; None: the group's.

    Communication pattern:
        Two broadcasts for each reply: how rank 0's act has ended and the number of bytes, then the
        bytes. Between islands they are compressed, so they are in the island.

    Attributes:
        rank: of this process.
        size: N, the number of processes.
        sent_bytes: that this process has sent to the others.

    Example:
        >>> Island().say(lambda: "a decision")
        'a decision'
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, timeout: timedelta | None = None
    ) -> None:
        self._group, self._timeout = group, timeout
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.sent_bytes = 0

    @classmethod
    def among(
        cls,
        islands: Sequence[Sequence[int]],
        longest: timedelta | None = None,
        timeout: timedelta | None = None,
    ) -> Island:
        """Return this process's island; all processes of the default group must call it.

        Args:
            islands: the ranks of each.
            longest: time of an act of rank 0; None: torch's default timeout.
            timeout: as for the class.
        """
        return cls(own_group(islands, longest, backend="gloo"), timeout)

    @property
    def leads(self) -> bool:
        """Whether this process talks to other workers, and decides."""
        return self.rank == 0

    def hear(self, act: Callable[[], Tensor]) -> Tensor:
        """Return what ``act`` returns on rank 0, on all ranks; the others do not call it.

        Args:
            act: returns bytes, ``(n,)`` uint8 on the host.

        Raises:
            BaseException: on rank 0, what ``act`` raises. Elsewhere PeerError if that is an error
                of another worker, ValueError if it is an OSError or a ValueError.
            IslandError: on the other ranks after any other exception; on all ranks if a process of
                the island has died, or hangs.
        """
        if self._group is None:
            return act()
        if not self.leads:
            return self._heard()
        try:
            data = act()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            with contextlib.suppress(IslandError):
                self._tell(_kind(error), _in_bytes(text))
            raise
        self._tell(_DONE, data)
        return data

    def say(self, act: Callable[[], str]) -> str:
        """Return the text that ``act`` returns on rank 0, on all ranks; as ``hear``."""
        if self._group is None:
            return act()
        return _text(self.hear(lambda: _in_bytes(act())))

    def compare(self, tensors: Sequence[Tensor], what: str) -> None:
        """Raise ReplicaError, on all ranks, if these tensors have other bits on some.

        Args:
            tensors: at least one.
            what: they are, for the error.
        """
        if self._group is None:
            return
        own = digest(*tensors).cpu()
        found = [torch.empty_like(own) for _ in range(self.size)]
        with self._naming():
            dist.all_gather(found, own, group=self._group)
        why = (
            "The processes of an island must have equal weights. Compare their devices and "
            "versions of torch, and look for weights that only one of them changes."
        )
        check_same([int(each) for each in found], what, why)

    def over(self, inner: Transport) -> Transport:
        """Return the transport of this worker's processes, over the one that rank 0 uses."""
        return inner if self._group is None else _InIsland(inner, self)

    def close(self) -> None:
        """Leave the group, which the other processes notice; again does nothing."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _tell(self, kind: int, data: Tensor) -> None:
        head = torch.tensor([kind, data.numel()], dtype=torch.int64, device="cpu")
        with self._naming():
            self._broadcast(head)
            self._broadcast(data)
        self.sent_bytes += (self.size - 1) * (data.numel() + head.nbytes)

    def _heard(self) -> Tensor:
        head = torch.zeros(2, dtype=torch.int64, device="cpu")
        with self._naming():
            self._broadcast(head)
            kind, length = head.tolist()
            data = torch.empty(length, dtype=torch.uint8, device="cpu")
            self._broadcast(data)
        if kind == _DONE:
            return data
        if kind == _END:
            raise IslandError(f"Rank 0 of this island has ended: {_text(data)}")
        raise (PeerError if kind == _PEER else ValueError)(_text(data))

    def _broadcast(self, tensor: Tensor) -> None:
        if tensor.numel():
            assert self._group is not None
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            if self.leads and self._timeout is not None:
                options.timeout = self._timeout  # dist.broadcast has only the group's
            self._group.broadcast([tensor], options).wait()

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Turn the backend's errors into an IslandError."""
        since = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if not is_from_backend(error):
                raise
            others = ", ".join(str(each) for each in range(self.size) if each != self.rank)
            raise IslandError(
                f"Rank {self.rank} of an island of {self.size} processes has lost rank {others} "
                f"after {time.monotonic() - since:.1f} s. One of them has died or hangs; its own "
                f"output says more. All processes of an island end together. The backend says: "
                f"{error}"
            ) from error


ALONE = Island()
"""A worker of one process."""


def _kind(error: BaseException) -> int:
    if isinstance(error, PeerError) or is_from_backend(error):
        return _PEER
    return _VALUE if isinstance(error, OSError | ValueError) else _END


def _in_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def _text(data: Tensor) -> str:
    return bytes(data.tolist()).decode(errors="replace")


class Seat(Transport):
    """A worker's place in an exchange where this process sends nothing.

    Args:
        worker: the worker's index.
        workers: W.
    """

    def __init__(self, worker: int = 0, workers: int = 1) -> None:
        self.worker, self.workers = worker, workers
        self.sent_bytes = 0

    def fulfil(self, request: Request) -> Reply:
        """Raise AssertionError: rank 0 fulfils requests."""
        raise AssertionError(f"a request without a transport: {request}")


class _InIsland(Transport):
    """Fulfils a worker's requests on rank 0, and gives the replies to all its processes."""

    def __init__(self, inner: Transport, island: Island) -> None:
        self._inner, self._island = inner, island
        self.worker, self.workers = inner.worker, inner.workers

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        return self._inner.sent_bytes

    @property
    def node_bytes(self) -> int:  # type: ignore[override]
        return self._inner.node_bytes + self._island.sent_bytes

    def fulfil(self, request: Request) -> Reply:
        replies: list[Reply] = []

        def act() -> Tensor:
            replies.append(self._inner.fulfil(request))
            return _packed(request, replies[0]).cpu()

        data = self._island.hear(act)
        return replies[0] if replies else _unpacked(request, data, self.workers)


def _packed(request: Request, reply: Reply) -> Tensor:
    """Return a reply as bytes: lengths of each worker's tensors, then each worker's message."""
    if isinstance(request, Mean):
        return Message.of(request.tensors).pack(tuple(reply))
    own = _own(request)
    lengths = [[tensor.numel() for tensor in payload] for payload in reply]
    pairs = zip(lengths, reply, strict=True)
    messages = [Message.of(own, each).pack(tuple(payload)) for each, payload in pairs]
    device = messages[0].device
    return torch.cat([as_bytes(torch.tensor(lengths, dtype=torch.int64, device=device)), *messages])


def _unpacked(request: Request, data: Tensor, workers: int) -> Reply:
    """Return the reply of ``_packed``, on the device of the request."""
    if isinstance(request, Mean):
        like = request.tensors
        return Message.of(like).unpack(data.to(like[0].device))
    own = _own(request)
    head = 8 * workers * len(own)
    lengths = data[:head].view(torch.int64).view(workers, len(own)).tolist()
    layouts = [Message.of(own, each) for each in lengths]
    there = data[head:].to(own[0].device)
    rows = there.split([layout.nbytes for layout in layouts])
    return [layout.unpack(row) for layout, row in zip(layouts, rows, strict=True)]


def _own(request: Request) -> Payload:
    return request.payloads[0] if isinstance(request, Exchange) else request.tensors
