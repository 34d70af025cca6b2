"""Send each element as a few bits, rounded at random so that the mean stays true."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding import payload_validation
from lightning_gc.coding.bit_packing import packed_bytes
from lightning_gc.compressors.base import Codec, Knob, Variance
from lightning_gc.flow import Payload
from lightning_gc.kernels.dequantise import dequantise
from lightning_gc.kernels.quantise import in_blocks, pieces, quantise
from lightning_gc.search_space import Choice, Range


@dataclass(frozen=True)
class QSGD(Codec):
    """Round each element at random to one of s = 2^(bits−1) − 1 levels of its block's norm.

    ``C(x)_i = norm · sign(x_i) · ξ_i / s``, where ξ_i is one of the two whole numbers around
    ``s·|x_i| / norm``, drawn so that ``E C(x) = x``.

    Args:
        bits: 2..16 bits an element, the sign included. Lower means more compression.
        block_size: elements that share one norm. Smaller means less error and more norms to send.
        norm: ``"max"`` (largest magnitude; less error) or ``"l2"`` (the paper's; sparser codes).

    Wire format:
        ``codes   # (numel * bits / 8,) uint8``, ``level + s``, packed to the bit: 3 bits cost 3.
        ``norms   # (ceil(numel / block_size),) float32``
        4.06 bits an element for 4 bits in blocks of 512.

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

    kind = "quantiser"
    unbiased = True
    knob = Knob("bits", low=2, high=16, scale="linear", integer=True)
    space = (Range("bits", 2, 8, integer=True), Choice("block_size", (64, 256, 1024, 4096)))

    def __post_init__(self) -> None:
        if self.bits not in range(2, 17):
            raise ValueError(
                f"QSGD(bits={self.bits!r}): bits counts the sign and must be a whole number in "
                f"2..16; use 4 for an eighth of the bytes of float32."
            )
        if self.block_size < 1 or self.block_size != int(self.block_size):
            raise ValueError(
                f"QSGD(block_size={self.block_size!r}): a block needs a whole number of elements, "
                f"at least 1; use 512."
            )
        if self.norm not in ("max", "l2"):
            raise ValueError(f"QSGD(norm={self.norm!r}): use 'max' or 'l2'.")

    @property
    def levels(self) -> int:
        """The paper's s: levels above zero."""
        return int(2 ** (self.bits - 1) - 1)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take the rounded values; the rounding errors stay."""
        size = self._block_size(buffer.numel())
        norms = self._norms(buffer, size)  # (b,) float32
        noise = bucket.generator(shared=False)
        return quantise(buffer, norms, size, self.bits, noise), norms

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        """Add ``scale · norm · level / s``."""
        numel = out.numel()
        size = self._block_size(numel)
        payload_validation.lengths(payload, packed_bytes(numel, self.bits), -(-numel // size))
        packed, norms = payload
        dequantise(packed, norms, size, self.bits, out, scale, payload_validation.codes)

    def _block_size(self, numel: int) -> int:
        return min(self.block_size, max(1, numel))

    def _norms(self, buffer: Tensor, size: int) -> Tensor:
        # Norms can be cut whatever the codes' width: 1 stands for "narrower than a byte".
        parts = [self._lengths(in_blocks(buffer[i], size)) for i, _ in pieces(buffer, size, 1)]
        return torch.cat(parts).float()

    def _lengths(self, blocks: Tensor) -> Tensor:
        """Return the norm of each row."""
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
        d, s = min(self.block_size, numel), self.levels
        if self.norm == "l2":
            return Variance(min(d / s**2, math.sqrt(d) / s))
        return Variance(d / (4 * s**2))

    @classmethod
    def examples(cls) -> tuple[QSGD, ...]:
        """Widths that pack in each way, both norms, blocks that do not divide the tensor."""
        return (cls(4), cls(2, 7), cls(3, 64, "l2"), cls(9, 512, "l2"), cls(16))


def _largest(blocks: Tensor) -> Tensor:
    """Return the largest magnitude of each row."""
    if blocks.device.type == "cpu":  # magnitudes stay in the cache, where this is vectorised
        return blocks.abs().amax(dim=1)
    low, high = blocks.aminmax(dim=1)  # no tensor of magnitudes
    return torch.maximum(low.neg_(), high)
