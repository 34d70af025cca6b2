"""What methods share that send one byte an element and a few numbers for each block."""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding import payload_validation
from lightning_gc.coding.bit_packing import unpack
from lightning_gc.compressors.base import Codec
from lightning_gc.flow import Payload
from lightning_gc.kernels.quantise import in_blocks, pieces


class ByteCodes(Codec):
    """Rounds the elements of each block to 256 values that a few numbers of the block tell.

    Methods differ in these values: ``code`` finds them and ``values`` says what they are.

    Attributes:
        block_size: elements of a block; the last block may have fewer.
        numbers: how many numbers a block has.

    Wire format:
        ``codes    # (numel,) uint8``
        ``numbers  # (ceil(numel / block_size),) float32``, as many times as there are numbers
    """

    block_size: int
    numbers: int = 1

    kind = "quantiser"

    @abc.abstractmethod
    def code(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """Return codes, ``(b, block_size)`` uint8, and each of the numbers, ``(b,)`` float32."""

    @abc.abstractmethod
    def values(self, codes: Tensor, *numbers: Tensor) -> Tensor:
        """Return what the codes stand for, ``(b, block_size)`` float32."""

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take the values; what rounding added or left stays."""
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
        """Add the values."""
        numel, size = out.numel(), self._size(out.numel())
        payload_validation.lengths(payload, numel, *[-(-numel // size)] * self.numbers)
        coded, *numbers = payload
        codes = unpack(coded, 8, numel, torch.uint8)
        for piece, rows in pieces(out, size, 1):
            part = out[piece]
            blocks = in_blocks(codes[piece], size)
            values = self.values(blocks, *(number[rows] for number in numbers))
            part.add_(values.view(-1)[: part.numel()], alpha=scale)

    def _size(self, numel: int) -> int:
        return min(self.block_size, max(1, numel))


def check_block_size(name: str, block_size: int, most: int | None = None) -> None:
    """Refuse what is not a number of elements."""
    if block_size < 1 or block_size != int(block_size):
        raise ValueError(
            f"{name}(block_size={block_size!r}): a block needs a whole number of elements, at "
            f"least 1; use 512."
        )
    if most is not None and block_size > most:
        raise ValueError(
            f"{name}(block_size={block_size!r}): with more than {most:,} elements in a block the "
            f"error may be larger than half of the gradient; use 512."
        )
