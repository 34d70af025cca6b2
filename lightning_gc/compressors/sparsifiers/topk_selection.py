"""Find the positions of a tensor's large elements: by threshold, or the k largest.

On the host by NumPy, which is vectorised where torch is not: a quarter of the time for 1 % of 25
million elements.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from lightning_gc.compressors.base import Compressor, Contraction, Knob, Traits, Waits
from lightning_gc.compressors.sparsifiers.sparse_codec import SparseCodec, counts
from lightning_gc.core import Bucket, Range, payload_validation
from lightning_gc.kernels.sparse import CORRECTIONS, FACTOR

_SMALL = 1 << 14  # up to this many elements torch finds the largest faster than a sample is drawn
_PIECE = 1 << 16  # elements: 256 KB, so that a piece and what is made of it stay in the cache
_HITS = 64, 256  # elements of a sample that are expected to be among the k largest: least, most
_CANDIDATES = 16  # of the k largest, for each such element: of a small k the sample is smaller
_INTEGERS: dict[torch.dtype, Any] = {  # as wide as numbers that NumPy knows
    torch.float32: np.int32,
    torch.float64: np.int64,
    torch.float16: np.int16,
}


def reaching(buffer: Tensor, threshold: float | Tensor) -> Tensor:
    """Return the ascending positions of magnitudes that are not below ``threshold``.

    NaN is always among them, so that it is sent; otherwise it would stay in the error unseen. On
    CUDA the host waits for the number of elements.
    """
    if not _on_host(buffer):
        return (buffer.abs() < threshold).logical_not_().nonzero().view(-1)
    # Magnitudes are ordered like their bits, and NaN is above infinity.
    kind = _INTEGERS[buffer.dtype]
    bits, limit = buffer.numpy().view(kind), buffer.new_tensor(float(threshold)).numpy().view(kind)
    most = np.iinfo(kind).max
    limit = limit if not np.isnan(float(threshold)) else kind(0)  # which all reach
    magnitudes = np.empty(min(_PIECE, len(bits)), kind)
    reached = np.empty(len(magnitudes), bool)
    found = []
    for start in range(0, len(bits), _PIECE):
        piece = bits[start : start + _PIECE]
        size = len(piece)
        np.bitwise_and(piece, most, out=magnitudes[:size])
        np.greater_equal(magnitudes[:size], limit, out=reached[:size])
        positions = np.flatnonzero(reached[:size])
        positions += start
        found.append(positions)
    return torch.from_numpy(np.concatenate(found)) if found else buffer.new_empty(0).long()


def largest(buffer: Tensor, k: int) -> Tensor:
    """Return the ascending positions of the k elements of greatest magnitude.

    NaN is greater than all, and of equal magnitudes the first are taken. On the host a sample gives
    a threshold that somewhat more than k elements reach, and the k largest are sought among those.
    """
    if _on_host(buffer) and buffer.numel() > _SMALL:
        # An odd distance, or in a matrix with an even row length the sample is from half the
        # columns.
        hits = min(max(k // _CANDIDATES, _HITS[0]), _HITS[1])
        wanted = min(hits * buffer.numel() // max(k, 1), 1 << 17)
        sample = buffer[:: (buffer.numel() // max(wanted, 1)) | 1].abs()
        expected = sample.numel() * k / max(buffer.numel(), 1)
        # A threshold 5 % and four deviations of ranks lower than expected: if fewer than k
        # elements reach it, the pass over all elements was for nothing.
        rank = int(1.05 * expected + 4 * expected**0.5) + 1
        if rank < sample.numel() // 4:
            found = reaching(buffer, kth_largest(sample, rank))
            if k <= found.numel() < buffer.numel() // 2:
                return best(buffer, found, k)
    return _places(_first_of_largest(magnitude_bits(buffer), k), k)


def largest_of_rows(rows: Tensor, k: int) -> Tensor:
    """Return the ascending positions of the k largest of each row, in ``rows.view(-1)``.

    NaN is greater than all, and of equal magnitudes the first are taken.
    """
    bits = magnitude_bits(rows)
    limits = torch.topk(bits, k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above, equal = bits > limits, bits == limits
    first = equal.cumsum(1, dtype=counts(rows.shape[1])) <= k - above.sum(dim=1, keepdim=True)
    return _places(torch.logical_or(above, equal & first).view(-1), rows.shape[0] * k)


def _places(chosen: Tensor, count: int) -> Tensor:
    """Return the ascending positions of ``count`` set elements, without waits."""
    if payload_validation.on_host(chosen):
        return chosen.nonzero().view(-1)
    kind = counts(chosen.numel())
    order = torch.arange(1, count + 1, dtype=kind, device=chosen.device)
    return torch.searchsorted(chosen.cumsum(0, dtype=kind), order)


def best(buffer: Tensor, found: Tensor, k: int) -> Tensor:
    """Return the k of the ascending positions ``found`` with the greatest magnitudes."""
    return found if found.numel() <= k else found[largest(buffer[found], k)]


def _first_of_largest(bits: Tensor, k: int) -> Tensor:
    """Return a mask of the k largest of ``(n,)`` numbers; of equal ones the first."""
    if not k:
        return torch.zeros_like(bits, dtype=torch.bool)
    if payload_validation.on_host(bits):
        limit: Any = _kth(bits.numpy(), k)
    else:
        limit = torch.topk(bits, k, sorted=False).values.amin()
    above, equal = bits > limit, bits == limit
    first = equal.cumsum(0, dtype=counts(bits.numel())) <= k - above.sum()
    return torch.logical_or(above, equal & first)


def magnitude_bits(buffer: Tensor) -> Tensor:
    """Return magnitudes as whole numbers of the same order; NaN is above infinity."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[buffer.element_size()]
    return buffer.contiguous().view(kind) & torch.iinfo(kind).max


