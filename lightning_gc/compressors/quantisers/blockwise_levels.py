"""BlockwiseLevels: base class of quantisers that round to equal fractions of a block's norm."""

from __future__ import annotations

import abc
from typing import Literal

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding import payload_validation
from lightning_gc.coding.bit_packing import packed_bytes
from lightning_gc.coding.wire import Field, Wire
from lightning_gc.compressors.base import Codec
from lightning_gc.compressors.quantisers.blockwise_8bit import check_block_size
from lightning_gc.flow import Payload
from lightning_gc.kernels.dequantise import dequantise
from lightning_gc.kernels.quantise import in_blocks, largest, pieces, quantise


class BlockwiseLevels(Codec):
    """Rounds each element to ``k/s`` of its block's norm, ``s = 2^(bits−1) − 1``, k whole.

    Attributes:
        bits: of a code, the sign included.
        block_size: elements of a block; the last block may have fewer.
        norm: the largest magnitude, or the L2 norm.
    """

    bits: int
    block_size: int
    norm: Literal["max", "l2"]

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_bits(name, self.bits)
        check_block_size(name, self.block_size)
        if self.norm not in ("max", "l2"):
            raise ValueError(f"{name}(norm={self.norm!r}): use 'max' or 'l2'.")

    @abc.abstractmethod
    def noise(self, bucket: Bucket) -> torch.Generator | None:
        """Return what ``kernels.quantise`` rounds by: random numbers, or None for the nearest."""

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        size = self._block_size(buffer.numel())
        norms = self._norms(buffer, size)  # (b,) float32
        return quantise(buffer, norms, size, self.bits, self.noise(bucket)), norms

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        size = self._block_size(out.numel())
        packed, norms = payload
        dequantise(packed, norms, size, self.bits, out, scale, payload_validation.codes)

    def _block_size(self, numel: int) -> int:
        return min(self.block_size, max(1, numel))

    def _norms(self, buffer: Tensor, size: int) -> Tensor:
        most = largest(buffer, size)
        if self.norm == "max":
            return most.float()
        ends = pieces(buffer, size, 1)
        return torch.cat([_lengths(in_blocks(buffer[i], size), most[b]) for i, b in ends]).float()

    def wire(self, numel: int) -> Wire:
        codes, blocks = packed_bytes(numel, self.bits), -(-numel // self._block_size(numel))
        return (
            Field("codes", torch.uint8, codes, note=f"level + s, {self.bits} bits each"),
            Field("norms", torch.float32, blocks, note="per block"),
        )


def check_bits(name: str, bits: float) -> None:
    """Refuse a number of bits that codes cannot have."""
    if bits not in range(2, 17):
        raise ValueError(
            f"{name}(bits={bits!r}): bits counts the sign and must be a whole number in 2..16; use "
            f"4 for about an eighth of the bytes of float32."
        )


def _lengths(blocks: Tensor, most: Tensor) -> Tensor:
    """Return the L2 norm of each row, of which ``most`` is the largest magnitude."""
    # Squares of 1e-30 and 1e30 leave float32's range; those of x / max do not.
    unit = blocks / most.where(most > 0, 1.0).view(-1, 1)
    lengths: Tensor = torch.linalg.vector_norm(unit, dim=1)
    return most * lengths
