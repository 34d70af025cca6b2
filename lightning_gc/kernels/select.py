"""Select: move elements at or above a threshold out of a buffer."""

from torch import Tensor

from lightning_gc.kernels.dispatch import fused


def select(buffer: Tensor, threshold: float | Tensor) -> tuple[Tensor, Tensor]:
    """Move elements ``|x_i| ≥ λ`` out of ``buffer``, where they become 0. The host waits.

    NaN is always moved, so that it is sent; otherwise it would stay in the error unseen.

    Args:
        buffer: x, ``(numel,)`` float32, changed in place.
        threshold: λ, a magnitude; a number or a tensor of one element.

    Returns:
        Values, ``(k,)`` float32, and their ascending positions, ``(k,)`` int64.

    Two kernels on CUDA: the first marks elements that reach λ in a bitmap and counts them by block;
    the second gathers. They move ``4 + 1/4`` bytes per element and some 50 per selected element.

    Example:
        >>> import torch
        >>> error = torch.tensor([0.5, 0.25, -2.0])
        >>> select(error, 0.5)
        (tensor([ 0.5000, -2.0000]), tensor([0, 2]))
        >>> error
        tensor([0.0000, 0.2500, 0.0000])
    """
    if fused(buffer):
        from lightning_gc.kernels.gpu import tensors as gpu

        return gpu.select(buffer, threshold)
    return reference(buffer, threshold)


def reaching(buffer: Tensor, threshold: float | Tensor) -> Tensor:
    """Return the ascending positions with ``|x_i| ≥ λ`` or NaN, ``(k,)`` int64.

    ``buffer``, ``(numel,)``, is not changed. The host waits for k. The two kernels move ``4 + 1/4``
    bytes per element; torch operations allocate an absolute value, two masks and a count.
    """
    if fused(buffer):
        from lightning_gc.kernels.gpu import tensors as gpu

        return gpu.reaching(buffer, threshold)
    return reaching_reference(buffer, threshold)


def reference(buffer: Tensor, threshold: float | Tensor) -> tuple[Tensor, Tensor]:
    """Compute the same with torch operations."""
    positions = reaching_reference(buffer, threshold)
    values = buffer[positions]
    buffer.index_fill_(0, positions, 0)
    return values, positions


def reaching_reference(buffer: Tensor, threshold: float | Tensor) -> Tensor:
    """Compute the same with torch operations."""
    return (buffer.abs() < threshold).logical_not_().nonzero().view(-1)
