"""What the sparsifiers share: finding positions, and a payload of values and coded positions."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gc import positions
from lightning_gc.compressors import checks
from lightning_gc.flow import Payload

_PIECE = 1 << 18  # elements: 1 MB
_ALL_BELOW = 0x0101010101010101  # eight times True


def check_density(name: str, density: float) -> None:
    """Refuse a density that is not in (0, 1]."""
    if not 0 < density <= 1:
        raise ValueError(
            f"{name}(density={density!r}): density is the share of elements sent and must be in "
            f"(0, 1]; use 0.01 to send one element in a hundred."
        )


def count(density: float, numel: int) -> int:
    """Return how many of ``numel`` elements a density sends: at least one, where there is one."""
    return min(numel, max(1, round(density * numel)))


def reaching(buffer: Tensor, threshold: float | Tensor) -> Tensor:
    """Return the ascending positions of magnitudes that are not below ``threshold``.

    So NaN is among them: it must be sent, or it would stay in the error unseen. On the host the
    tensor is walked in pieces that stay in the cache, and eight comparisons are looked at as one
    number, for most of eight neighbours are all below: a sixth of the time of ``nonzero``.
    """
    if buffer.device.type != "cpu":
        return (buffer.abs() < threshold).logical_not_().nonzero().view(-1)
    scratch = buffer.new_empty(min(_PIECE, -(-buffer.numel() // 8) * 8))
    found = []
    for start in range(0, buffer.numel(), _PIECE):
        piece = buffer[start : start + _PIECE]
        padded = -(-len(piece) // 8) * 8
        torch.abs(piece, out=scratch[: len(piece)])
        scratch[len(piece) : padded] = -1  # below any threshold
        below = scratch[:padded] < threshold
        (rows,) = (below.view(torch.int64) != _ALL_BELOW).nonzero(as_tuple=True)
        row, column = below.view(-1, 8)[rows].logical_not_().nonzero(as_tuple=True)
        found.append(rows[row].mul_(8).add_(column).add_(start))
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


def largest(buffer: Tensor, k: int) -> Tensor:
    """Return the ascending positions of the k elements of greatest magnitude.

    Exactly these, but on the host without sorting them all: a sample tells a threshold that some
    more than k elements reach, and the k largest are sought among those.
    """
    sample = buffer[:: max(1, buffer.numel() >> 18)].abs()
    expected = sample.numel() * k / max(buffer.numel(), 1)
    rank = int(1.05 * expected + 4 * expected**0.5) + 1
    if buffer.device.type == "cpu" and rank < sample.numel() // 4:
        found = reaching(buffer, torch.topk(sample, rank, sorted=False).values.min())
        if k <= found.numel() < buffer.numel() // 2:
            return best(buffer, found, k)
    return torch.topk(buffer.abs(), k, sorted=False).indices.sort().values


def best(buffer: Tensor, found: Tensor, k: int) -> Tensor:
    """Return those k of the ascending positions ``found`` where magnitudes are greatest."""
    if found.numel() <= k:
        return found
    return found[torch.topk(buffer[found].abs(), k, sorted=False).indices.sort().values]


def smallest(buffer: Tensor) -> float:
    """Return the smallest magnitude above zero that ``buffer`` can hold."""
    kind = torch.finfo(buffer.dtype)
    return kind.smallest_normal * kind.eps


def index_bytes(chosen: int, numel: int) -> int:
    """Return the bytes that ``chosen`` coded positions take."""
    return positions.coded_bytes(chosen, numel)


def most_index_bytes(most: int, numel: int) -> int:
    """Return a length that ``most`` coded positions, or fewer, do not exceed."""
    return positions.coded_bytes(most, numel) + 2  # each of two parts is rounded up to a byte


def take(buffer: Tensor, indices: Tensor, dtype: torch.dtype | None = None) -> Payload:
    """Move elements out of ``buffer`` into (values, coded positions); the indices must ascend.

    With a narrower ``dtype`` for values, what rounding leaves of them stays in ``buffer``.
    """
    values = buffer[indices]  # (k,) buffer.dtype
    if dtype is None or dtype == buffer.dtype:
        buffer[indices] = 0
    else:
        whole, values = values, values.to(dtype)
        buffer[indices] = whole - values.to(buffer.dtype)
    return values, positions.encode(indices, buffer.numel())


def add(values: Tensor, coded: Tensor, out: Tensor, scale: float) -> None:
    """Add ``scale * values`` to ``out`` at the coded positions; O(k), no dense intermediate.

    Raises:
        ValueError: positions outside ``out`` or not ascending, or lengths that disagree.
    """
    look = checks.on_host(coded)
    indices = positions.decode(coded, values.numel(), out.numel(), look)  # (k,)
    indices, values = checks.positions(indices, values.to(out.dtype), out.numel())
    out.index_add_(0, indices, values, alpha=scale)


def put(payload: Payload, out: Tensor, scale: float, most: int | None = None) -> None:
    """Add ``scale`` times what ``take`` has made of any number of elements to ``out``.

    Args:
        payload: (values, coded positions).
        out: where they are added.
        scale: by what they are multiplied.
        most: how many elements its sender may send; as many as there are where None.

    Raises:
        ValueError: more elements, and what ``add`` raises.
    """
    chosen = payload[0].numel()
    if most is not None and chosen > most:
        raise ValueError(
            f"The payload names {chosen:,} positions of a tensor of {out.numel():,} elements, of "
            f"which at most {most:,} are sent; its sender has another configuration."
        )
    checks.lengths(payload, chosen, index_bytes(chosen, out.numel()))
    values, coded = payload
    add(values, coded, out, scale)
