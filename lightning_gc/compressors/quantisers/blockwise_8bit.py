"""Blockwise8Bit: base class of quantisers with one byte an element and a few numbers a block."""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding.wire import Field, Wire
from lightning_gc.compressors.base import Codec
from lightning_gc.flow import Payload
from lightning_gc.kernels.quantise import in_blocks, pieces
from lightning_gc.search_space import Choice

BLOCK_SIZES = Choice("block_size", (64, 256, 1024, 4096))
"""Block sizes worth trying, of any quantiser."""


class Blockwise8Bit(Codec):
    """Rounds the elements of each block to 256 values, which depend on a few numbers of the block.

    Attributes:
        block_size: elements of a block; the last block may have fewer.
        coding: what a code means, for the documentation.
        numbers: names of the numbers of a block.
    """

    block_size: int
    coding: str
    numbers: tuple[str, ...]

    def __post_init__(self) -> None:
        check_block_size(type(self).__name__, self.block_size)

    @abc.abstractmethod
    def code(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """Return codes, ``(b, block_size)`` uint8, and each of the numbers, ``(b,)`` float32."""

    @abc.abstractmethod
    def values(self, codes: Tensor, *numbers: Tensor) -> Tensor:
        """Return what the codes stand for, ``(b, block_size)`` float32."""

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        size, parts = self._size(buffer.numel()), []
        for piece, _ in pieces(buffer, size, 1):
            part = buffer[piece]
            # Filled up with an element of its own, which changes no largest or smallest one.
            short = -part.numel() % size
            filled = torch.cat([part, part[-1:].expand(short)]) if short else part
            codes, *numbers = self.code(filled.view(-1, size))
            part.sub_(self.values(codes, *numbers).view(-1)[: part.numel()])
            parts.append((codes.view(-1)[: part.numel()], *numbers))
        return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        size = self._size(out.numel())
        codes, *numbers = payload
        for piece, rows in pieces(out, size, 1):
            part = out[piece]
            blocks = in_blocks(codes[piece], size)
            values = self.values(blocks, *(number[rows] for number in numbers))
            part.add_(values.view(-1)[: part.numel()], alpha=scale)

    def wire(self, numel: int) -> Wire:
        blocks = -(-numel // self._size(numel))
        numbers = [Field(name, torch.float32, blocks, note="per block") for name in self.numbers]
        return (Field("codes", torch.uint8, numel, note=self.coding), *numbers)

    def _size(self, numel: int) -> int:
        return min(self.block_size, max(1, numel))


def check_block_size(name: str, block_size: int) -> None:
    """Refuse what is not a number of elements."""
    if block_size < 1 or block_size != int(block_size):
        said = f"{name}(block_size={block_size!r})"
        raise ValueError(f"{said}: a block needs a whole number of elements, at least 1; use 512.")
