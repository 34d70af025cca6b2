"""BlockwiseCodes: base class of quantisers with a code an element and a few numbers a block."""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding.bit_packing import pack, packed_bytes, unpack
from lightning_gc.coding.wire import Field, Wire
from lightning_gc.compressors.base import Codec
from lightning_gc.flow import Payload
from lightning_gc.kernels.quantise import in_blocks, pieces
from lightning_gc.search_space import Choice

BLOCK_SIZES = Choice("block_size", (64, 256, 1024, 4096))
"""Block sizes worth trying, of any quantiser."""


class BlockwiseCodes(Codec):
    """Rounds the elements of each block to 2^bits values, which depend on a few of its numbers.

    Attributes:
        bits: of a code, 1..8. Any code of as many bits must be valid.
        block_size: elements of a block; the last block may have fewer.
        coding: what a code means, for the documentation.
        numbers: names of the numbers of a block.
    """

    bits: int
    block_size: int
    coding: str
    numbers: tuple[str, ...]

    def __post_init__(self) -> None:
        check_block_size(type(self).__name__, self.block_size)

    @abc.abstractmethod
    def code(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """Return codes, ``(b, block_size)`` uint8, and each of the numbers, ``(b,)`` float32.

        The last block is filled up by ``filling``.
        """

    @abc.abstractmethod
    def values(self, codes: Tensor, *numbers: Tensor) -> Tensor:
        """Return what the codes stand for, ``(b, block_size)`` float32."""

    def filling(self, part: Tensor) -> Tensor:
        """Return what a short block is filled with, ``(1,)``: one of its elements by default.

        That changes no largest or smallest one.
        """
        return part[-1:]

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        size, parts = self._size(buffer.numel()), []
        for piece, _ in pieces(buffer, size, 1):
            part = buffer[piece]
            short = -part.numel() % size
            filled = torch.cat([part, self.filling(part).expand(short)]) if short else part
            codes, *numbers = self.code(filled.view(-1, size))
            part.sub_(self.values(codes, *numbers).view(-1)[: part.numel()])
            parts.append((codes.view(-1)[: part.numel()], *numbers))
        codes, *joined = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return codes if self.bits == 8 else pack(codes, self.bits), *joined

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        size = self._size(out.numel())
        packed, *numbers = payload
        whole = self.bits == 8
        codes = packed if whole else unpack(packed, self.bits, out.numel(), torch.uint8)
        for piece, rows in pieces(out, size, 1):
            part = out[piece]
            blocks = in_blocks(codes[piece], size)
            values = self.values(blocks, *(number[rows] for number in numbers))
            part.add_(values.view(-1)[: part.numel()], alpha=scale)

    def wire(self, numel: int) -> Wire:
        blocks = -(-numel // self._size(numel))
        numbers = [Field(name, torch.float32, blocks, note="per block") for name in self.numbers]
        note = self.coding if self.bits == 8 else f"{self.coding}; {self.bits} bits each"
        return (Field("codes", torch.uint8, packed_bytes(numel, self.bits), note=note), *numbers)

    def _size(self, numel: int) -> int:
        return min(self.block_size, max(1, numel))


def check_block_size(name: str, block_size: int) -> None:
    """Refuse what is not a number of elements."""
    if block_size < 1 or block_size != int(block_size):
        said = f"{name}(block_size={block_size!r})"
        raise ValueError(f"{said}: a block needs a whole number of elements, at least 1; use 512.")
