"""Position draws: k different positions that follow from a seed alone, whatever the device."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lightning_gc.kernels.splitmix import words

_SPARSE = 0.2  # of all elements: above that a permutation takes less time on the host


def positions(numel: int, k: int, seed: int, device: torch.device) -> Tensor:
    """Return k different positions below ``numel``, ``(k,)`` int64; all sets are equally likely.

    Not by a generator of the device: on GPUs of different models, or slices of one, a generator of
    one seed makes different permutations of more elements than the GPU has threads, and workers
    that write values at positions of their own part silently.
    """
    if not k:
        return torch.empty(0, dtype=torch.int64, device=device)
    if device.type == "cpu":
        return on_host(numel, k, torch.Generator().manual_seed(seed))
    return by_hash(numel, k, seed, device)


def by_hash(numel: int, k: int, seed: int | Tensor, device: torch.device) -> Tensor:
    """Return the k positions with the largest hashes, in whole numbers: the host does not wait.

    They are all different, so nothing is left to how a device breaks ties.
    """
    return words(numel, seed, device).topk(k).indices


def on_host(numel: int, k: int, generator: torch.Generator) -> Tensor:
    """Return them from the host's generator, which is the same everywhere.

    A permutation of all positions is slow. If few are wanted, this draws somewhat more, with
    replacement, and keeps k of those that differ, without preferring any position.
    """
    if k > _SPARSE * numel:
        return torch.randperm(numel, generator=generator, device="cpu")[:k]
    expected = -numel * math.log1p(-k / numel)  # draws until k differ, on average
    draws = int(expected + 6 * math.sqrt(expected)) + 8
    while True:
        drawn = torch.randint(numel, (draws,), generator=generator, device="cpu")
        found = torch.from_numpy(np.unique(drawn.numpy()))
        if found.numel() >= k:
            return found[torch.randperm(found.numel(), generator=generator, device="cpu")[:k]]
