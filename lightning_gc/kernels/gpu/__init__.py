"""Triton kernels, one module for each family; imported when a tensor on a GPU needs them.

A family's ``ATTEMPTS`` has a function for each operation. It yields results of the kernels for
``(1000,)`` numbers, and beside each the result of torch's operations.
"""

import importlib

import torch


def self_test(family: str, device: torch.device) -> None:
    """Compare a family's kernels with torch on a small tensor of ``device``; the host waits.

    A kernel that does not compile or run would else fail in a training step, perhaps on one worker.
    Tests compare bit for bit; this is for an unknown compiler or device.

    Raises:
        RuntimeError: a kernel does not compile or run, or its result differs from torch's.
    """
    numbers = torch.linspace(-1, 1, 1000, dtype=torch.float32, device=device)
    module = importlib.import_module(f"{__name__}.{family}")
    for name, attempt in module.ATTEMPTS.items():
        try:
            for ours, theirs in attempt(numbers):
                if ours.shape != theirs.shape or not torch.allclose(ours, theirs, atol=1e-6):
                    raise ArithmeticError("its result differs from torch's")
        except Exception as error:  # any exception of a compiler or driver
            raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from error
