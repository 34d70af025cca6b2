"""Wire format of a payload: name, dtype and length of each tensor, declared once per compressor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from lightning_gc.flow import Limits


@dataclass(frozen=True)
class Field:
    """One tensor of a payload, always flat.

    Attributes:
        name: what it holds.
        dtype: of its elements, for a gradient in float32.
        length: elements; the most there can be where the length varies.
        varies: ``"no"``, with the ``"step"`` but equally on all workers, or with values, so that
            each ``"worker"`` sends another number: then lengths are sent ahead.
        note: how elements are coded, in a few words, for the documentation.
    """

    name: str
    dtype: torch.dtype
    length: int
    varies: Literal["no", "step", "worker"] = "no"
    note: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor at its greatest length."""
        return self.length * self.dtype.itemsize


Wire = tuple[Field, ...]
"""A wire format: the tensors of a payload in order."""


def limits(wire: Wire) -> Limits | None:
    """Return the most elements of each tensor that is ragged, for a request; None if none is."""
    if all(field.varies != "worker" for field in wire):
        return None
    return tuple(field.length if field.varies == "worker" else None for field in wire)
