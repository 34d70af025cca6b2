"""Fulfil requests by collectives of torch.distributed, over NCCL or Gloo."""

import atexit
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from lightning_gc.core import Exchange, Gather, Limits, Mean, MeanShard, Payload, Reply, Request
from lightning_gc.core.copies import Missing
from lightning_gc.core.flow import Arrived
from lightning_gc.core.message import (
    FORMAT,
    Message,
    Packed,
    as_bytes,
    joined,
    lie_together,
    lies_in,
)
from lightning_gc.transports import base
from lightning_gc.transports.p2p import PIECE, ring, swap, swap_of_unknown_lengths
from lightning_gc.transports.peer_error import (
    MessageError,
    awaiting_peers,
    explained,
    is_from_backend,
    naming_peers,
)

# Renamed in torch 2.13, where the old names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
EXCHANGE = "an exchange of gradients"
"""Default purpose of a transport, for error messages."""
_NAMES = {
    Mean: "all-reduce",
    Gather: "all-gather",
    Exchange: "all-to-all",
    MeanShard: "reduce-scatter",
}


_LARGE = 1 << 20  # bytes that are not copied only to travel together


def _parts(tensors: Sequence[Tensor], members: Sequence[int]) -> list[list[int]]:
    """Return which of a dtype's tensors travel together: all of them, or small ones only."""
    views = [tensors[i].view(-1) for i in members]
    if views[0].device.type != "cpu" or lie_together(views):
        return [list(members)]
    small = [i for i in members if tensors[i].nbytes < _LARGE]
    large = [[i] for i in members if tensors[i].nbytes >= _LARGE]
    return large + ([small] if small else [])


