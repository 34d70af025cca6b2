"""Segment table of a bucket, and what the engine leaves to kernels that work on a whole bucket."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gc.core.message import Packed, reserve

PIECE = 1 << 15
"""Elements of a parameter that one program of a kernel reads at most."""


class Segments:
    """The places of a bucket's parameters, without empty ones, on the host and on its device.

    Args:
        spans: first element and end of each parameter, ascending.
        device: of the bucket.

    Attributes:
        starts, lengths: ``(n,)`` int64, on the device.
        words: int32 words that kernels needed as workspace in an earlier round.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], device: torch.device) -> None:
        self.spans = [slice(start, stop) for start, stop in spans]
        self.device = device
        self.words = 0
        table = [(start, stop - start) for start, stop in spans]
        self.starts, self.lengths = (
            torch.tensor(table, dtype=torch.int64, device=device).view(-1, 2).t().contiguous()
        )

    @functools.cached_property
    def bounds(self) -> np.ndarray[Any, Any]:
        """First element and end of each parameter, ``(n, 2)`` int64, for kernels of the host."""
        return np.array([(span.start, span.stop) for span in self.spans], np.int64).reshape(-1, 2)

    @functools.cached_property
    def pieces(self) -> Tensor:
        """Pieces of all parameters, on the device."""
        places = [(i, each.start, each.stop, each.start) for i, each in enumerate(self.spans)]
        return pieces_of(places, self.device)

    def elementwise(self, flags: Tensor) -> Tensor:
        """Return each parameter's flag for each of its elements, ``(numel,)`` bool, on the device.

        A GPU takes long to repeat a flag millions of times, so differences of flags are added up.

        Args:
            flags: ``(n,)`` bool, on the device.
        """
        steps = flags.to(torch.int8)
        steps[1:] -= flags[:-1].to(torch.int8)
        numel = self.spans[-1].stop if self.spans else 0
        marks = torch.zeros(numel, dtype=torch.int8, device=self.device)
        return marks.index_copy_(0, self.starts, steps).cumsum(0, dtype=torch.int8).bool()


def pieces_of(
    places: Sequence[tuple[int, int, int, int]], device: torch.device, size: int = PIECE
) -> Tensor:
    """Cut parameters into pieces of at most ``size`` elements, for kernels of whole buckets.

    Kernels of a GPU read int32, since they take fewer than 2^30 elements. Kernels of the host take
    any number, and read int64.

    Args:
        places: of each parameter, its index among the bucket's that are not empty, its first
            element and its end, and the place of the first element elsewhere.
        device: of the bucket.
        size: elements of a piece, at most.

    Returns:
        ``(m, 4)``: of each piece the parameter's index, the first element, the end, and the first
        element's place elsewhere.
    """
    rows = [
        (index, start, min(start + size, end), place + start - begin)
        for index, begin, end, place in places
        for start in range(begin, end, size)
    ]
    dtype = torch.int64 if device.type == "cpu" else torch.int32
    return torch.tensor(rows, dtype=dtype, device=device).view(-1, 4)


class Workspace:
    """Zeroed int32 words for the kernels of one bucket in one round.

    The layout remembers how many words a round took. From the second round on they are one
    allocation, zeroed by one operation.

    Args:
        segments: of the bucket.
    """

    def __init__(self, segments: Segments) -> None:
        self._segments, self._taken = segments, 0
        self._words: Tensor | None = None

    def take(self, count: int) -> Tensor:
        """Return ``count`` zeros, ``(count,)`` int32."""
        start, self._taken = self._taken, self._taken + count
        most = self._segments.words
        if self._taken > most:
            self._segments.words = self._taken
            return self._zeros(count)
        if self._words is None:
            self._words = self._zeros(most)
        return self._words[start : self._taken]

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._segments.device)


@dataclass
class Pending:
    """What a codec of whole buckets does for the engine, in the kernels that encode and decode.

    ``encode`` is given a buffer e and must compress ``x = decay·e + gain·g``. For an idle
    parameter, with a peak of 0, it sends zeros and leaves ``decay·e`` in the buffer. Elements that
    are not finite after compression become 0. It may overwrite g, where ``decode`` writes the mean.
    The payload ends in the guard's flag if ``flagged``. ``decode`` adds the sum of ``flags`` to the
    first element of each parameter.

    Attributes:
        segments: the bucket's parameters.
        peaks: ``(n,)`` float32, zero where the gradient of a parameter is zero.
        flag: ``(1,)`` float32, 0, or NaN if this worker's gradient was not finite.
        work: zeroed workspace.
        grad: g, ``(numel,)``; None if the buffer is the gradient: nobody keeps its leftover.
        decay, gain: weights of the error and of the gradient.
        flagged: whether the payload carries the flag. Otherwise an earlier message does.
        uncompressed: elements of uncompressed parameters for which the message has room.
        flags: the flags that have arrived: each worker's, or their mean; set by the guard.
    """

    segments: Segments
    peaks: Tensor
    flag: Tensor
    work: Workspace
    grad: Tensor | None = None
    decay: float = 1.0
    gain: float = 1.0
    flagged: bool = True
    uncompressed: int = 0
    flags: list[Tensor] = field(default_factory=list)

    def reserve(self, fields: Sequence[tuple[torch.dtype, int]]) -> Packed:
        """Return a payload of ``fields``, dtypes and lengths, then uncompressed elements, the flag.

        ``Packed.first`` gives the codec's own payload.
        """
        others = [(torch.float32, self.uncompressed)] if self.uncompressed else []
        flag = [(torch.float32, 1)] if self.flagged else []
        return reserve([*fields, *others, *flag], self.flag.device)

    def end(self, packed: Packed) -> None:
        """Write the flag and the padding of a message on the host."""
        if self.flagged:
            packed.flag.copy_(self.flag)
        packed.padding.zero_()

    def ending(self, packed: Packed) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return what ``end_message`` needs: the flag, its place, the padding and its length."""
        place = packed.flag if self.flagged else torch.empty_like(self.flag)
        return self.flag, place, packed.padding, packed.layout.padding
