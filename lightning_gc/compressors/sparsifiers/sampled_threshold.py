"""About the k largest magnitudes, by a threshold estimated from a sample: no sorting.

The sample has so many elements that 256 of them are expected to be among the k largest, but at most
a hundredth of the tensor, or 65,536 where that is more. Its quantile is the threshold, which a
random number of elements reaches: k ± 6 % with 256 in the sample, k ± 6 %·sqrt(256/h) with h. Where
too few reach it, the threshold is lowered, a few times at most; where too many do, the k largest
are sought among those alone.

Reference:
    Lin et al., "Deep Gradient Compression", ICLR 2018, and its code, which lowers the threshold
    by the same factor, up to ten times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gc.compressors.sparsifiers import topk_selection

HITS = 256
"""Elements of the sample that are expected to be among the k largest."""

CORRECTIONS = 4
"""How often the threshold is lowered at most; each time costs a pass over the tensor."""

FACTOR = 0.8
"""By what it is lowered, and the share of k below which too few elements reach it."""


def about_largest(buffer: Tensor, k: int, step: int) -> Tensor:
    """Return the ascending positions of the c largest magnitudes, for some c of at most k.

    At least ``rank(k, numel)``, but for zeros, which are never among them. Where the sample is
    like the tensor, ``0.8·k <= c``. On an accelerator the host waits for c.

    Args:
        buffer: ``(numel,)``; it stays as it is.
        k: the most positions to return.
        step: every ``stride(k, numel)``-th element is in the sample; the first one moves on by one
            with every step, the same on every device.
    """
    if not k:
        return torch.empty(0, dtype=torch.int64, device=buffer.device)
    apart = stride(k, buffer.numel())
    sample = buffer[step % apart :: apart].abs()
    lowest = topk_selection.smallest(buffer)
    reached = topk_selection.kth_largest(sample, rank(k, buffer.numel()))
    threshold = reached.clamp_min(lowest)  # NaN stays NaN, which all elements reach
    found = topk_selection.reaching(buffer, threshold)
    for _ in range(CORRECTIONS):
        if found.numel() >= FACTOR * k or threshold <= lowest:
            break
        threshold = threshold.mul(FACTOR).clamp_min(lowest)
        found = topk_selection.reaching(buffer, threshold)
    return topk_selection.best(buffer, found, k)


def stride(k: int, numel: int) -> int:
    """Return how far apart elements of the sample are.

    An odd number, so that in a matrix with an even row length the sample is not from a few columns.
    """
    most = max(numel // 100, 1 << 16)
    apart = max(1, numel // min(most, -(-HITS * numel // k)))
    return apart - 1 + apart % 2


def rank(k: int, numel: int) -> int:
    """Return how many elements of the sample reach the threshold, and of the tensor at least."""
    return max(1, round(k * (numel // stride(k, numel)) / numel))
