"""Positions drawn at random without replacement."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_SPARSE = 0.2  # of all elements: above that a permutation takes less time


def positions(numel: int, k: int, generator: torch.Generator) -> Tensor:
    """Return k different positions below ``numel``, ``(k,)`` int64; all sets are equally likely.

    A permutation of all positions is slow. If few are wanted, the host draws somewhat more, with
    replacement, and keeps k of those that differ, without preferring any position.
    """
    device = generator.device
    if not k:
        return torch.empty(0, dtype=torch.int64, device=device)
    if device.type != "cpu" or k > _SPARSE * numel:
        return torch.randperm(numel, generator=generator, device=device)[:k]
    expected = -numel * math.log1p(-k / numel)  # draws until k differ, on average
    draws = int(expected + 6 * math.sqrt(expected)) + 8
    while True:
        drawn = torch.randint(numel, (draws,), generator=generator)
        found = torch.from_numpy(np.unique(drawn.numpy()))
        if found.numel() >= k:
            return found[torch.randperm(found.numel(), generator=generator)[:k]]
