"""RandomSparsifier: base of methods whose elements all workers draw alike."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding import payload_validation
from lightning_gc.coding.wire import Field, Wire
from lightning_gc.compressors.base import Codec
from lightning_gc.compressors.sparsifiers import random_indices, sparse_payload
from lightning_gc.compressors.sparsifiers.sparse_codec import DENSITY
from lightning_gc.flow import Payload
from lightning_gc.search_space import Range


@dataclass(frozen=True)
class RandomSparsifier(Codec):
    """Sends k elements drawn from a seed that workers share: no positions."""

    density: float = 0.01

    traits = replace(DENSITY, linear=True, space=(Range("density", 1e-3, 0.5, scale="log"),))

    def __post_init__(self) -> None:
        sparse_payload.check_density(type(self).__name__, self.density)

    def drawn(self, numel: int, bucket: Bucket) -> Tensor:
        """Return the positions that all workers draw for this tensor in this step, ``(k,)``."""
        k = sparse_payload.count(self.density, numel)
        return random_indices.positions(numel, k, bucket.generator(shared=True))

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        chosen = self.drawn(buffer.numel(), bucket)
        values = buffer[chosen]  # (k,) buffer.dtype
        buffer[chosen] = 0
        return (values,)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        chosen = self.drawn(out.numel(), bucket)
        payload_validation.lengths(payload, chosen.numel())
        out.index_add_(0, chosen, payload[0].to(out.dtype), alpha=scale)

    def wire(self, numel: int) -> Wire:
        return (Field("values", torch.float32, sparse_payload.count(self.density, numel)),)

    def sent(self, payload: Payload, numel: int) -> int:
        return payload[0].numel()
