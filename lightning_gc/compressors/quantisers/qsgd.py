"""QSGD: send each element as a few bits, rounded at random so that it is unbiased."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding import payload_validation
from lightning_gc.coding.bit_packing import packed_bytes
from lightning_gc.coding.wire import Field, Wire
from lightning_gc.compressors.base import Codec
from lightning_gc.compressors.bounds import Variance
from lightning_gc.compressors.quantisers.blockwise_8bit import BLOCK_SIZES, check_block_size
from lightning_gc.compressors.traits import Knob, Traits
from lightning_gc.flow import Payload
from lightning_gc.kernels.dequantise import dequantise
from lightning_gc.kernels.quantise import in_blocks, pieces, quantise
from lightning_gc.search_space import Range

BITS = Traits(
    kind="quantiser",
    unbiased=True,
    knob=Knob("bits", low=2, high=16, scale="linear", integer=True),
    space=(Range("bits", 2, 8, integer=True),),
)
"""An unbiased quantiser with a field ``bits``, the sign included."""


@dataclass(frozen=True)
class QSGD(Codec):
    """Round each element at random to one of s = 2^(bits−1) − 1 levels of its block's norm.

    ``C(x)_i = norm · sign(x_i) · ξ_i / s``, where ξ_i is one of the two whole numbers around
    ``s·|x_i| / norm``, drawn so that ``E C(x) = x``.

    Args:
        bits: 2..16 bits an element, the sign included. Lower means more compression.
        block_size: elements that share one norm. Smaller means less error and more norms to send.
        norm: ``"max"`` (largest magnitude; less error) or ``"l2"`` (the paper's; sparser codes).

    Codes are packed without padding. For 4 bits in blocks of 512 an element takes 4.06 bits.

    Raises:
        ValueError: ``bits`` outside 2..16, ``block_size`` below 1, an unknown ``norm``.

    Example:
        >>> from lightning_gc import QSGD
        >>> QSGD(bits=3).at(8)
        QSGD(bits=8, block_size=512, norm='max')

    Reference:
        Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and
        Encoding", NeurIPS 2017.
    """

    bits: int = 4
    block_size: int = 512
    norm: Literal["max", "l2"] = "max"

    traits = replace(BITS, space=(*BITS.space, BLOCK_SIZES))

    def __post_init__(self) -> None:
        check_bits("QSGD", self.bits)
        check_block_size("QSGD", self.block_size)
        if self.norm not in ("max", "l2"):
            raise ValueError(f"QSGD(norm={self.norm!r}): use 'max' or 'l2'.")

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        size = self._block_size(buffer.numel())
        norms = self._norms(buffer, size)  # (b,) float32
        noise = bucket.generator(shared=False)
        return quantise(buffer, norms, size, self.bits, noise), norms

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        size = self._block_size(out.numel())
        packed, norms = payload
        dequantise(packed, norms, size, self.bits, out, scale, payload_validation.codes)

    def _block_size(self, numel: int) -> int:
        return min(self.block_size, max(1, numel))

    def _norms(self, buffer: Tensor, size: int) -> Tensor:
        # Norms can be cut whatever the codes' width: 1 stands for "narrower than a byte".
        parts = [self._lengths(in_blocks(buffer[i], size)) for i, _ in pieces(buffer, size, 1)]
        return torch.cat(parts).float()

    def _lengths(self, blocks: Tensor) -> Tensor:
        if not blocks.numel():
            return blocks.new_zeros(blocks.shape[0])
        largest = _largest(blocks)
        if self.norm == "max":
            return largest
        # Squares of 1e-30 and 1e30 leave float32's range; those of x / max do not.
        unit = blocks / largest.where(largest > 0, 1.0).view(-1, 1)
        lengths: Tensor = torch.linalg.vector_norm(unit, dim=1)
        return largest * lengths

    def bound(self, numel: int) -> Variance:
        """Return ω = min(d/s², √d/s) for the L2 norm (the paper's), d/(4s²) for the max norm."""
        d, s = min(self.block_size, numel), 2 ** (self.bits - 1) - 1
        if self.norm == "l2":
            return Variance(min(d / s**2, math.sqrt(d) / s))
        return Variance(d / (4 * s**2))

    def wire(self, numel: int) -> Wire:
        codes, blocks = packed_bytes(numel, self.bits), -(-numel // self._block_size(numel))
        return (
            Field("codes", torch.uint8, codes, note=f"level + s, {self.bits} bits each"),
            Field("norms", torch.float32, blocks, note="per block"),
        )

    @classmethod
    def examples(cls) -> tuple[QSGD, ...]:
        return (cls(4), cls(2, 7), cls(3, 64, "l2"), cls(9, 512, "l2"), cls(16))


def check_bits(name: str, bits: float) -> None:
    """Refuse a number of bits that codes cannot have."""
    if bits not in range(2, 17):
        raise ValueError(
            f"{name}(bits={bits!r}): bits counts the sign and must be a whole number in 2..16; use "
            f"4 for about an eighth of the bytes of float32."
        )


def _largest(blocks: Tensor) -> Tensor:
    """Return the largest magnitude of each row."""
    if blocks.device.type == "cpu":  # magnitudes stay in the cache, where this is vectorised
        return blocks.abs().amax(dim=1)
    low, high = blocks.aminmax(dim=1)  # no tensor of magnitudes
    return torch.maximum(low.neg_(), high)
