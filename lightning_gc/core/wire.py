"""Wire format: name, dtype and length of each tensor of a payload, declared by the compressor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from lightning_gc.core.flow import Limits


@dataclass(frozen=True)
class Field:
    """One tensor of a payload, always flat.

    Attributes:
        name: of the content, such as values or scales.
        dtype: for a gradient in float32.
        length: elements; an upper limit where the length varies.
        varies: ``"no"``; with the ``"step"``, equally on all workers; or with values, so that each
            ``"worker"`` may send another length: then lengths are sent first.
        note: how elements are coded, in a few words, for the documentation.
    """

    name: str
    dtype: torch.dtype
    length: int
    varies: Literal["no", "step", "worker"] = "no"
    note: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor at its maximal length."""
        return self.length * self.dtype.itemsize


Wire = tuple[Field, ...]
"""A wire format: the tensors of a payload in order."""


def limits(wire: Wire) -> Limits | None:
    """Return a request's limits: maximal elements of each ragged tensor; None if none is ragged."""
    if all(field.varies != "worker" for field in wire):
        return None
    return tuple(field.length if field.varies == "worker" else None for field in wire)
