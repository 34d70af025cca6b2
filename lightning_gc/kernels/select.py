"""Find the elements at or above a threshold."""

from torch import Tensor

from lightning_gc.kernels.dispatch import fused


def reaching(buffer: Tensor, threshold: float | Tensor) -> Tensor:
    """Return the ascending positions with ``|x_i| ≥ λ`` or NaN, ``(k,)`` int64. The host waits.

    NaN is always among them, so that it is sent; otherwise it would stay in the error unseen.

    Args:
        buffer: x, ``(numel,)`` float32, not changed.
        threshold: λ, a magnitude; a number or a tensor of one element.

    Two kernels on CUDA: the first marks elements that reach λ in a bitmap and counts them by block;
    the second gathers. They move ``4 + 1/4`` bytes per element and 8 per selected element. Torch
    operations allocate an absolute value, two masks and a count.

    Example:
        >>> import torch
        >>> reaching(torch.tensor([0.5, 0.25, -2.0]), 0.5)
        tensor([0, 2])
    """
    if fused(buffer):
        from lightning_gc.kernels.gpu import tensors as gpu

        return gpu.reaching(buffer, threshold)
    return reference(buffer, threshold)


def reference(buffer: Tensor, threshold: float | Tensor) -> Tensor:
    """Compute the same with torch operations."""
    return (buffer.abs() < threshold).logical_not_().nonzero().view(-1)
