"""Draw distinct positions: the first values of a permutation that follows from a key and a step.

The permutation of ``range(n)`` has six rounds. A round splits a position x into ``l = x >> t`` and
the low t bits r, with ``2^t ≈ √n`` and ``a = n >> t``. It moves l by a hash of r, modulo a, and r
by a hash of l. Positions of an incomplete last row, ``l ≥ a``, stay. Then all positions are moved
by a random number, modulo n. Each of these can be undone, for every n, so positions are distinct
without a sort, a search or a loop of unknown length.

Only whole numbers are computed, so all devices draw the same. Devices' own generators differ.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

ROUNDS = 6
_LOW = (1 << 32) - 1
_Number = TypeVar("_Number", int, Tensor)


def shift_of(numel: int) -> int:
    """Return t, the bits of the low part of a position below ``numel``."""
    return max(1, (numel - 1).bit_length() // 2)


def first(numel: int, k: int, key: int | Tensor, device: torch.device, *, step: int = 0) -> Tensor:
    """Return k distinct positions below ``numel``, ``(k,)`` int64. The host does not wait.

    Args:
        numel: n, at least k and below 2⁴⁷.
        k: how many.
        key: decides the permutation, with ``step``; a number of 64 bits, or a tensor of one int64.
        device: of the result.
        step: another permutation for each step.

    Example:
        >>> first(10, 3, 7, torch.device("cpu")).unique().numel()
        3
    """
    x = torch.arange(k, device=device)
    if isinstance(key, Tensor):
        words: list[int] | Tensor = word(key.view(1), step, torch.arange(3 * ROUNDS, device=device))
    else:
        words = [word(key, step, index) for index in range(3 * ROUNDS)]
    t = shift_of(numel)
    a = numel >> t
    for i in range(ROUNDS):
        one, two, three = words[3 * i], words[3 * i + 1], words[3 * i + 2]
        high, low = x >> t, x & ((1 << t) - 1)
        moved = high + ((((low ^ two) * (one | 1) & _LOW) * a) >> 32)
        moved = torch.where(moved >= a, moved - a, moved)
        turned = low ^ (((moved ^ one) * (two | 1) & _LOW) >> (32 - t))
        x = torch.where(high < a, (moved << t) | turned, x)
        # Not three * numel: above 2^31 elements that is more than int64 holds.
        x = x + ((three * (numel >> 16) + (three * (numel & 0xFFFF) >> 16)) >> 16)
        x = torch.where(x >= numel, x - numel, x)
    return x


def word(key: int | _Number, step: int, index: _Number) -> _Number:
    """Return 32 random bits for a key, a step and an index, as a number that is not negative."""
    low, high = key & _LOW, (key >> 32) & _LOW
    return _mixed(
        _mixed(low ^ ((index + 1) * 0x9E3779B9 & _LOW)) ^ (high + step * 0x85EBCA6B & _LOW)
    )


def _mixed(x: _Number) -> _Number:
    """Return a permutation of 32-bit numbers in which each bit depends on all."""
    x = x * 0x7FEB352D & _LOW
    x = x ^ (x >> 15)
    x = x * 0x846CA68B & _LOW
    return x ^ (x >> 16)
