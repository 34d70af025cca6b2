"""IndependentSparsifier: base of methods with elements drawn by each worker for itself."""

from __future__ import annotations

import abc
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_gc.compressors.base import Codec
from lightning_gc.compressors.sparsifiers.position_draws import by_hash, positions
from lightning_gc.compressors.sparsifiers.topk_selection import DensitySparsifier
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.elias_fano import check_count
from lightning_gc.core.flow import Payload
from lightning_gc.core.search_space import Range
from lightning_gc.core.wire import Field


@dataclass(frozen=True)
class IndependentSparsifier(DensitySparsifier, Codec):
    """Sends elements that a worker draws by itself, and the seed from which positions follow."""

    traits = replace(DensitySparsifier.traits, space=(Range("density", 1e-3, 0.5, scale="log"),))

    @abc.abstractmethod
    def how_many(self, numel: int, seed: int) -> int:
        """Return how many of ``numel`` elements are sent."""

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        chosen, seed = self.drawn(buffer, bucket)
        values = buffer[chosen]  # (k,) buffer.dtype
        buffer.index_fill_(0, chosen, 0)
        return values, seed

    def drawn(self, buffer: Tensor, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Return a worker's positions, ``(k,)``, and the seed that they follow from, ``(1,)``."""
        seed = bucket.generator_seed(shared=False)
        k = self.how_many(buffer.numel(), seed)
        chosen = positions(buffer.numel(), k, seed, buffer.device)
        return chosen, torch.full((1,), seed, dtype=torch.int64, device=buffer.device)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        values, seed = payload
        check_count(values.numel(), out.numel())
        chosen = self._drawn(out.numel(), values.numel(), seed)
        out.index_add_(0, chosen, values.to(out.dtype), alpha=scale)

    def _drawn(self, numel: int, k: int, seed: Tensor) -> Tensor:
        """Return the sender's positions. From any seed they are in range and different."""
        if seed.device.type == "cpu":
            return positions(numel, k, int(seed), seed.device)
        return by_hash(numel, k, seed, seed.device)  # the host does not wait for the seed

    def sent(self, payload: Payload, numel: int) -> int:
        return payload[0].numel()


SEED = Field("seed", torch.int64, 1)
"""From which positions follow, in any payload."""
