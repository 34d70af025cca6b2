"""All-to-all over Gloo, point to point: isend and irecv in pieces, all in flight at once.

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

_Pending = list[tuple[dist.Work | None, int]]  # and the other worker


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
                under_way.append((dist.irecv(arriving, ranks[source], group), source))
            if leaving.numel():
                under_way.append((dist.isend(leaving, ranks[to], group), to))
    incoming[me].copy_(outgoing[me])
    _finish(under_way)


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
    firsts: _Pending = [(dist.irecv(arrived[i], ranks[i], group), i) for i in reversed(others)]
    under_way: _Pending = []
    for start in range(0, max(t.numel() for t in outgoing), PIECE):
        for to in others:  # all workers send to different ones at the same time
            leaving = outgoing[to][start : start + PIECE]
            if leaving.numel():
                under_way.append((dist.isend(leaving, ranks[to], group), to))
    wrong: Exception | None = None
    try:
        for first in firsts:
            source = first[1]
            _finish([first])
            try:
                pieces = -(-measure(source, arrived[source]) // PIECE)
            except Exception as error:
                wrong = wrong or error
                continue
            if pieces > 1:
                whole = arrived[source].new_zeros(pieces, PIECE)
                whole[0] = arrived[source]
                arrived[source] = whole.view(-1)
                rest = [(dist.irecv(each, ranks[source], group), source) for each in whole[1:]]
                under_way += rest
        _finish(under_way)
    except WaitError:
        if wrong is None:
            raise
    if wrong is not None:
        raise wrong
    return arrived


def _finish(under_way: _Pending) -> None:
    for work, peer in under_way:
        try:
            if work is not None:  # None outside the group
                work.wait()
        except RuntimeError as error:
            raise WaitError(peer, error) from error
