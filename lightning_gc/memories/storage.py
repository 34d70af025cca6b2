"""Storage: how a memory's buffers are kept between steps in fewer bits than float32."""

from __future__ import annotations

import abc
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_gc.kernels.splitmix import words

Kept: TypeAlias = tuple[Tensor, ...]
"""Stored numbers: flat tensors."""

_PIECE = 1 << 16  # elements, so that on the host intermediate tensors stay in the cache
_FRACTION, _EXPONENT_BIAS = 23, 127  # of float32


class Storage(abc.ABC):
    """Keeps float32 numbers in fewer bits, each rounded at random to one of the nearest two.

    A restored number has the stored number as its expectation. Storing restored numbers again is
    exact for any random draw, so unused errors do not change, nor do errors in checkpoints, which
    are float32.

    Attributes:
        block: elements that are kept together.
        parts: per stored tensor, its dtype and how many of its elements make a block.
    """

    block: int
    parts: tuple[tuple[torch.dtype, int], ...]

    @property
    def bytes_per_element(self) -> float:
        """Stored bytes of an element."""
        return sum(dtype.itemsize * length for dtype, length in self.parts) / self.block

    def padded(self, numel: int) -> int:
        """Return the elements of the whole blocks that hold ``numel`` elements."""
        return -(-numel // self.block) * self.block

    def zeros(self, numel: int, device: torch.device) -> Kept:
        """Return ``numel`` stored zeros, in whole blocks."""
        blocks = numel // self.block
        return tuple(torch.zeros(blocks * n, dtype=d, device=device) for d, n in self.parts)

    def of(self, kept: Kept, start: int, stop: int) -> Kept:
        """Return views of the stored elements ``start`` to ``stop``, in whole blocks."""
        a, b = start // self.block, stop // self.block
        return tuple(t[a * n : b * n] for t, (_, n) in zip(kept, self.parts, strict=True))

    def store(self, x: Tensor, kept: Kept, seed: int) -> None:
        """Write finite numbers, ``(n,)`` float32 in whole blocks, to ``kept``.

        Args:
            x: the numbers, which are not changed.
            kept: as made by ``zeros``, changed in place.
            seed: of the random numbers.
        """
        draw = _Draw(x.device, seed)
        size = _PIECE if x.device.type == "cpu" else max(1, x.numel())
        for start in range(0, x.numel(), size):
            piece = x[start : start + size]
            made = self.rounded(piece, draw(piece.numel()))
            for there, here in zip(self.of(kept, start, start + piece.numel()), made, strict=True):
                there.copy_(here)

    @abc.abstractmethod
    def rounded(self, x: Tensor, drawn: Tensor) -> Kept:
        """Return finite numbers, ``(n,)`` float32 in whole blocks, in stored form.

        ``drawn`` are random, ``(n,)`` int32 in [0, 65535].
        """

    @abc.abstractmethod
    def restored(self, kept: Kept) -> Tensor:
        """Return the numbers, ``(n,)`` float32."""

    @abc.abstractmethod
    def step(self, x: Tensor) -> Tensor:
        """Return the distance between the two numbers to which each of ``x`` may be rounded."""


class Int8Blocks(Storage):
    """A byte an element, and a power of two for every 32: 1.03 bytes an element.

    ``c_i · 2^k`` with ``|c_i| ≤ 127``; k is the least with which that holds for the 32 elements. So
    the step 2^k is less than 1/63 of the largest of the 32, and 2^−126 at least.

    Reference:
        Rouhani et al., "Microscaling Data Formats for Deep Learning", 2023: this is its MXINT8 but
        for how numbers are rounded.
    """

    block = 32
    parts = ((torch.int8, 32), (torch.int8, 1))

    def rounded(self, x: Tensor, drawn: Tensor) -> Kept:
        blocks = x.view(-1, self.block)
        exponents = self._exponents(blocks)  # (b,) int32
        codes = blocks * _power(-exponents).view(-1, 1)  # exact
        # In the middle of 65,536 parts of a step: whole numbers stay, and neither side is favoured.
        noise = drawn.float().add_(0.5).mul_(2.0**-16).view_as(codes)
        codes.add_(noise).floor_().clamp_(-127, 127)
        return codes.to(torch.int8).view(-1), exponents.to(torch.int8)

    def restored(self, kept: Kept) -> Tensor:
        codes, exponents = kept
        return codes.view(-1, self.block).mul(_power(exponents.int()).view(-1, 1)).view(-1)

    def step(self, x: Tensor) -> Tensor:
        steps = _power(self._exponents(x.view(-1, self.block)))
        return steps.repeat_interleave(self.block)

    def _exponents(self, blocks: Tensor) -> Tensor:
        largest = blocks.abs().amax(dim=1)  # (b,)
        # The largest element is from 64 to below 128 steps: 7 bits, and one for the sign.
        exponents = (largest.view(torch.int32) >> _FRACTION) - _EXPONENT_BIAS - 6
        exponents.clamp_(-126, 121)
        exponents += largest > 127 * _power(exponents)
        return exponents.clamp_(max=121)  # 127·2^121 is float32's largest but for a hundredth


class BFloat16(Storage):
    """Two bytes an element, bfloat16: the step is at most 1/128 of each element."""

    block = 1
    parts = ((torch.bfloat16, 1),)

    def rounded(self, x: Tensor, drawn: Tensor) -> Kept:
        limit = torch.finfo(torch.bfloat16).max
        bits = x.clamp(-limit, limit).view(torch.int32)
        # The low half, as a share of a step, is the probability of a carry into the high half.
        return ((bits + drawn >> 16).to(torch.int16).view(torch.bfloat16),)

    def restored(self, kept: Kept) -> Tensor:
        return kept[0].float()

    def step(self, x: Tensor) -> Tensor:
        toward_zero = (x.view(torch.int32) >> 16 << 16).view(torch.float32)
        away = ((x.view(torch.int32) >> 16) + 1 << 16).view(torch.float32)
        return (away - toward_zero).abs()


STORAGES: dict[str, Storage] = {"int8": Int8Blocks(), "bfloat16": BFloat16()}
NAMES = "use 'int8' or 'bfloat16', or ErrorFeedback() for float32"
"""Storages by the name that a memory's ``dtype`` gives."""


class _Draw:
    """Draws 16 random bits an element: a quarter of an SFC64 stream's numbers, or of hashes."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device, self._seed = device, seed
        self._on_host = np.random.SFC64(seed) if device.type == "cpu" else None

    def __call__(self, numel: int) -> Tensor:
        count = -(-numel // 4)
        if self._on_host is None:  # where all is drawn at once
            return words(count, self._seed, self._device).view(torch.int16)[:numel].int() & 0xFFFF
        drawn = np.asarray(self._on_host.random_raw(count)).view(np.uint16)[:numel]
        return torch.from_numpy(drawn.astype(np.int32))


def _power(exponents: Tensor) -> Tensor:
    """Return 2 to whole exponents in [−126, 127], float32."""
    return ((exponents + _EXPONENT_BIAS) << _FRACTION).view(torch.float32)
