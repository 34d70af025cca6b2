"""BlockwiseCodes: base class of quantisers with a code an element and a few numbers a block."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_gc.compressors.base import Codec, Contraction, Knob, Traits, Variance
from lightning_gc.compressors.joint import JointTable, WholeCodec
from lightning_gc.core import Bucket, Choice, Field, Payload, Range, Wire, payload_validation
from lightning_gc.core.bit_packing import pack, packed_bytes, unpack
from lightning_gc.kernels.blocks import BlockCode
from lightning_gc.kernels.quantise import dequantise, in_blocks, largest, pieces, quantise

BLOCKS = "[1, inf) a block's number of elements; 512"
CODES = "[2, 16] the number of bits, sign included,; 4 for about an eighth of the bytes of float32"
"""Limits of ``block_size`` and ``bits``."""

BLOCK_SIZES = Choice("block_size", (64, 256, 1024, 4096))
"""Block sizes worth trying, of any quantiser."""

BITS = Traits(
    kind="quantiser",
    unbiased=True,
    knob=Knob("bits", low=2, high=16, scale="linear", integer=True),
    space=(Range("bits", 2, 8, integer=True),),
)
"""Traits of an unbiased quantiser with a field ``bits``, the sign included."""

_ROUNDING = 2.0**-20  # of float32, times the norm of x: see ``BlockwiseLevels.bound``


class BlockwiseCodes(Codec):
    """Round the elements of each block to 2^bits values that follow from a few numbers.

    Attributes:
        bits: bits per code, 1..8. Every code must be valid.
        block_size: elements per block; the last block may have fewer.
        coding: meaning of a code, for the documentation.
        numbers: names of the numbers sent per block.
    """

    bits: int
    block_size: int
    coding: str
    numbers: tuple[str, ...]
    limits = {"block_size": BLOCKS}

    @property
    def in_kernels(self) -> BlockCode | None:
        """The code as kernels of whole buckets read it; None: torch codes each parameter."""
        return None

    @property
    def whole(self) -> WholeCodec:
        kind = self if self.in_kernels is not None else None
        return WholeCodec(self, kind=kind, joint=JointBlocks)

    @abc.abstractmethod
    def code(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """Return codes, ``(b, block_size)`` uint8, and each of the numbers, ``(b,)`` float32.

        The last block is filled up by ``filling``.
        """

    @abc.abstractmethod
    def values(self, codes: Tensor, *numbers: Tensor) -> Tensor:
        """Return the decoded values, ``(b, block_size)`` float32."""

    def filling(self, part: Tensor) -> Tensor:
        """Return the padding of a short block, ``(1,)``: one of its elements by default.

        An element of the block changes neither its maximum nor its minimum.
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


class JointBlocks(JointTable):
    """Encode parts of a bucket by ``BlockwiseCodes``, in kernels of whole buckets.

    On a GPU the kernels take blocks whose size is a power of two from 8 to 4,096. On the host torch
    encodes by a book, which takes less time.
    """

    family = "blocks"

    @functools.cached_property
    def settings(self) -> tuple[Any, ...]:
        return (self.codec.in_kernels,)

    @property
    def in_rows(self) -> bool:
        return len(self.codec.numbers) > 1


class Blockwise8Bit(BlockwiseCodes):
    """Round the elements of each block to 256 values that follow from a few numbers.

    Subclasses write ``code`` and ``values``, and say ``coding`` and ``numbers``; see
    ``BlockwiseCodes``.
    """

    bits = 8


