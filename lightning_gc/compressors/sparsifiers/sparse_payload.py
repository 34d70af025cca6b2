"""Payload of sparsifiers: values, and Elias-Fano coded positions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_gc.coding import elias_fano, payload_validation
from lightning_gc.coding.wire import Field, Wire
from lightning_gc.flow import Payload
from lightning_gc.kernels.accumulate import accumulate

Varies = Literal["no", "step", "worker"]


def wire(most: int, numel: int, varies: Varies, dtype: torch.dtype = torch.float32) -> Wire:
    """Return the format of ``take``: ``most`` values of ``numel`` elements, or up to as many."""
    return (Field("values", dtype, most, varies), positions_field(most, numel, varies))


def positions_field(most: int, numel: int, varies: Varies) -> Field:
    """Return the format of ``most`` coded positions, or up to as many."""
    nbytes = elias_fano.coded_bytes(most, numel)
    if varies != "no":
        nbytes += 2  # of fewer positions each of two parts is rounded up to a byte
    return Field("positions", torch.uint8, nbytes, varies, "Elias-Fano, ascending")


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
    chosen = values.numel()
    payload_validation.lengths(payload, chosen, elias_fano.coded_bytes(chosen, numel))
    found = elias_fano.decode(coded, chosen, numel, payload_validation.on_host(coded))
    return payload_validation.positions(found, values, numel)


def add(payload: Payload, out: Tensor, scale: float) -> None:
    """Add ``scale`` times what ``take`` has made to ``out``; O(k), no dense intermediate.

    Raises:
        ValueError: positions outside ``out`` or not ascending, or lengths that disagree.
    """
    values, coded = payload
    indices, values = places((values.to(out.dtype), coded), out.numel())
    accumulate(out, indices, values, scale)
