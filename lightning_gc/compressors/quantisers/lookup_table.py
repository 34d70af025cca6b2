"""Lookup tables: what codes stand for, made once on the host and anew on each use on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


class LookupTable:
    """Returns the tensor that ``make`` makes of some arguments and a device; nobody may change it.

    Making it on the host takes longer than a small tensor's codes, so there it is kept. On a GPU it
    is not: another stream could read it before it is made.

    Example:
        >>> double = LookupTable(lambda count, device: torch.arange(count, device=device) * 2)
        >>> double(3, device=torch.device("cpu"))
        tensor([0, 2, 4])
    """

    def __init__(self, make: Callable[..., Tensor]) -> None:
        self.make = make
        self._kept = functools.cache(make)

    def __call__(self, *settings: int, device: torch.device) -> Tensor:
        """Return the table of these settings, there."""
        make = self._kept if device.type == "cpu" else self.make
        return make(*settings, device=device)
