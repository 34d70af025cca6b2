"""RandomSparsifier: base of methods whose elements all workers draw alike."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_gc.compressors.base import Codec
from lightning_gc.compressors.sparsifiers.position_draws import positions
from lightning_gc.compressors.sparsifiers.topk_selection import DensitySparsifier
from lightning_gc.core import payload_validation
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Payload
from lightning_gc.core.search_space import Range
from lightning_gc.core.wire import Field, Wire


@dataclass(frozen=True)
class RandomSparsifier(DensitySparsifier, Codec):
    """Sends k elements drawn from a seed that workers share: no positions."""

    traits = replace(
        DensitySparsifier.traits, linear=True, space=(Range("density", 1e-3, 0.5, scale="log"),)
    )

    def drawn(self, numel: int, bucket: Bucket) -> Tensor:
        """Return the positions that all workers draw for this tensor in this step, ``(k,)``."""
        seed = bucket.generator_seed(shared=True)
        return positions(numel, self.count(numel), seed, bucket.grad.device)

    def drawn_once(self, numel: int, bucket: Bucket) -> Tensor:
        """Return the same; a round draws them once, to encode, and keeps them to decode."""
        key = (self, numel, bucket.names)
        if key not in bucket.cache:
            bucket.cache[key] = self.drawn(numel, bucket)
        return bucket.cache[key]

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
