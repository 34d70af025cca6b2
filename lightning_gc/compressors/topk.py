"""Send the elements of greatest magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.compressors import checks, sparse
from lightning_gc.compressors.compressor import Codec, Contraction, Knob
from lightning_gc.compressors.ranges import Range
from lightning_gc.flow import Payload

_DTYPES: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}
_ROUNDING = 2.0**-8  # of bfloat16, relative


@dataclass(frozen=True)
class TopK(Codec):
    """Send the k = density·numel elements of greatest magnitude; keep the others as the error.

    ``C(x)_i = x_i`` if ``|x_i|`` is among the k largest, else 0.

    Args:
        density: share of elements sent, in (0, 1]. Lower means more compression, more error.
        value_dtype: of values on the wire; what ``"bfloat16"`` rounds off stays in the error.

    Wire format:
        ``values     # (k,) value_dtype``
        ``positions  # (coded_bytes(k, numel),) uint8``, Elias-Fano coded, ascending: at most
        ``2 + log2(numel/k)`` bits each and a byte or two. At density 1 % that makes 40.6 bits a
        sent element, or 24.6 with bfloat16.

    Raises:
        ValueError: ``density`` outside (0, 1], an unknown ``value_dtype``.

    Example:
        >>> from lightning_gc import TopK
        >>> TopK(density=0.01).at(0.1).density
        0.1

    Reference:
        Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017.
        Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """

    density: float = 0.01
    value_dtype: Literal["float32", "bfloat16"] = "float32"

    kind = "sparsifier"
    knob = Knob("density", low=1e-5, high=1.0)
    space = (Range("density", 1e-4, 0.1, scale="log"),)

    def __post_init__(self) -> None:
        sparse.check_density("TopK", self.density)
        if self.value_dtype not in _DTYPES:
            raise ValueError(
                f"TopK(value_dtype={self.value_dtype!r}): use 'float32' or 'bfloat16'. float16 "
                f"would lose gradients below 6e-8 for good."
            )

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take the k largest magnitudes."""
        k = sparse.count(self.density, buffer.numel())
        dtype = _DTYPES[self.value_dtype]
        return sparse.take(buffer, sparse.largest(buffer, k), dtype)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        """Add k elements."""
        k = sparse.count(self.density, out.numel())
        checks.lengths(payload, k, sparse.index_bytes(k, out.numel()))
        values, packed = payload
        sparse.add(values, packed, out, scale)

    def bound(self, numel: int) -> Contraction:
        """Return δ = k / numel, reached when all magnitudes are equal; less what is rounded off."""
        kept = 1.0 if self.value_dtype == "float32" else 1 - _ROUNDING**2
        return Contraction(kept * sparse.count(self.density, numel) / numel)

    def sent(self, payload: Payload, numel: int) -> int:
        """Return k."""
        return payload[0].numel()

    @classmethod
    def examples(cls) -> tuple[TopK, ...]:
        """A sparse and a dense one, and one that rounds."""
        return (cls(0.1), cls(1.0), cls(0.1, value_dtype="bfloat16"))