class Distributed(base.Transport):
    """Fulfils requests over a process group of NCCL or Gloo, one contiguous message each.

    Calls block the calling thread (on CUDA: the current stream), for the group's timeout at most.
    Only one thread may use the group.

    A dead or late peer raises over Gloo. NCCL's calls return once they are enqueued: its watchdog
    detects the timeout in another thread and ends the process (SIGABRT), so Python sees no
    exception. The environment variable ``TORCH_NCCL_BLOCKING_WAIT=1`` turns the watchdog off: our
    calls then wait on the host until they are done or time out, and raise. Reads on the host by
    other code, such as Lightning 2.6's before each batch, can then wait for ever.

    Args:
        group: the process group; None is the default group.
        purpose: what is communicated, for error messages.
        per_node: number of workers, with consecutive indices, in a node of the scheme. Bytes that
            an ``Exchange`` sends within a node are counted separately.

    Communication pattern:
        ``Mean`` is one all-reduce per dtype, ``Gather`` one all-gather, ``Exchange`` one
        all-to-all, ``MeanShard`` one reduce-scatter. Messages of a ``Gather`` that have different
        lengths keep them: in a ring, point to point, on the host; with NCCL in a broadcast of each.
        On the host tensors of a ``Mean`` of 1 MiB or more have an all-reduce each, at the same
        time. An ``Exchange``, and a large ``Gather`` of two workers, is sent point to point in
        pieces. Ragged payloads send their
        lengths, 8 bytes per tensor, unless all workers know them: first, in an all-gather or
        all-to-all, or, in an ``Exchange`` on the host, in front of each message. They end in a seal
        of 8 bytes, by which the host checks the lengths. Messages are multiples of 16 bytes, so
        each worker's part of an all-gather or all-to-all is, too. ``MeanShard`` is not padded: with
        its layout of parts the sums have the bits of FSDP2's own.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        purpose: str = EXCHANGE,
        per_node: int = 1,
    ) -> None:
        self.group = group
        self.purpose = purpose
        self.per_node = per_node
        self.worker = dist.get_rank(group)
        self.workers = dist.get_world_size(group)
        self.sent_bytes = self.node_bytes = 0
        register()

    def __getstate__(self) -> dict[str, Any]:
        """Keep the counts; the group belongs to this process."""
        return vars(self) | {"group": Missing("process group")}

    def fulfil(self, request: Request) -> Reply:
        """Carry out one request.

        Raises:
            PeerError: a peer has died, hangs, makes other requests, or has sent another message
                than it announced. With NCCL see the class.
        """
        started = time.monotonic()
        try:
            if isinstance(request, Mean):
                return self._mean(request)
            if isinstance(request, Gather):
                return self._gather(request)
            if isinstance(request, Exchange):
                return self._exchange(request)
            return self._mean_shard(request)
        except RuntimeError as error:
            if not is_from_backend(error):
                raise
            what, me = _NAMES[type(request)], self.worker
            raise explained(error, what, self.purpose, me, self.workers, started) from error

    def _mean(self, request: Mean) -> Reply:
        tensors = [t.contiguous() for t in request.tensors]
        means = list(tensors)
        for dtype in dict.fromkeys([t.dtype for t in tensors]):
            members = [i for i, t in enumerate(tensors) if t.dtype == dtype]
            started = []
            for part in _parts(tensors, members):
                views = [tensors[i].view(-1) for i in part]
                flat = joined(views)
                # Divided before the sum, as DDP does: half precision must not overflow.
                flat.mul_(1 / self.workers)
                at_once = len(part) < len(members)
                started.append(dist.all_reduce(flat, group=self.group, async_op=at_once))
                self.sent_bytes += base.all_reduce_bytes(flat.nbytes, self.workers)
                if flat.data_ptr() != views[0].data_ptr():
                    pieces = flat.split([v.numel() for v in views])
                    for i, piece in zip(part, pieces, strict=True):
                        means[i] = piece.view(tensors[i].shape)
            for work in started:
                if work is not None:
                    work.wait()
        return means

    def _mean_shard(self, request: MeanShard) -> Reply:
        # FSDP2's own call: its layout, dtype and operation decide the order of the backend's sums.
        rows = request.as_exchange(self.workers).payloads
        given = torch.cat([shard for row in rows for shard in row])
        mean = given.new_empty(given.numel() // self.workers)
        _reduce_scatter(mean, given, op=dist.ReduceOp.AVG, group=self.group)
        self.sent_bytes += base.reduce_scatter_bytes(given.nbytes, self.workers)
        return list(mean.split([shard.numel() for shard in rows[0]]))

    def _gather(self, request: Gather) -> Reply:
        if request.into is not None:
            (message,) = request.into.again
            _all_gather(request.into.memory, message, group=self.group)
            self.sent_bytes += base.all_gather_bytes(message.numel(), self.workers)
            return request.into
        own, limits = request.tensors, request.limits
        mine = base.laid_out(own, limits)
        layouts = [mine] * self.workers
        if limits is not None and request.lengths is not None:
            layouts = self._checked(request.lengths, own, limits)
        elif limits is not None:
            # All workers get the same lengths, so that sizes agree.
            ours = _as_tensor(_announcement(own), own)
            table = ours.new_empty(self.workers * len(own))
            _all_gather(table, ours, group=self.group)
            layouts = self._announced(table.view(self.workers, -1), own, limits)
        sizes = [layout.nbytes for layout in layouts]
        message, nbytes = mine.pack(own), sizes[self.worker]
        if message.numel() != nbytes:  # what it has announced was damaged, and others expect that
            message = torch.nn.functional.pad(message, (0, nbytes - message.numel()))
        gathered = message.new_empty(sum(sizes))
        rows = gathered.split(sizes)
        on_host, uneven = message.device.type == "cpu", len(set(sizes)) > 1
        if on_host and (uneven or (self.workers == 2 and nbytes > PIECE)):
            ring(message, rows, self.group)
        elif uneven:
            self._broadcast_each(rows, message)
        elif nbytes:
            _all_gather(gathered, message, group=self.group)
        self.sent_bytes += base.uneven_gather_bytes(sizes, self.worker)
        reply = _unpacked(layouts, rows)
        if isinstance(own, Packed) and message is own.message and message.device.type != "cpu":
            return Arrived.of(reply, gathered, message)
        return reply

    def _broadcast_each(self, rows: Sequence[Tensor], message: Tensor) -> None:
        """Gather messages of different sizes on a device; NCCL starts a broadcast of each at once.

        Gloo's all-gather needs equal sizes, and with the debug level DETAIL torch refuses others.
        """
        takes = "cuda:nccl" in distributed_c10d.get_backend_config(self.group)
        if takes and distributed_c10d.get_debug_level() != distributed_c10d.DebugLevel.DETAIL:
            dist.all_gather(list(rows), message, group=self.group)
            return
        rows[self.worker].copy_(message)
        ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        for rank, row in zip(ranks, rows, strict=True):
            dist.broadcast(row, rank, group=self.group)

    def _exchange(self, request: Exchange) -> Reply:
        if request.into is not None:
            block, away, within, splits = request.into.again
            dist.all_to_all_single(request.into.memory, block, **splits, group=self.group)
            self.sent_bytes += away
            self.node_bytes += within
            return request.into
        own, limits = request.payloads[self.worker], request.limits
        outgoing = [base.laid_out(payload, limits) for payload in request.payloads]
        messages = [m.pack(p) for m, p in zip(outgoing, request.payloads, strict=True)]
        away, within = base.by_leg([m.nbytes for m in outgoing], self.worker, self.per_node)
        self.sent_bytes += away
        self.node_bytes += within
        if limits is None:
            layouts = [outgoing[self.worker]] * self.workers
        elif own[0].device.type == "cpu":
            return self._exchange_ragged(request.payloads, messages, limits)
        else:
            ours = _as_tensor([_announcement(payload) for payload in request.payloads], own)
            theirs = torch.empty_like(ours)
            dist.all_to_all_single(theirs, ours, group=self.group)
            layouts = self._announced(theirs, own, limits)
        sizes = [layout.nbytes for layout in layouts]
        arrived = messages[0].new_empty(sum(sizes))
        rows = arrived.split(sizes)
        if arrived.device.type == "cpu":
            swap(messages, rows, self.group)
            return _unpacked(layouts, rows)
        block, given = joined(messages), [m.nbytes for m in outgoing]
        splits = {"output_split_sizes": sizes, "input_split_sizes": given}
        dist.all_to_all_single(arrived, block, **splits, group=self.group)
        reply = _unpacked(layouts, rows)
        if all(isinstance(p, Packed) for p in request.payloads) and lies_in(messages, block):
            return Arrived.of(reply, arrived, block, away, within, splits)
        return reply

    def _exchange_ragged(
        self, payloads: Sequence[Payload], messages: Sequence[Tensor], limits: Limits
    ) -> Reply:
        """Send each message after its own lengths, on the host."""
        own = payloads[self.worker]
        layouts: dict[int, Message] = {}
        head = base.LENGTH_BYTES * len(own)

        def measure(sender: int, first: Tensor) -> int:
            announced = _lengths_in(first[:head].view(torch.int64).tolist(), sender)
            base.check_lengths(announced, own, limits, sender)
            layouts[sender] = Message.of(own, announced)
            return head + layouts[sender].nbytes

        headers = [as_bytes(_as_tensor(_announcement(payload), own)) for payload in payloads]
        framed = [torch.cat(parts) for parts in zip(headers, messages, strict=True)]
        rows = swap_of_unknown_lengths(framed, measure, self.group)
        measure(self.worker, rows[self.worker])
        self.sent_bytes += base.all_gather_bytes(head, self.workers)
        in_order = [layouts[sender] for sender in range(self.workers)]
        return _unpacked(in_order, [row[head:] for row in rows])

    def _announced(self, table: Tensor, own: Payload, limits: Limits) -> list[Message]:
        """Return the layouts of messages with the lengths in the rows of ``table``."""
        lengths = [_lengths_in(row, sender) for sender, row in enumerate(table.tolist())]
        layouts = self._checked(lengths, own, limits)
        self.sent_bytes += base.all_gather_bytes(base.LENGTH_BYTES * len(own), self.workers)
        return layouts

    def _checked(
        self, lengths: Sequence[Sequence[int]], own: Payload, limits: Limits
    ) -> list[Message]:
        """Return the layouts of messages with these lengths, after checking them."""
        for sender, arriving in enumerate(lengths):
            base.check_lengths(arriving, own, limits, sender)
        return [Message.of(own, arriving) for arriving in lengths]


_FORMAT_AT = 48
"""The bit of an announced length above which the wire format is."""


def _announcement(payload: Payload) -> list[int]:
    """Return the lengths to announce, with the wire format in their upper bits.

    A worker of another format expects messages of another size. It must not begin to receive one.
    """
    return [length + (FORMAT << _FORMAT_AT) for length in base.lengths_of(payload)]


def _lengths_in(announced: Sequence[int], sender: int) -> list[int]:
    """Return the lengths that a worker announces; MessageError for another wire format."""
    for each in announced:
        if each >> _FORMAT_AT != FORMAT:
            raise MessageError(
                f"Worker {sender} sends messages of another wire format than {FORMAT}. Install the "
                f"same version of lightning_gc on all workers. If they have it, the message was "
                f"damaged."
            )
    return [each - (FORMAT << _FORMAT_AT) for each in announced]


def _as_tensor(lengths: Sequence[int] | Sequence[Sequence[int]], like: Payload) -> Tensor:
    device = like[0].device
    # From pinned memory, or the host would wait for a GPU here as well as where it reads lengths.
    pinned = device.type == "cuda"
    numbers = torch.tensor(lengths, dtype=torch.int64, device="cpu", pin_memory=pinned)
    return numbers.to(device, non_blocking=True)


def _unpacked(layouts: Sequence[Message], rows: Sequence[Tensor]) -> Reply:
    """Return what each worker has sent; MessageError, which names it, if that is damaged."""
    reply: Reply = []
    for sender, (layout, row) in enumerate(zip(layouts, rows, strict=True)):
        try:
            reply.append(layout.unpack(row))
        except ValueError as error:
            raise MessageError(f"Worker {sender} has sent something damaged. {error}") from error
    return reply


MAX_TEXT = 1 << 24
"""Maximal bytes of a text sent between workers."""


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set the timeout of a process group's next operations."""
    public = getattr(dist, "set_timeout", None)  # since 2.14; the private name warns there
    (public or distributed_c10d._set_pg_timeout)(timeout, group)


