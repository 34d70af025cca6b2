"""About the k largest magnitudes, by a threshold estimated from a sample: no sorting.

256 elements of the sample are expected to be among the k largest, but it has at most a hundredth of
the tensor, or 65,536 if that is more. Its quantile is the threshold, which k ± 6 %·sqrt(256/h)
elements reach with h such elements. If too few reach it, it is lowered, a few times at most; if too
many do, the k largest are sought among those alone.

Reference:
    Lin et al., "Deep Gradient Compression", ICLR 2018, and its code, which lowers the threshold
    by the same factor, up to ten times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gc.coding import payload_validation
from lightning_gc.compressors.sparsifiers import topk_selection

HITS = 256  # elements of the sample that are expected to be among the k largest
CORRECTIONS = 4  # how often the threshold is lowered at most, each time by a pass over the tensor
FACTOR = 0.8  # by what it is lowered, and the share of k below which too few elements reach it


def about_largest(buffer: Tensor, k: int, step: int) -> Tensor:
    """Return the ascending positions of the c largest magnitudes, zeros excluded, for some c ≤ k.

    c is at least ``rank(k, numel)``, but for zeros; and at least 0.8·k if the sample is like the
    tensor. For an accelerator the host waits once, or three times if too few reach the threshold.
    Every ``stride(k, numel)``-th element is in the sample, of which the first one moves on by one
    with every ``step``.
    """
    if not k:
        return torch.empty(0, dtype=torch.int64, device=buffer.device)
    apart = stride(k, buffer.numel())
    sample = buffer[step % apart :: apart].abs()
    lowest = topk_selection.smallest(buffer)
    reached = topk_selection.kth_largest(sample, rank(k, buffer.numel()))
    threshold = reached.clamp_min(lowest)  # NaN stays NaN, which all elements reach
    found = topk_selection.reaching(buffer, threshold)
    free = payload_validation.on_host(buffer)  # to look: for an accelerator the host waits
    for _ in range(CORRECTIONS if free else 1):
        if found.numel() >= FACTOR * k or (free and threshold <= lowest):
            break
        threshold = _lowered(buffer, threshold, lowest, k, 1 if free else CORRECTIONS)
        found = topk_selection.reaching(buffer, threshold)
    return topk_selection.best(buffer, found, k)


def _lowered(buffer: Tensor, threshold: Tensor, lowest: float, k: int, times: int) -> Tensor:
    """Return the threshold lowered up to so many times, until enough elements reach it."""
    lowered = [threshold.mul(FACTOR**i).clamp_min(lowest) for i in range(1, times + 1)]
    if times > 1:
        magnitudes = buffer.abs()
        numbers = torch.stack([(magnitudes >= each).sum() for each in lowered]).tolist()
        for each, number in zip(lowered, numbers, strict=True):
            if number >= FACTOR * k:
                return each
    return lowered[-1]


def stride(k: int, numel: int) -> int:
    """Return how far apart elements of the sample are.

    An odd number, or the sample would be from a few columns of a matrix with an even row length.
    """
    most = max(numel // 100, 1 << 16)
    wanted = -(-HITS * numel // max(1, k))
    apart = max(1, numel // max(1, min(most, wanted)))
    return apart - 1 + apart % 2


def rank(k: int, numel: int) -> int:
    """Return how many elements of the sample reach the threshold, and of the tensor at least."""
    return max(1, round(k * (numel // stride(k, numel)) / max(1, numel)))
