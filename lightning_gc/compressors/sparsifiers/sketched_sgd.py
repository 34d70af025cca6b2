"""SketchedSGD: find the largest elements of the mean gradient by an all-reduced count sketch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import Collective, Contraction, dense
from lightning_gc.compressors.sparsifiers import topk_selection
from lightning_gc.compressors.sparsifiers.topk_selection import DensitySparsifier
from lightning_gc.core import Bucket, Field, Flow, Mean, Wire
from lightning_gc.kernels import splitmix

_MOST_ROWS = 15  # numbers of a sequence that are 2^60 apart
_SENDABLE = 2.0**-32
"""Share of the largest float at which values are clamped, so that no sum overflows."""


@dataclass(frozen=True)
class SketchedSGD(DensitySparsifier, Collective):
    """Add up small sketches of gradients, estimate the mean from them, and send its k largest.

    A count sketch has ``rows`` rows of c = columns·k sums. In row j an element i is added to the
    sum ``h_j(i)`` with the sign ``s_j(i)``, which all workers draw equally in each step. Sketches
    are linear: the mean of workers' sketches is the sketch of the mean gradient. An element of it
    is estimated by the median over rows of ``s_j(i)·S_j[h_j(i)]``. Of the ``candidates·k`` elements
    with the largest estimates all workers send exact values; the k largest means are applied, and
    what is applied leaves each worker's error.

    ``TopK`` sends what is largest on each worker, and up to W times k elements are applied. Here k
    elements are applied, the largest of the mean, up to the sketch's error: an estimate of one row
    has a variance of at most ``‖x‖²/c``, so that it is off by more than ``2·‖x‖/√c`` with a
    probability of a quarter at most, and the median of several rows with less. Bytes do not grow
    with W. Tensors that a sketch would not make smaller go dense.

    Args:
        density: k over the number of elements, in (0, 1]. Lower means more compression.
        rows: of the sketch, odd, 15 at most. Higher means better estimates and more bytes.
        columns: c/k, at least 1. Higher means better estimates and more bytes.
        candidates: elements per k that are sent exactly, at least 1; more sends more.

    Communication pattern:
        Two all-reduces one after the other: the sketch, then values. Per worker ``2·(W−1)/W`` times
        ``32·density·(rows·columns + candidates)`` bits an element: 1.7 for the defaults.

    Each step computes ``rows`` hashes of every element.

    Raises:
        ValueError: ``density`` outside (0, 1], an even number of ``rows`` or too many, ``columns``
            or ``candidates`` below 1.

    Example:
        >>> import torch
        >>> from lightning_gc import SketchedSGD
        >>> from lightning_gc.testing import Lockstep
        >>> one, other = torch.zeros(1000), torch.zeros(1000)
        >>> one[3], one[7], other[3], other[9] = 2.0, 3.0, 2.0, -3.0
        >>> result = Lockstep(2, SketchedSGD(0.001)).step([{"w": one}, {"w": other}])
        >>> result.mean["w"].nonzero().tolist(), result.errors[0]["w"][7]  # neither's largest
        ([[3]], tensor(3.))

    Reference:
        Ivkin, Rothchild, Ullah, Braverman, Stoica and Arora, "Communication-efficient Distributed
        SGD with Sketching", NeurIPS 2019; there a server asks for the exact values. Charikar, Chen
        and Farach-Colton, "Finding Frequent Items in Data Streams", ICALP 2002.
    """

    density: float = 0.001
    rows: int = 5
    columns: int = 10
    candidates: int = 4
    limits = {
        "columns": "[1, inf) the number per element sent",
        "candidates": "[1, inf) the number per element sent",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.rows <= _MOST_ROWS or self.rows % 2 != 1:
            raise ValueError(
                f"SketchedSGD(rows={self.rows!r}): an estimate is the median over rows, so "
                f"there must be an odd number, {_MOST_ROWS} at most; use 5."
            )

    def _sizes(self, numel: int) -> tuple[int, int]:
        """Return the elements of a row of the sketch, and the candidates."""
        k = self.count(numel)
        return self.columns * k, min(numel, self.candidates * k)

    def compresses(self, shape: tuple[int, ...]) -> bool:
        width, candidates = self._sizes(math.prod(shape))
        return self.rows * width + candidates < math.prod(shape)

    def rounds(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        if not self.compresses(bucket.shape):
            yield from dense(buffer, out)
            return
        numel = buffer.numel()
        width, most = self._sizes(numel)
        seed = bucket.generator_seed(shared=True)
        (mean,) = yield Mean((sketch(buffer, seed, self.rows, width),))
        estimates = estimated(mean, seed, self.rows, numel)
        chosen = _largest(estimates, most)  # (candidates·k,), the same on all workers
        values = buffer[chosen]
        bucket.tally.count(numel, self.count(numel), (mean, values))
        (means,) = yield Mean((values.clone(),))
        kept = _largest(means, self.count(numel))
        at = chosen[kept]
        buffer.index_fill_(0, at, 0.0)
        # Sums that leave float32's range would do so again in every step.
        sound, largest = mean.isfinite().all(), torch.finfo(buffer.dtype).max * _SENDABLE
        buffer.copy_(torch.where(sound, buffer, buffer.clamp(-largest, largest)))
        out.zero_()
        out.index_copy_(0, at, means[kept].to(out.dtype))
        out.masked_fill_(~sound, math.nan)

    def bound(self, numel: int) -> Contraction:
        """Return δ = 0: the sent elements need not be the largest."""
        return Contraction(0.0)

    def wire(self, numel: int) -> Wire:
        if not self.compresses((numel,)):
            return (Field("values", torch.float32, numel),)
        width, most = self._sizes(numel)
        note = f"(rows, {width}) sums"
        return Field("sketch", torch.float32, self.rows * width, note=note), Field(
            "values", torch.float32, most, note="of the largest estimates"
        )

    @classmethod
    def examples(cls) -> tuple[SketchedSGD, ...]:
        return (cls(0.02, rows=3, columns=4, candidates=2), cls())


def sketch(x: Tensor, seed: int, rows: int, width: int) -> Tensor:
    """Return the count sketch of ``(numel,)`` numbers, ``(rows·width,)``."""
    sums = x.new_zeros(rows * width)
    for row in range(rows):
        places, signs = _hashed(x, seed, row, width)
        sums.index_add_(0, places, signs.mul_(x))
    return sums


def estimated(sums: Tensor, seed: int, rows: int, numel: int) -> Tensor:
    """Return a sketch's estimate of each element, ``(numel,)``: the median over rows."""
    width, like = sums.numel() // rows, sums.new_empty(numel)
    found = []
    for row in range(rows):
        places, signs = _hashed(like, seed, row, width)
        found.append(signs.mul_(sums[places]))
    return _median(found)