def own_group(
    every: Sequence[Sequence[int]], timeout: timedelta | None, **options: Any
) -> dist.ProcessGroup:
    """Make groups; return this rank's one.

    Args:
        every: the ranks of each; disjoint, and this rank is in one.
        timeout: of all collectives in the groups; None: torch's default.
        options: of ``torch.distributed.new_group``.

    Communication pattern:
        All ranks make all groups, in the same order.
    """
    ranks = sorted(rank for row in every for rank in row)
    with awaiting_peers("start", ranks.index(dist.get_rank()), len(ranks)):
        made = [dist.new_group(list(row), timeout=timeout, **options) for row in every]
    return next(group for group in made if isinstance(group, dist.ProcessGroup))


def gather_text(
    text: str, transport: base.Transport, device: torch.device, until: str = "start"
) -> list[str]:
    """Return every worker's text, in worker order, without pickle.

    Args:
        text: this worker's.
        transport: to the other workers.
        device: one that it can send from.
        until: what the others have yet to do before they send, for ``awaiting_peers``.
    """
    with awaiting_peers(until, transport.worker, transport.workers):
        texts = transport.fulfil(Gather((_encoded(text, device),), (MAX_TEXT,)))
    return [_decoded(payload[0]) for payload in texts]


def broadcast_text(
    text: str | None,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    purpose: str = "a controller's decision",
) -> str:
    """Return worker 0's text on all workers of the group, without pickle.

    Args:
        text: worker 0's; ignored on the others.
        device: one that the group's backend can send from: a GPU with NCCL.
        group: of the workers; None is the default group.
        purpose: what is communicated, for error messages.

    Communication pattern:
        Two broadcasts: the length in bytes, as int64, and the text in UTF-8.

    Raises:
        PeerError: a peer has died or hangs.
        ValueError: on all workers, a text of more than ``MAX_TEXT`` bytes.
    """
    if not dist.is_initialized():
        return text or ""
    own, worker = _encoded(text or "", device), dist.get_rank(group)
    source = 0 if group is None else dist.get_process_group_ranks(group)[0]
    announced = torch.tensor([own.numel()], dtype=torch.int64, device=device)
    with naming_peers("broadcast", purpose, worker, dist.get_world_size(group)):
        dist.broadcast(announced, src=source, group=group)
        length = int(announced)
        if not 0 <= length <= MAX_TEXT:
            raise ValueError(
                f"Worker 0 announces a text of {length:,} bytes, where 0..{MAX_TEXT:,} are "
                f"possible."
            )
        data = own if worker == 0 else own.new_empty(length)
        if length:
            dist.broadcast(data, src=source, group=group)
    return _decoded(data)


def _encoded(text: str, device: torch.device) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)


def _decoded(data: Tensor) -> str:
    return bytes(data.tolist()).decode(errors="replace")


PAUSE = 0.1  # seconds; the threads need the interpreter's lock for microseconds


def let_gloo_finish() -> None:
    """Wait at exit until Gloo's threads have released their tensors.

    They need the interpreter's lock for that. If it is already finalising, the process aborts
    ("terminate called without an active exception", SIGABRT) after a successful run, and torchrun
    would restart all workers. That the group has been destroyed does not help while DDP's reducer
    still holds it (https://github.com/pytorch/pytorch/pull/179291).
    """
    time.sleep(PAUSE)


def register() -> None:
    """Register the exit handler (idempotent)."""
    atexit.unregister(let_gloo_finish)
    atexit.register(let_gloo_finish)
