"""RandomK: send k elements drawn at random, the same ones on every worker."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding.wire import Field, Wire
from lightning_gc.compressors.base import Codec
from lightning_gc.compressors.bounds import Contraction
from lightning_gc.compressors.sparsifiers import random_indices, sparse_payload
from lightning_gc.compressors.sparsifiers.sparse_codec import DENSITY
from lightning_gc.flow import Payload
from lightning_gc.search_space import Range


@dataclass(frozen=True)
class RandomK(Codec):
    """Send k = density·numel elements drawn without replacement from a seed that workers share.

    ``C(x)_i = x_i`` for i in a random set of size k, else 0. All workers draw the same set from
    (seed, parameter name, step), so no positions are sent and values can be all-reduced: 32 bits a
    sent element.

    Args:
        density: share of elements sent, in (0, 1]. Lower means more compression, more error.

    Raises:
        ValueError: ``density`` outside (0, 1].

    Example:
        >>> from lightning_gc import RandomK
        >>> RandomK(density=0.01).traits.linear
        True

    Reference:
        Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """

    density: float = 0.01

    traits = replace(DENSITY, linear=True, space=(Range("density", 1e-3, 0.5, scale="log"),))

    def __post_init__(self) -> None:
        sparse_payload.check_density("RandomK", self.density)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take the drawn elements."""
        indices = random_indices.shared(self.density, buffer.numel(), bucket)
        values = buffer[indices]  # (k,) buffer.dtype
        buffer[indices] = 0
        return (values,)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        """Draw the same set again and add k elements."""
        random_indices.put(
            payload, random_indices.shared(self.density, out.numel(), bucket), out, scale
        )

    def bound(self, numel: int) -> Contraction:
        """Return δ = k / numel, in expectation over the draw."""
        return Contraction(sparse_payload.count(self.density, numel) / numel)

    def wire(self, numel: int) -> Wire:
        """Return k values."""
        return (Field("values", torch.float32, sparse_payload.count(self.density, numel)),)

    def sent(self, payload: Payload, numel: int) -> int:
        """Return k."""
        return payload[0].numel()

    @classmethod
    def examples(cls) -> tuple[RandomK, ...]:
        """A sparse and a dense one."""
        return (cls(0.1), cls(1.0))
