"""Point-to-point all-to-all for Gloo: isend and irecv in pieces, all in flight at once.

Gloo's all-to-all, and its all-gather of two workers, send a message in one write, during which
little is received. With 4 MB between two workers they took 1.5 to 1.9 times as long as the link
needs; in pieces it is 1.05 to 1.1 (`benchmarks/links.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

PIECE = 1 << 18
"""Bytes. Smaller pieces cost more handshakes, about 200 bytes each; larger ones are slower."""


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
    under_way: list[dist.Work | None] = []
    for start in range(0, max(t.numel() for t in (*outgoing, *incoming)), PIECE):
        for apart in range(1, workers):  # all workers send to different ones at the same time
            to, source = (me + apart) % workers, (me - apart) % workers
            arriving = incoming[source][start : start + PIECE]
            leaving = outgoing[to][start : start + PIECE]
            if arriving.numel():
                under_way.append(dist.irecv(arriving, ranks[source], group))
            if leaving.numel():
                under_way.append(dist.isend(leaving, ranks[to], group))
    incoming[me].copy_(outgoing[me])
    for each in under_way:
        if each is not None:  # None outside the group
            each.wait()