def _median(rows: list[Tensor]) -> Tensor:
    """Return the median of each element over an odd number of rows; a NaN stays one.

    Neighbouring rows are put in order until all are: whole rows at a time, a twelfth of the time of
    ``Tensor.median``.
    """
    for turn in range(len(rows)):
        for low in range(turn % 2, len(rows) - 1, 2):
            one, other = rows[low : low + 2]
            rows[low : low + 2] = torch.minimum(one, other), torch.maximum(one, other)
    return rows[len(rows) // 2]


def _hashed(like: Tensor, seed: int, row: int, width: int) -> tuple[Tensor, Tensor]:
    """Return where each element is added in a sketch, ``(numel,)`` int64, and its sign."""
    # Rows take numbers of the sequence that are far apart, for its step is odd.
    begin = (seed + (row << 60) + (1 << 63)) % (1 << 64) - (1 << 63)
    words = splitmix.words(like.numel(), begin, like.device)
    # The lowest bit is for the sign. Of the others 62 make a number that is not negative.
    places = (words >> 1).bitwise_and_((1 << 62) - 1).remainder_(width).add_(row * width)
    return places, words.bitwise_and_(1).mul_(2).sub_(1).to(like.dtype)


def _largest(numbers: Tensor, count: int) -> Tensor:
    """Return the ascending positions of the largest magnitudes; of equal ones the first.

    All workers must choose the same, on any device.
    """
    if numbers.device.type == "cpu":
        return topk_selection.best(numbers, torch.arange(numbers.numel(), device="cpu"), count)
    order = numbers.abs().nan_to_num_(math.inf).sort(descending=True, stable=True).indices
    return order[:count].sort().values
