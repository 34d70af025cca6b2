"""Position draws: k different positions that follow from a seed alone, whatever the device."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_SPARSE = 0.2  # of all elements: above that a permutation takes less time on the host
_STEP, *_FACTORS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # splitmix64's
_LOW = {shift: (1 << (64 - shift)) - 1 for shift in (27, 30, 31)}


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

    The hash of i is the i-th number of splitmix64, which are all different, so nothing is left to
    how a device breaks ties.
    """
    words = torch.arange(numel, device=device).mul_(_STEP).add_(seed)  # modulo 2^64
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        words.bitwise_xor_((words >> shift).bitwise_and_(_LOW[shift])).mul_(factor)
    words.bitwise_xor_((words >> 31).bitwise_and_(_LOW[31]))
    return words.topk(k).indices


def on_host(numel: int, k: int, generator: torch.Generator) -> Tensor:
    """Return them from the host's generator, which is the same everywhere.

    A permutation of all positions is slow. If few are wanted, this draws somewhat more, with
    replacement, and keeps k of those that differ, without preferring any position.
    """
    if k > _SPARSE * numel:
        return torch.randperm(numel, generator=generator)[:k]
    expected = -numel * math.log1p(-k / numel)  # draws until k differ, on average
    draws = int(expected + 6 * math.sqrt(expected)) + 8
    while True:
        drawn = torch.randint(numel, (draws,), generator=generator)
        found = torch.from_numpy(np.unique(drawn.numpy()))
        if found.numel() >= k:
            return found[torch.randperm(found.numel(), generator=generator)[:k]]
