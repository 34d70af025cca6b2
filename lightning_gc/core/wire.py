"""Declare wire formats: the name, dtype and length of each tensor of a compressor's payload."""

from dataclasses import dataclass
from typing import Literal

import torch

from lightning_gc.core.flow import Limits


@dataclass(frozen=True)
class Field:
    """One flat tensor of a payload.

    Attributes:
        name: the content, such as values or scales.
        dtype: dtype of the tensor for a float32 gradient.
        length: number of elements; an upper limit if the length varies.
        varies: ``"no"``: the length is fixed. ``"step"``: it depends on the step and is equal on
            all workers. ``"worker"``: it depends on values, so workers send their lengths first.
        note: a few words on the coding of elements, for the documentation.
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
    """Return the maximal elements per ragged tensor; None if all tensors have fixed lengths."""
    if all(field.varies != "worker" for field in wire):
        return None
    return tuple(field.length if field.varies == "worker" else None for field in wire)
