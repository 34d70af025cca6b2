"""What the sparsifiers share: densities, and a payload of values and coded positions."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gc.coding import elias_fano, payload_validation
from lightning_gc.flow import Payload
from lightning_gc.kernels.accumulate import accumulate


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


def index_bytes(chosen: int, numel: int) -> int:
    """Return the bytes that ``chosen`` coded positions take."""
    return elias_fano.coded_bytes(chosen, numel)


def most_index_bytes(most: int, numel: int) -> int:
    """Return a length that ``most`` coded positions, or fewer, do not exceed."""
    return elias_fano.coded_bytes(most, numel) + 2  # each of two parts is rounded up to a byte


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
    return values, elias_fano.encode(indices, buffer.numel())


def places(payload: Payload, numel: int) -> tuple[Tensor, Tensor]:
    """Return positions in ``numel`` elements, ascending, and values, of what ``take`` has made.

    Raises:
        ValueError: positions outside the tensor or not ascending, or lengths that disagree.
    """
    values, coded = payload
    payload_validation.lengths(payload, values.numel(), index_bytes(values.numel(), numel))
    found = elias_fano.decode(coded, values.numel(), numel, payload_validation.on_host(coded))
    return payload_validation.positions(found, values, numel)


def add(values: Tensor, coded: Tensor, out: Tensor, scale: float) -> None:
    """Add ``scale * values`` to ``out`` at the coded positions; O(k), no dense intermediate.

    Raises:
        ValueError: positions outside ``out`` or not ascending, or lengths that disagree.
    """
    look = payload_validation.on_host(coded)
    indices = elias_fano.decode(coded, values.numel(), out.numel(), look)  # (k,)
    indices, values = payload_validation.positions(indices, values.to(out.dtype), out.numel())
    accumulate(out, indices, values, scale)


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
    payload_validation.lengths(payload, chosen, index_bytes(chosen, out.numel()))
    values, coded = payload
    add(values, coded, out, scale)