def kth_largest(magnitudes: Tensor, k: int) -> Tensor:
    """Return the k-th largest of ``(n,)`` magnitudes, 0-dim; NaN is larger than all, as in topk."""
    if not _on_host(magnitudes):
        return torch.topk(magnitudes, k, sorted=False).values.min()
    return magnitudes.new_tensor(float(_kth(magnitudes.numpy(), k)))


def _kth(numbers: Any, k: int) -> Any:
    """Return the k-th largest of numbers that are not negative; 0 if there are fewer."""
    if 2 * np.count_nonzero(numbers) < len(numbers):  # many equal numbers are slow to part
        numbers = numbers[numbers != 0]
    place = len(numbers) - k
    return np.partition(numbers, place)[place] if 0 <= place < len(numbers) else 0


def smallest(buffer: Tensor) -> float:
    """Return the smallest magnitude above zero that ``buffer`` can hold."""
    kind = torch.finfo(buffer.dtype)
    return kind.smallest_normal * kind.eps


def _on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in _INTEGERS


@dataclass(frozen=True)
class DensitySparsifier(Compressor):
    """Send k = density·numel elements, at least one; ``density`` is in (0, 1]."""

    density: float = 0.01
    limits = {
        "density": (
            "(0, 1] density, the share of elements sent,; 0.01 to send one element in a hundred"
        ),
    }

    traits = Traits(
        kind="sparsifier",
        knob=Knob("density", low=1e-5, high=1.0),
        space=(Range("density", 1e-4, 0.1, scale="log"),),
    )

    def count(self, numel: int) -> int:
        """Return k for a tensor of ``numel`` elements."""
        return min(numel, max(1, round(self.density * numel)))

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        return (cls(0.1), cls(1.0))


MOST = 2  # times the wanted number of elements are sent at most


