"""Digest: 8 bytes by which workers see whether they hold the same bits; ReplicaError if not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_COLUMNS = 512  # words of a row; so many sums stay in the fastest cache
_ODD = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # splitmix64's
_LOW = {shift: (1 << (64 - shift)) - 1 for shift in (27, 30, 31)}


class ReplicaError(RuntimeError):
    """Workers that must hold the same bits do not."""


def digest(*tensors: Tensor) -> Tensor:
    """Return ``(1,)`` int64 that depends on every bit of the tensors, and on where it is.

    Words of 8 bytes are laid out as a matrix, whose rows and columns are summed modulo 2^64, in one
    pass each, on any device with the same result; the sums are then mixed. So it always differs if
    up to three words do, but for one chance in 2^64. A checksum, not a seal: whoever means to
    deceive can find other bits of the same digest.
    """
    sums = [part for tensor in tensors for part in _sums(tensor)]
    mixed = torch.cat(sums)
    mixed += torch.arange(1, mixed.numel() + 1, device=mixed.device) * _ODD[0]
    for shift, factor in ((30, _ODD[1]), (27, _ODD[2])):
        mixed = (mixed ^ (mixed >> shift & _LOW[shift])) * factor
    return (mixed ^ (mixed >> 31 & _LOW[31])).sum().view(1)


def _sums(tensor: Tensor) -> list[Tensor]:
    """Return sums of rows and columns, and the words and bytes that fill no row."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.data_ptr() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    words = flat[:whole].view(torch.int64)
    rows = words.numel() // _COLUMNS
    matrix = words[: rows * _COLUMNS].view(rows, _COLUMNS)
    rest = [words[rows * _COLUMNS :], flat[whole:].to(torch.int64)]
    if not rows:
        return rest
    if matrix.device.type == "cpu":  # torch takes twice as long for sums over columns
        down = torch.from_numpy(np.add.reduce(matrix.numpy(), axis=0))
    else:
        down = matrix.sum(0)
    return [*rest, matrix.sum(1), down]


def check_same(digests: Sequence[int], what: str, why: str) -> None:
    """Raise ReplicaError if workers' digests differ; it names those that differ from most.

    Args:
        digests: one per worker.
        what: the thing that must be the same.
        why: what can have happened, and what to do.
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
