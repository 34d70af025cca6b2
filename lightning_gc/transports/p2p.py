"""All-to-all and ring all-gather over Gloo, point to point: isend and irecv in pieces.

Gloo's all-to-all, and its all-gather of two workers, send a message in one write, during which
little is received. With 4 MB between two workers they took 1.5 to 1.9 times as long as the link
needs; in pieces it is 1.05 to 1.1 (`benchmarks/links.py`).

If more bytes arrive than the buffer holds, Gloo throws in another thread, and the process aborts.
Gloo accepts messages that are shorter than expected.
"""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from lightning_gc.transports.peer_error import WaitError

PIECE = 1 << 18
"""Bytes. Smaller pieces cost more handshakes, about 200 bytes each; larger ones are slower."""

_Pending = list[tuple[dist.Work | None, str]]  # and who else has to do with it


def swap(
    outgoing: Sequence[Tensor], incoming: Sequence[Tensor], group: dist.ProcessGroup | None
) -> None:
    """Send ``outgoing[i]`` to worker i and receive its message into ``incoming[i]``.

    Args:
        outgoing: one message per worker, ``(nbytes,)`` uint8; the worker's own is copied.
        incoming: one buffer per worker, as long as its message.
        group: the process group; None is the default group.
    """
    workers, me = len(outgoing), dist.get_rank(group)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    under_way: _Pending = []
    for start in range(0, max(t.numel() for t in (*outgoing, *incoming)), PIECE):
        for apart in range(1, workers):  # all workers send to different ones at the same time
            to, source = (me + apart) % workers, (me - apart) % workers
            arriving = incoming[source][start : start + PIECE]
            leaving = outgoing[to][start : start + PIECE]
            if arriving.numel():
                under_way.append((dist.irecv(arriving, ranks[source], group), _name(source)))
            if leaving.numel():
                under_way.append((dist.isend(leaving, ranks[to], group), _name(to)))
    incoming[me].copy_(outgoing[me])
    _finish(under_way)


def ring(own: Tensor, incoming: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Receive every worker's message into ``incoming``, each at its own length.

    A worker hands on to the next what it receives from the previous one, piece by piece. So each
    sends and receives less than all messages together. Sent to each other worker directly, one
    long message would hold all up: its sender would send it W - 1 times.

    Args:
        own: this worker's message, ``(nbytes,)`` uint8.
        incoming: one buffer per worker, as long as its message.
        group: the process group; None is the default group.
    """
    workers, me = len(incoming), dist.get_rank(group)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    after, before = (me + 1) % workers, (me - 1) % workers
    incoming[me].copy_(own)
    under_way: _Pending = []

    def send(piece: Tensor) -> None:
        under_way.append((dist.isend(piece, ranks[after], group), _name(after)))

    arriving = [
        (dist.irecv(piece, ranks[before], group), piece, sender)
        for sender in ((me - apart) % workers for apart in range(1, workers))
        for piece in _pieces(incoming[sender])
    ]
    for piece in _pieces(incoming[me]):
        send(piece)
    for work, piece, sender in arriving:
        _finish([(work, _name(before) + ", or for one that it hears from" * (workers > 2))])
        if sender != after:
            send(piece)
    _finish(under_way)


def _pieces(message: Tensor) -> tuple[Tensor, ...]:
    return message.split(PIECE) if message.numel() else ()


def swap_of_unknown_lengths(
    outgoing: Sequence[Tensor],
    measure: Callable[[int, Tensor], int],
    group: dist.ProcessGroup | None,
) -> list[Tensor]:
    """Send ``outgoing[i]`` to worker i; return what all sent here, padded with zeros.

    A message begins with its length. Every buffer has at least the size of a piece, so a worker
    that sends pieces cannot send too much.

    Args:
        outgoing: one message per worker, ``(nbytes,)`` uint8, not empty; the own one is returned.
        measure: given sender and first piece, returns a message's bytes. Its error is raised after
            the other messages, so that peers do not wait for this worker instead of the sender.
        group: the process group; None is the default group.
    """
    workers, me = len(outgoing), dist.get_rank(group)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    arrived = [outgoing[me].new_zeros(PIECE if i != me else 0) for i in range(workers)]
    arrived[me] = outgoing[me]
    others = [(me + apart) % workers for apart in range(1, workers)]
    firsts = [(dist.irecv(arrived[i], ranks[i], group), i) for i in reversed(others)]
    under_way: _Pending = []
    for start in range(0, max(t.numel() for t in outgoing), PIECE):
        for to in others:  # all workers send to different ones at the same time
            leaving = outgoing[to][start : start + PIECE]
            if leaving.numel():
                under_way.append((dist.isend(leaving, ranks[to], group), _name(to)))
    wrong: Exception | None = None
    try:
        for first, source in firsts:
            _finish([(first, _name(source))])
            try:
                pieces = -(-measure(source, arrived[source]) // PIECE)
            except Exception as error:
                wrong = wrong or error
                continue
            if pieces > 1:
                whole = arrived[source].new_zeros(pieces, PIECE)
                whole[0] = arrived[source]
                arrived[source] = whole.view(-1)
                under_way += [
                    (dist.irecv(each, ranks[source], group), _name(source)) for each in whole[1:]
                ]
        _finish(under_way)
    except WaitError:
        if wrong is None:
            raise
    if wrong is not None:
        raise wrong
    return arrived


def _name(worker: int) -> str:
    return f"worker {worker}"


def _finish(under_way: _Pending) -> None:
    for work, whom in under_way:
        try:
            if work is not None:  # None outside the group
                work.wait()
        except RuntimeError as error:
            raise WaitError(whom, error) from error
