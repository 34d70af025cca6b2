"""Send the elements of greatest magnitude."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.compressors import checks, sparse
from lightning_gc.compressors.compressor import Codec, Contraction, Knob
from lightning_gc.flow import Payload


@dataclass(frozen=True)
class TopK(Codec):
    """Send the k = density·numel elements of greatest magnitude; keep the others as the error.

    ``C(x)_i = x_i`` if ``|x_i|`` is among the k largest, else 0.

    Args:
        density: share of elements sent, in (0, 1]. Lower means more compression, more error.

    Wire format:
        ``values   # (k,) float32``
        ``indices  # (k * ceil(log2 numel) / 8,) uint8``, bit-packed positions, ascending.
        52 bits a sent element for a tensor of a million elements.

    Raises:
        ValueError: ``density`` outside (0, 1].

    Example:
        >>> from lightning_gc import TopK
        >>> TopK(density=0.01).at(0.1)
        TopK(density=0.1)

    Reference:
        Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017.
        Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """

    density: float = 0.01

    kind = "sparsifier"
    knob = Knob("density", low=1e-5, high=1.0)

    def __post_init__(self) -> None:
        sparse.check_density("TopK", self.density)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take the k largest magnitudes."""
        k = sparse.count(self.density, buffer.numel())
        indices = torch.topk(buffer.abs(), k, sorted=False).indices
        return sparse.take(buffer, indices.sort().values)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        """Add k elements."""
        k = sparse.count(self.density, out.numel())
        checks.lengths(payload, k, sparse.index_bytes(k, out.numel()))
        values, packed = payload
        sparse.add(values, packed, out, scale)

    def bound(self, numel: int) -> Contraction:
        """Return δ = k / numel, reached when all magnitudes are equal."""
        return Contraction(sparse.count(self.density, numel) / numel)

    def sent(self, payload: Payload, numel: int) -> int:
        """Return k."""
        return payload[0].numel()

    @classmethod
    def examples(cls) -> tuple[TopK, ...]:
        """A sparse and a dense one."""
        return (cls(0.1), cls(1.0))
