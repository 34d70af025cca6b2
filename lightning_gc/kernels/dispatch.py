"""Choose between a compiled kernel and its torch reference, for all kernels."""

import functools
import importlib
import os
import warnings
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

MAX_NUMEL = 1 << 30  # kernels count in int32


def fused(tensor: Tensor) -> bool:
    """Return whether the Triton kernels are used for ``tensor``, ``(numel,)``.

    They are used for float32 on CUDA if triton can be imported (torch's CUDA wheels for Linux have
    it) and all kernels pass a self-test. If one fails, torch is used and a warning is given. On CPU
    they run in Triton's interpreter only, for tests: set ``TRITON_INTERPRET=1`` before triton is
    imported.
    """
    suitable = tensor.dtype == torch.float32 and tensor.is_contiguous()
    if not suitable or not 0 < tensor.numel() < MAX_NUMEL:
        return False
    if tensor.device.type == "cuda":
        return _works(tensor.device)
    return _interpreted() and tensor.device.type == "cpu"


def compiled(tensor: Tensor, family: str) -> bool:
    """Return whether numba's kernels are used for ``tensor``, ``(numel,)``.

    They are used for float32 on the host if numba can be imported (the extra ``fast`` installs it)
    and the family's kernels give torch's bits in a self-test. Kernels of low rank give them up to
    rounding. If one fails, torch is used and a warning is given.

    Args:
        tensor: on any device.
        family: a module of ``kernels.host``.
    """
    suitable = tensor.dtype == torch.float32 and tensor.is_contiguous()
    return suitable and tensor.device.type == "cpu" and tensor.numel() > 0 and _numba_works(family)


def family(name: str, tensor: Tensor) -> ModuleType:
    """Return the module of a family's kernels for ``tensor``: of Triton, else of numba.

    Args:
        name: of the modules in ``kernels.gpu`` and ``kernels.host``.
        tensor: for which ``fused`` or ``compiled`` returns True.
    """
    return _module(f"{'gpu' if fused(tensor) else 'host'}.{name}")


def may_compile(device: torch.device) -> bool:
    """Return whether kernels are compiled when they are first used for tensors of ``device``."""
    return find_spec("numba") is not None if device.type == "cpu" else fused(_one(device))


def in_words(device: torch.device) -> str:
    """Name the implementation for float32 tensors of ``device``; tests the kernels on CUDA."""
    if not fused(_one(device)):
        return "torch"
    import triton

    return f"Triton {triton.__version__}"


def numba_in_words() -> str:
    """Return whether numba's matrix products are used on the host; tests them.

    The other families give torch's bits, so workers may differ in them.
    """
    return "used" if _numba_works("low_rank") else "not used"


def uncompiled() -> list[str]:
    """Return the families of numba's kernels that are compiled when they are first used.

    Without numba these are all: torch's operations are used.
    """
    from lightning_gc.kernels import host

    found = find_spec("numba") is not None
    return [family for family in host.FAMILIES if not (found and host.is_on_disk(family))]


def _one(device: torch.device) -> Tensor:
    return torch.ones(1, dtype=torch.float32, device=device)


@functools.cache
def _numba_works(family: str) -> bool:
    """Test a family's kernels, once: compiling all families takes half a minute."""
    if find_spec("numba") is None:
        return False
    try:
        from lightning_gc.kernels.host import self_test

        self_test(family)
    except Exception as error:  # any exception of a compiler, or of a folder that cannot be written
        warnings.warn(
            f"numba's kernels of {family} do not run here ({type(error).__name__}: {error}); "
            f"torch's operations are used instead, with the same results in more time.",
            stacklevel=2,
        )
        return False
    return True


@functools.cache  # a look for an imported module takes 10 µs, and each bucket has several
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"lightning_gc.kernels.{name}")


@functools.cache
def _found() -> bool:
    return find_spec("triton") is not None


@functools.cache
def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1" and _found()


@functools.cache
def _works(device: torch.device) -> bool:
    """Test all kernels, once per device: a C compiler may be missing, or the GPU too old."""
    if not _found():
        return False
    try:
        from lightning_gc.kernels.gpu import self_test

        self_test(device)
    except Exception as error:  # any exception of a compiler or driver
        warnings.warn(
            f"Triton's kernels do not run on {device} ({type(error).__name__}: {error}); torch's "
            f"operations are used instead, with the same results.",
            stacklevel=2,
        )
        return False
    return True


def used_here(tensor: Tensor) -> None:
    """Keep the memory of ``tensor`` until the current stream has done its queued work.

    The training thread allocates restored tensors, and the background thread replaces them while
    its stream still has to read them. Without this call the allocator would give the memory to the
    training thread's next tensor at once. Nothing is done on the host.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
