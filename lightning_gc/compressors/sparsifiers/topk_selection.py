"""Finding the positions of a tensor's large elements: by threshold, or the k largest.

On the host by NumPy, which is vectorised where torch is not: a quarter of the time for 1 % of 25
million elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gc.kernels import select
from lightning_gc.kernels.dispatch import fused

_SMALL = 1 << 14  # elements, of which torch finds the largest before a sample would be taken
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

    So NaN is among them: it must be sent, or it would stay in the error unseen.
    """
    if not _on_host(buffer) or fused(buffer):
        return select.reaching(buffer, threshold)
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

    On the host a sample gives a threshold that somewhat more than k elements reach, and the k
    largest are sought among those. Of equal ones the first are taken, unless ``topk`` is used.
    """
    if _on_host(buffer) and buffer.numel() <= _SMALL:
        return _by_torch(buffer, k)
    # An odd distance, or in a matrix with an even row length the sample is from half the columns.
    hits = min(max(k // _CANDIDATES, _HITS[0]), _HITS[1])
    wanted = min(hits * buffer.numel() // max(k, 1), 1 << 17)
    sample = buffer[:: (buffer.numel() // max(wanted, 1)) | 1].abs()
    expected = sample.numel() * k / max(buffer.numel(), 1)
    rank = int(1.05 * expected + 4 * expected**0.5) + 1
    if _on_host(buffer) and rank < sample.numel() // 4:
        found = reaching(buffer, kth_largest(sample, rank))
        if k <= found.numel() < buffer.numel() // 2:
            return best(buffer, found, k)
    return _by_torch(buffer, k)


def _by_torch(buffer: Tensor, k: int) -> Tensor:
    return torch.topk(buffer.abs(), k, sorted=False).indices.sort().values


def best(buffer: Tensor, found: Tensor, k: int) -> Tensor:
    """Return those k of the ascending positions ``found`` where magnitudes are greatest."""
    if found.numel() <= k:
        return found
    magnitudes = buffer[found].abs()
    if not k or not _on_host(buffer):
        return found[torch.topk(magnitudes, k, sorted=False).indices.sort().values]
    magnitudes.nan_to_num_(torch.inf, torch.inf)  # larger than all, as topk has it
    limit = kth_largest(magnitudes, k)
    keep = magnitudes > limit
    as_large = (magnitudes == limit).nonzero().view(-1)
    keep[as_large[: k - int(keep.count_nonzero())]] = True
    return found[keep]


def kth_largest(magnitudes: Tensor, k: int) -> Tensor:
    """Return the k-th largest of ``(n,)`` magnitudes, 0-dim; NaN is larger than all, as in topk."""
    if not _on_host(magnitudes):
        return torch.topk(magnitudes, k, sorted=False).values.min()
    numbers = magnitudes.numpy()
    if 2 * np.count_nonzero(numbers) < len(numbers):  # many equal numbers are slow to part
        numbers = numbers[numbers != 0]
    place = len(numbers) - k
    return magnitudes.new_tensor(
        float(np.partition(numbers, place)[place]) if 0 <= place < len(numbers) else 0.0
    )


def smallest(buffer: Tensor) -> float:
    """Return the smallest magnitude above zero that ``buffer`` can hold."""
    kind = torch.finfo(buffer.dtype)
    return kind.smallest_normal * kind.eps


def _on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in _INTEGERS
