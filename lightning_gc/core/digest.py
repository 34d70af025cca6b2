"""Compare replicas by an 8-byte digest; raise ReplicaError if workers hold different bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

_COLUMNS, _ROWS = 509, 128  # 509 is prime: one flipped bit of a position never moves 509 words
_ODD = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # splitmix64's
_LOW = {shift: (1 << (64 - shift)) - 1 for shift in (27, 30, 31)}


class ReplicaError(RuntimeError):
    """Workers hold different bits of a tensor that must be equal on all workers."""


def digest(*tensors: Tensor) -> Tensor:
    """Return ``(1,)`` int64 that depends on every bit of the tensors and on its position.

    All devices give the same digest, in one pass over memory. Words of 8 bytes form blocks of 128
    rows and 509 columns. The columns of each block are summed modulo 2^64. The matrix of these sums
    is summed by rows and by columns, and the results are mixed.

    A single change is always detected. Several changes are missed with a probability of 2^-64. A
    moved value is missed only if it moves by a multiple of 4,072 bytes within half a megabyte. The
    digest does not protect against deliberate changes.
    """
    parts = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    flat = parts[0] if len(parts) == 1 and parts[0].data_ptr() % 8 == 0 else torch.cat(parts)
    sums = _column_sums(flat)
    mixed = torch.cat([sums.sum(1), sums.sum(0)])
    mixed += torch.arange(flat.numel(), flat.numel() + mixed.numel(), device=flat.device) * _ODD[0]
    for shift, factor in ((30, _ODD[1]), (27, _ODD[2])):
        mixed = (mixed ^ (mixed >> shift & _LOW[shift])) * factor
    return (mixed ^ (mixed >> 31 & _LOW[31])).sum().view(1)


def _column_sums(flat: Tensor) -> Tensor:
    """Return sums ``(blocks, columns)``, int64. The last two blocks are partial: rows, then words.

    The last but one holds the remaining full rows, the last a single row padded with zeros.
    """
    whole = flat.numel() // (8 * _COLUMNS) * 8 * _COLUMNS
    rows = flat[:whole].view(torch.int64).view(-1, _COLUMNS)
    cut = len(rows) // _ROWS * _ROWS
    rest = pad(flat[whole:], (0, 8 * _COLUMNS - (flat.numel() - whole)))
    parts = [rows[:cut].view(-1, _ROWS, _COLUMNS), rows[None, cut:], rest.view(torch.int64)]
    return torch.cat([_sum_down(parts[0]), _sum_down(parts[1]), parts[2][None]])


def _sum_down(blocks: Tensor) -> Tensor:
    if blocks.device.type == "cpu":  # torch takes twice as long as NumPy
        return torch.from_numpy(np.add.reduce(blocks.numpy(), axis=1))
    return blocks.sum(1)


def check_same(digests: Sequence[int], what: str, why: str) -> None:
    """Raise ReplicaError if workers' digests differ; name the workers outside the majority.

    Args:
        digests: one per worker.
        what: the tensors that must be equal, for the message.
        why: sentences on possible causes and the fix, for the message.
    """
    counts = Counter(digests).most_common()
    if len(counts) == 1:
        return
    most, number = counts[0]
    odd = [worker for worker, each in enumerate(digests) if each != most]
    if 2 * number > len(digests):
        who = f"worker{'s'[: len(odd) > 1]} {', '.join(map(str, odd))} differ{'s'[len(odd) > 1 :]}"
        who += f" from the other {number}"
    else:
        groups = [[w for w, each in enumerate(digests) if each == value] for value, _ in counts]
        who = "no majority agrees: " + " | ".join(", ".join(map(str, group)) for group in groups)
    raise ReplicaError(f"Workers hold different bits of {what}: {who}. {why}")
