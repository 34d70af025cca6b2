"""MXFP4 and MXFP8: the OCP microscaling formats, 32 elements to a power-of-two scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lightning_gc.compressors.base import Traits
from lightning_gc.compressors.quantisers.minifloat import Minifloat
from lightning_gc.core import Choice


class _Microscaling(Minifloat):
    scaling = "e8m0"
    block_size = 32


@dataclass(frozen=True)
class MXFP4(_Microscaling):
    """Round each element to OCP's MXFP4, for hardware or programs that read this 4-bit format.

    ``C(x)_i = X·nearest(x_i / X)``, ``X = 2^(floor(log2 L) − 2)``, where L is the largest magnitude
    of 32 elements. The format has 0, 0.5, 1, 1.5, 2, 3, 4, 6. Ties go to the even code, and what is
    above 6·X becomes 6·X, as the standard says. An element takes 4.25 bits.

    ``Float4()`` has a float32 scale, which sends each block's largest element exactly. It takes 4.5
    bits and leaves less error. Use this format where hardware or another program reads it.

    Example:
        >>> import torch
        >>> from lightning_gc import MXFP4
        >>> from lightning_gc.testing import Lockstep
        >>> Lockstep(1, MXFP4()).step([{"w": torch.tensor([7.0, -2.4, 0.1])}]).mean["w"]
        tensor([ 6., -2.,  0.])

    Reference:
        Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023.
    """

    format = "e2m1"
    bits = 4
    formats: ClassVar = {"e2m1": (1, 7, 1)}
    registry_name = "mxfp4"
    traits = Traits(kind="quantiser")


@dataclass(frozen=True)
class MXFP8(_Microscaling):
    """Round each element to OCP's MXFP8, for hardware or programs that read this 8-bit format.

    As ``MXFP4``, with ``X = 2^(floor(log2 L) − 8)`` and numbers up to 448 for ``"e4m3"``, and
    ``X = 2^(floor(log2 L) − 15)`` and numbers up to 57,344 for ``"e5m2"``. An element takes 8.25
    bits.

    Args:
        format: ``"e4m3"`` is rounded by at most 1/17 of an element, and by 1/8 next to the block's
            largest. ``"e5m2"`` is rounded by at most 1/8 and reaches smaller elements.

    Example:
        >>> import torch
        >>> from lightning_gc import MXFP8
        >>> from lightning_gc.testing import Lockstep
        >>> Lockstep(1, MXFP8()).step([{"w": torch.tensor([500.0, -100.0, 0.0])}]).mean["w"]
        tensor([448., -96.,   0.])

    Reference:
        Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"

    bits = 8
    formats: ClassVar = {"e4m3": (3, 126, 9), "e5m2": (2, 123, 16)}
    registry_name = "mxfp8"
    traits = Traits(kind="quantiser", space=(Choice("format", ("e4m3", "e5m2")),))

    @classmethod
    def examples(cls) -> tuple[MXFP8, ...]:
        return (cls(), cls("e5m2"))
