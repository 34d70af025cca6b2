"""Per-parameter operations of a flat bucket: largest magnitudes, and moves of idle parameters.

On a GPU each operation is one kernel over pieces of all parameters. A program ends at once if its
parameter is not idle, so moves cost no memory traffic in most steps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_gc.kernels.dispatch import fused

PIECE = 1 << 15
"""Elements of a parameter that one program of a kernel reads at most."""

Move = Literal["copy", "take", "add"]


class Segments:
    """The places of a bucket's parameters, without empty ones, on the host and on its device.

    Args:
        spans: first element and end of each parameter, ascending.
        device: of the bucket.

    Attributes:
        starts, lengths: ``(n,)`` int64, on the device.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], device: torch.device) -> None:
        self.spans = [slice(start, stop) for start, stop in spans]
        self._device = device
        table = [(start, stop - start) for start, stop in spans]
        self.starts, self.lengths = (
            torch.tensor(table, dtype=torch.int64, device=device).view(-1, 2).t().contiguous()
        )

    @functools.cached_property
    def pieces(self) -> Tensor:
        """Parameter, first element and end of each piece, ``(3, m)`` int32, on the device."""
        rows = [
            (index, start, min(start + PIECE, span.stop))
            for index, span in enumerate(self.spans)
            for start in range(span.start, span.stop, PIECE)
        ]
        return torch.tensor(rows, dtype=torch.int32, device=self._device).t().contiguous()


def peaks(flat: Tensor, segments: Segments) -> Tensor:
    """Return a number per parameter that is zero, or not finite, exactly if the parameter is.

    Args:
        flat: ``(numel,)``, of a floating dtype.
        segments: n parameters that cover ``flat``.

    Returns:
        ``(n,)``. On CPU it is the L2 norm, or the largest magnitude, which takes ten times as long,
        where the norm is 0 or not finite: its squares may leave float32's range.
    """
    if fused(flat):
        from lightning_gc.kernels import triton_kernels

        return triton_kernels.peaks(flat, segments.pieces, len(segments.spans))
    slices = [flat[span] for span in segments.spans]
    if flat.device.type != "cpu":
        return torch.stack(torch._foreach_norm(slices, float("inf")))
    norms = torch._foreach_norm(slices)
    sure = [0 < norm < float("inf") for norm in torch.stack(norms).tolist()]
    return torch.stack(
        [norm if ok else s.abs().max() for norm, s, ok in zip(norms, slices, sure, strict=True)]
    )


class Idle:
    """Moves elements of idle parameters only: parameters with a peak of zero.

    Args:
        found: as ``peaks`` returns them.
        segments: of the same bucket.
    """

    def __init__(self, found: Tensor, segments: Segments) -> None:
        self._peaks, self._segments = found, segments
        self._spans: list[slice] | None = None
        if found.device.type == "cpu":
            pairs = zip(segments.spans, found.tolist(), strict=True)
            self._spans = [span for span, peak in pairs if peak == 0]

    @property
    def none(self) -> bool:
        """Whether no parameter is idle; False if only the device knows."""
        return self._spans is not None and not self._spans

    def move(self, how: Move, target: Tensor, source: Tensor) -> None:
        """Change idle parameters' elements of ``target``, without making the host wait.

        Args:
            how: ``"copy"`` sets them to the elements of ``source``. ``"take"`` also zeroes
                ``source`` there. ``"add"`` adds finite elements of ``source``.
            target: ``(numel,)``, changed in place.
            source: ``(numel,)``.
        """
        if fused(source) and fused(target):
            from lightning_gc.kernels import triton_kernels

            triton_kernels.move_idle(how, target, source, self._peaks, self._segments.pieces)
        elif self._spans is not None:
            for span in self._spans:
                part = source[span]
                if how == "add":
                    target[span].add_(part.nan_to_num(0.0, 0.0, 0.0))
                    continue
                target[span].copy_(part)
                if how == "take":
                    part.zero_()
        else:
            idle = self._peaks == 0
            mask = idle.repeat_interleave(self._segments.lengths, output_size=source.numel())
            if how == "add":
                target.add_(source.masked_fill(~mask, 0).nan_to_num_(0.0, 0.0, 0.0))
                return
            target.copy_(torch.where(mask, source, target))
            if how == "take":
                source.masked_fill_(mask, 0)


def silence(flat: Tensor, flag: Tensor) -> None:
    """Zero ``flat``, ``(numel,)``, if ``flag``, ``(1,)``, is NaN. The host does not wait."""
    if fused(flat):
        from lightning_gc.kernels import triton_kernels

        triton_kernels.silence(flat, flag)
    elif flat.device.type != "cpu":
        flat.masked_fill_(flag.isnan(), 0)
    elif not flag.isfinite():
        flat.zero_()


def clean(flat: Tensor) -> None:
    """Set elements of ``flat``, ``(numel,)``, that are not finite to zero."""
    if fused(flat):
        from lightning_gc.kernels import triton_kernels

        triton_kernels.clean(flat)
    # The sum takes a third of the time, and is not finite if an element is not.
    elif flat.device.type != "cpu" or not flat.sum().isfinite():
        flat.nan_to_num_(0.0, 0.0, 0.0)