@dataclass(frozen=True)
class ThresholdEstimator(DensitySparsifier, SparseCodec):
    """Send the elements above an estimated threshold, at most 2·k.

    If the estimate is too low, the 2·k largest are sent; if it is too high, fewer than k, perhaps
    none. Zeros are never sent. On CUDA the host waits for their number.
    """

    @property
    def waits(self) -> Waits:
        return Waits(1)

    @abc.abstractmethod
    def threshold(self, magnitudes: Tensor, k: int) -> Tensor:
        """Return the magnitude, 0-dim, that about k of ``magnitudes`` should reach.

        Args:
            magnitudes: ``(numel,)``, the greatest of them 1.
            k: how many are wanted, fewer than there are.
        """

    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        k = self.count(buffer.numel())
        lowest = smallest(buffer)
        if k >= buffer.numel():
            return reaching(buffer, lowest)
        magnitudes = buffer.abs()
        largest = magnitudes.amax()
        # 1e30 squared overflows and 1e-30 squared vanishes; zeros do not reach the threshold.
        magnitudes.div_(largest.clamp_min(lowest))
        threshold = (self.threshold(magnitudes, k) * largest).clamp_min(lowest)
        found = reaching(buffer, threshold.to(buffer.dtype))
        return best(buffer, found, MOST * k)

    def most(self, numel: int) -> int:
        return min(numel, MOST * self.count(numel))

    def bound(self, numel: int) -> Contraction:
        """Return δ = 0: an estimate may be so wrong that nothing is sent."""
        return Contraction(0.0)


def reached(magnitudes: Tensor, threshold: Tensor) -> Tensor:
    """Return how many magnitudes are not below the threshold, 0-dim."""
    return (magnitudes >= threshold).sum()


HITS = 256  # elements of the sample that are expected to be among the k largest


def about_largest(buffer: Tensor, k: int, step: int) -> Tensor:
    """Return the ascending positions of the c largest magnitudes, zeros excluded, for some c ≤ k.

    c is at least ``rank(k, numel)``, but for zeros; and at least 0.8·k if the sample is like the
    tensor. For an accelerator the host waits once.
    Every ``stride(k, numel)``-th element is in the sample; the first one moves by one
    with every ``step``.
    """
    if not k:
        return torch.empty(0, dtype=torch.int64, device=buffer.device)
    apart = stride(k, buffer.numel())
    sample = buffer[step % apart :: apart].abs()
    lowest = smallest(buffer)
    reached = kth_largest(sample, rank(k, buffer.numel()))
    # NaN stays NaN, which all elements reach.
    thresholds = [reached.mul(FACTOR**i).clamp_min(lowest) for i in range(CORRECTIONS + 1)]
    if payload_validation.on_host(buffer):
        for threshold in thresholds:
            found = reaching(buffer, threshold)
            if found.numel() >= enough(k) or threshold <= lowest:
                break
        return best(buffer, found, k)
    bits = magnitude_bits(buffer)
    limits = [
        magnitude_bits(threshold.masked_fill(threshold.isnan(), 0)) for threshold in thresholds
    ]
    numbers = torch.stack([(bits >= limit).sum() for limit in limits]).tolist()
    number = next((number for number in numbers if number >= enough(k)), numbers[-1])
    return largest(buffer, min(k, number))


def enough(k: int) -> int:
    """Return how many elements must reach a sampled threshold: 0.8·k."""
    return math.ceil(FACTOR * k)


def stride(k: int, numel: int) -> int:
    """Return how far apart elements of the sample are.

    An odd number, or the sample would be from a few columns of a matrix with an even row length.
    """
    most = max(numel // 100, 1 << 16)
    wanted = -(-HITS * numel // max(1, k))
    apart = max(1, numel // max(1, min(most, wanted)))
    return apart - 1 + apart % 2


def rank(k: int, numel: int) -> int:
    """Return how many elements of the sample reach the threshold, and of the tensor at least."""
    return max(1, round(k * (numel // stride(k, numel)) / max(1, numel)))
