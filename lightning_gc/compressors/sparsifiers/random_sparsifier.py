"""RandomSparsifier: base of methods whose elements all workers draw alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding import payload_validation
from lightning_gc.coding.wire import Field, Wire
from lightning_gc.compressors.base import Codec
from lightning_gc.compressors.sparsifiers.density import DensitySparsifier
from lightning_gc.flow import Payload
from lightning_gc.search_space import Range

_SPARSE = 0.2  # of all elements: above that a permutation takes less time


@dataclass(frozen=True)
class RandomSparsifier(DensitySparsifier, Codec):
    """Sends k elements drawn from a seed that workers share: no positions."""

    traits = replace(
        DensitySparsifier.traits, linear=True, space=(Range("density", 1e-3, 0.5, scale="log"),)
    )

    def drawn(self, numel: int, bucket: Bucket) -> Tensor:
        """Return the positions that all workers draw for this tensor in this step, ``(k,)``."""
        return positions(numel, self.count(numel), bucket.generator(shared=True))

    def drawn_once(self, numel: int, bucket: Bucket) -> Tensor:
        """Return the same; a round draws them once, to encode, and keeps them to decode."""
        key = (self, numel, bucket.names)
        if key not in bucket.positions:
            bucket.positions[key] = self.drawn(numel, bucket)
        return bucket.positions[key]

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        chosen = self.drawn_once(buffer.numel(), bucket)
        values = buffer[chosen]  # (k,) buffer.dtype
        buffer.index_fill_(0, chosen, 0)
        return (values,)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        chosen = self.drawn_once(out.numel(), bucket)
        payload_validation.lengths(payload, chosen.numel())
        out.index_add_(0, chosen, payload[0].to(out.dtype), alpha=scale)

    def wire(self, numel: int) -> Wire:
        return (Field("values", torch.float32, self.count(numel)),)

    def sent(self, payload: Payload, numel: int) -> int:
        return payload[0].numel()


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
