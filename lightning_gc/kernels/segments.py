"""Per-parameter operations of a flat bucket: largest magnitudes, and moves of idle parameters.

On a GPU each operation is one kernel over pieces of all parameters. A program ends at once if its
parameter is not idle, so moves cost no memory traffic in most steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_gc.core.segments import Pending, Segments, Workspace
from lightning_gc.kernels.dispatch import compiled, family, fused

Move = Literal["copy", "take", "add"]


def peaks(flat: Tensor, segments: Segments, work: Workspace | None = None) -> Tensor:
    """Return a number per parameter that is zero, or not finite, exactly if the parameter is.

    Args:
        flat: ``(numel,)``, of a floating dtype.
        segments: n parameters that cover ``flat``.
        work: zeros for the kernel; None: it makes its own.

    Returns:
        ``(n,)``, the largest magnitudes. On CPU without numba it is the L2 norm where that is
        neither 0 nor infinite, since it takes a tenth of the time.
    """
    if fused(flat, "segments"):
        from lightning_gc.kernels.gpu import segments as gpu

        return gpu.peaks(flat, segments, work or Workspace(segments))
    if compiled(flat, "segments"):
        from lightning_gc.kernels.host import segments as host

        return host.peaks(flat, segments)
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
        if fused(source, "segments") and fused(target, "segments"):
            from lightning_gc.kernels.gpu import segments as gpu

            gpu.move_idle(how, target, source, self._peaks, self._segments.pieces)
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
            mask = self._segments.elementwise(idle)
            if how == "add":
                target.add_(source.masked_fill(~mask, 0).nan_to_num_(0.0, 0.0, 0.0))
                return
            target.copy_(torch.where(mask, source, target))
            if how == "take":
                source.masked_fill_(mask, 0)


def silence(flat: Tensor, found: Tensor, segments: Segments) -> Tensor:
    """Zero ``flat``, ``(numel,)``, if a peak is not finite. The host does not wait.

    Args:
        flat: ``(numel,)``, changed in place.
        found: ``(n,)``, as ``peaks`` returns them.
        segments: of the same bucket.

    Returns:
        The flag, ``(1,)``: 0, or NaN if a peak is not finite.
    """
    if fused(flat, "segments"):
        from lightning_gc.kernels.gpu import segments as gpu

        return gpu.silence(flat, found, segments)
    if flat.device.type == "cpu":
        bad = not all(map(math.isfinite, found.tolist()))
        if bad:
            flat.zero_()
        return found.new_full((1,), math.nan if bad else 0.0)
    flag = found.mul(0).sum(0, keepdim=True)
    flat.masked_fill_(flag.isnan(), 0)
    return flag


def clean(flat: Tensor) -> None:
    """Set elements of ``flat``, ``(numel,)``, that are not finite to zero."""
    if fused(flat, "segments"):
        from lightning_gc.kernels.gpu import segments as gpu

        gpu.clean(flat)
    # The sum takes a third of the time, and is not finite if an element is not.
    elif flat.device.type != "cpu" or not flat.sum().isfinite():
        flat.nan_to_num_(0.0, 0.0, 0.0)


def take(buffer: Tensor, table: Tensor, taken: Tensor, pending: Pending) -> None:
    """Move the parameters of ``table`` out of ``buffer``, as ``core.segments.Pending`` says.

    Args:
        buffer: of the whole bucket, changed in place.
        table: as ``core.segments.pieces_of`` returns it.
        taken: their elements, one parameter after the other, float32; overwritten.
        pending: has the gradient to add, and idle parameters.
    """
    family("segments", buffer).take(buffer, table, taken, pending)


def put(taken: Sequence[Tensor], out: Tensor, table: Tensor, pending: Pending) -> None:
    """Write the mean of several workers' ``taken`` to ``out``, and add the flags that arrived."""
    family("segments", out).put(taken, out, table, pending)


def book(buffer: Tensor, mean: Tensor, times: int, table: Tensor, pending: Pending | None) -> None:
    """Add ``times`` what is left of a mean, as ``schemes.base.book`` and the guard do.

    Args:
        buffer: of the whole bucket, changed in place.
        mean: a row of shards; numbers that are not finite may become 0.
        times: W.
        table: as ``core.segments.pieces_of`` returns it, for the places in the row.
        pending: tells idle parameters; None: the engine has set their errors aside.
    """
    family("segments", buffer).book(buffer, mean, times, table, pending)
