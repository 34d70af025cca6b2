"""Add a sparse payload to a dense tensor (scatter-add)."""

from torch import Tensor

from lightning_gc.kernels.dispatch import compiled, fused


def accumulate(out: Tensor, positions: Tensor, values: Tensor, scale: float) -> None:
    """Add ``scale · values_i`` to ``out`` at ``positions_i``.

    The product is rounded before it is added, on all devices.

    Args:
        out: ``(numel,)``, changed in place.
        positions: ``(k,)`` int64, distinct and below ``numel``, as returned by
            ``payload_validation.positions``, which makes the values of equal positions NaN; one of
            them is added.
        values: ``(k,)``, of a floating dtype that is not wider than ``out``'s.
        scale: 1/W for a mean over W workers.

    On CUDA each thread reads, adds and writes one element; no atomics.

    Example:
        >>> import torch
        >>> out = torch.zeros(3)
        >>> accumulate(out, torch.tensor([0, 2]), torch.tensor([1.0, -2.0]), 0.5)
        >>> out
        tensor([ 0.5000,  0.0000, -1.0000])
    """
    if fused(out, "sparse") and positions.is_contiguous() and values.is_contiguous():
        from lightning_gc.kernels.gpu import sparse as gpu

        gpu.add(out, positions, values, scale)
    elif compiled(out, "sparse") and values.dtype == out.dtype and values.is_contiguous():
        from lightning_gc.kernels.host import sparse

        sparse.add(out, positions.contiguous(), values, scale)
    else:
        reference(out, positions, values, scale)


def reference(out: Tensor, positions: Tensor, values: Tensor, scale: float) -> None:
    """Compute the same with torch operations."""
    out.index_add_(0, positions, values.to(out.dtype), alpha=scale)
