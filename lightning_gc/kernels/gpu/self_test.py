"""Try every Triton kernel on a device before a training step needs it."""

from __future__ import annotations

import torch

from lightning_gc.kernels.gpu import casts, low_rank, segments, tensors

_ATTEMPTS = {
    **tensors.ATTEMPTS,
    "segments": segments.attempt,
    "casts": casts.attempt,
    "low_rank": low_rank.attempt,
}


def self_test(device: torch.device) -> None:
    """Compare every kernel with torch on a small tensor of ``device``; the host waits.

    A kernel that does not compile or run would else fail in a training step, perhaps on one worker.
    Tests compare bit for bit; this is for an unknown compiler or device.

    Raises:
        RuntimeError: a kernel does not compile or run, or its result differs from torch's.
    """
    numbers = torch.linspace(-1, 1, 1000, dtype=torch.float32, device=device)
    for name, attempt in _ATTEMPTS.items():
        try:
            for ours, theirs in attempt(numbers):
                if ours.shape != theirs.shape or not torch.allclose(ours, theirs, atol=1e-6):
                    raise ArithmeticError("its result differs from torch's")
        except Exception as error:  # any exception of a compiler or driver
            raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from error