class BlockwiseLevels(Codec):
    """Round each element to ``k/s`` of its block's norm, ``s = 2^(bits−1) − 1``, k whole.

    Attributes:
        bits: bits per code, the sign included.
        block_size: elements per block; the last block may have fewer.
        norm: the largest magnitude, or the L2 norm.
        rounding: to the nearest level, or at random to one of the two levels around the element.
    """

    bits: int
    block_size: int
    norm: Literal["max", "l2"]
    limits = {"bits": CODES, "block_size": BLOCKS}

    @property
    @abc.abstractmethod
    def rounding(self) -> Literal["nearest", "stochastic"]:
        """How elements are rounded: a field, or a class attribute."""

    @functools.cached_property
    def traits(self) -> Traits:
        space = (*BITS.space, BLOCK_SIZES)
        return replace(BITS, unbiased=self.rounding == "stochastic", space=space)

    @property
    def whole(self) -> WholeCodec:
        return WholeCodec(self, kind=self, joint=JointLevels)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        size = self._block_size(buffer.numel())
        norms = self._norms(buffer, size)  # (b,) float32
        draw = bucket.generator(shared=False) if self.rounding == "stochastic" else None
        return quantise(buffer, norms, size, self.bits, draw), norms

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

    def bound(self, numel: int) -> Contraction | Variance:
        """Return ω for stochastic rounding, δ = 1 − (√ρ + 2^−20)² for nearest, d = block size.

        Stochastic: ω = min(d/s², √d/s) for the L2 norm (QSGD's paper), d/(4s²) for the max norm.

        Nearest: an element's error is at most ``a = norm / 2s``, and at most the element, as 0 is a
        level. With ``"max"`` the largest, M, is exact, so the block's error E² is at most
        ``(d − 1)·a²``, and ``‖x‖² ≥ M² + E²``: ρ = E²/‖x‖² ≤ (d − 1) / (4s² + d − 1), reached if
        all others are a. With ``"l2"``, E² ≤ d·a² and ρ ≤ min(1, d / 4s²). Float32 adds, to the
        error of an element that is not rounded to 0, at most 9 roundings of 2^−24 times itself.
        """
        d, s = min(self.block_size, numel), 2 ** (self.bits - 1) - 1
        if self.rounding == "stochastic":
            most = min(d / s**2, math.sqrt(d) / s)
            return Variance(most if self.norm == "l2" else d / (4 * s**2))
        others = max(0, d - 1)
        share = d / (4 * s**2) if self.norm == "l2" else others / (4 * s**2 + others)
        return Contraction(max(0.0, 1 - (math.sqrt(share) + _ROUNDING) ** 2))


class JointLevels(JointTable):
    """Encode parts of a bucket by ``BlockwiseLevels``, in kernels of whole buckets.

    The norm ``"l2"`` is left to torch: its last bit depends on the order of a sum.
    """

    family = "levels"

    @functools.cached_property
    def settings(self) -> tuple[Any, ...] | None:
        codec = self.codec
        found = codec.bits, codec.block_size, codec.rounding == "nearest"
        return found if codec.norm == "max" else None


class LookupTable:
    """Cache constant tensors that ``make(*settings, device=device)`` returns.

    On the host, making one takes longer than coding a small tensor, so it is cached. On a GPU it is
    not cached, since another stream could read it too early. Callers must not change the tensor.

    Example:
        >>> double = LookupTable(lambda count, device: torch.arange(count, device=device) * 2)
        >>> double(3, device=torch.device("cpu"))
        tensor([0, 2, 4])
    """

    def __init__(self, make: Callable[..., Tensor]) -> None:
        self.make = make
        self._kept = functools.cache(make)

    def __call__(self, *settings: int, device: torch.device) -> Tensor:
        """Return the table of these settings on ``device``."""
        make = self._kept if device.type == "cpu" else self.make
        return make(*settings, device=device)


def _lengths(blocks: Tensor, most: Tensor) -> Tensor:
    """Return the L2 norm of each row; ``most`` is the row's largest magnitude."""
    # 1e-30 and 1e30 squared leave float32's range; x / max squared does not.
    unit = blocks / most.where(most > 0, 1.0).view(-1, 1)
    lengths: Tensor = torch.linalg.vector_norm(unit, dim=1)
    return most * lengths
