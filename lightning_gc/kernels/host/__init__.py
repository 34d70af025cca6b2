"""Numba kernels, one module for each family; imported when a tensor on the host needs them.

They give the bits of torch's operations, so workers with and without numba can train together.
Compiled code is kept on disk. A family's ``ATTEMPTS`` is as in ``kernels.gpu``.
"""

import importlib
from pathlib import Path

import torch

FAMILIES = ("blocks", "casts", "levels", "low_rank", "segments", "signs", "sparse")
"""The modules with kernels."""


def is_on_disk(family: str) -> bool:
    """Return whether numba has kept compiled code of a family that is newer than its source."""
    module = importlib.import_module(f"{__name__}.{family}")
    kernels = [each for each in vars(module).values() if hasattr(each, "py_func")]
    source = Path(str(module.__file__)).stat().st_mtime
    folders = {Path(each.stats.cache_path) for each in kernels}
    kept = (each for folder in folders for each in folder.glob(f"{family}.*.nbi"))
    return any(each.stat().st_mtime >= source for each in kept)


def self_test(family: str) -> None:
    """Compare a family's kernels with torch on small tensors; this compiles missing kernels.

    An unknown compiler or processor may not run a kernel, or may contract arithmetic. Workers
    without numba would then decode other bits.

    Raises:
        ArithmeticError: a kernel's result differs from torch's.
    """
    numbers = torch.linspace(-1, 1, 5000, dtype=torch.float32, device="cpu").pow(3)
    numbers[96:240] = 0
    for name, attempt in importlib.import_module(f"{__name__}.{family}").ATTEMPTS.items():
        for ours, theirs in attempt(numbers):
            if not torch.equal(ours, theirs):
                raise ArithmeticError(f"the result of {name} differs from torch's")
