"""Layouts: where parameters lie in buckets, as tensors on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket


class Layouts:
    """Keeps starts and lengths of a bucket's parameters, for each layout of a bucket.

    Numbers that come from the host make it wait for the device, so they are copied once: layouts
    change when DDP rebuilds its buckets, after the first step.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def of(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Return starts and lengths of the parameters that are not empty, ``(n,)`` int64 each."""
        key = (bucket.grad.device, *bucket.shapes.items())
        if key not in self._known:
            spans = [(start, stop - start) for _, start, stop in bucket.spans() if stop > start]
            starts, lengths = (
                torch.tensor(spans, dtype=torch.int64, device=bucket.grad.device).t().contiguous()
            )
            self._known[key] = starts, lengths
        return self._known[key]
