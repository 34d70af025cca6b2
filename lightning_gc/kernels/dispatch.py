"""Choose between a compiled kernel and its torch reference, for all kernels."""

import functools
import importlib
import os
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from lightning_gc.kernels import families

MAX_NUMEL = 1 << 30  # kernels count in int32


def fused(tensor: Tensor, family: str) -> bool:
    """Return whether a family of Triton's kernels is used for ``tensor``, ``(numel,)``.

    It is used for float32 on CUDA if triton can be imported (torch's CUDA wheels for Linux have
    it) and the family passes a self-test. If it fails, torch is used and a warning is given. On CPU
    kernels run in Triton's interpreter only, for tests: set ``TRITON_INTERPRET=1`` before triton is
    imported.

    Args:
        tensor: on any device.
        family: a module of ``kernels.gpu``.
    """
    suitable = tensor.dtype == torch.float32 and tensor.is_contiguous()
    if not suitable or not 0 < tensor.numel() < MAX_NUMEL:
        return False
    if tensor.device.type == "cuda":
        return families.on_gpu(family, tensor.device)
    return _interpreted() and tensor.device.type == "cpu"


def compiled(tensor: Tensor, family: str) -> bool:
    """Return whether numba's kernels are used for ``tensor``, ``(numel,)``.

    They are used for float32 on the host if numba can be imported (the extra ``fast`` installs it),
    the family is compiled, and its kernels give torch's bits in a self-test. Kernels of low rank
    give them up to rounding. If one fails, torch is used and a warning is given.

    Args:
        tensor: on any device.
        family: a module of ``kernels.host``.
    """
    suitable = tensor.dtype == torch.float32 and tensor.is_contiguous()
    on_host = suitable and tensor.device.type == "cpu" and tensor.numel() > 0
    return on_host and families.host.works(family)


def family(name: str, tensor: Tensor) -> ModuleType:
    """Return the module of a family's kernels for ``tensor``: of Triton, else of numba.

    Args:
        name: of the modules in ``kernels.gpu`` and ``kernels.host``.
        tensor: for which ``fused`` or ``compiled`` returns True.
    """
    return _module(f"{'gpu' if fused(tensor, name) else 'host'}.{name}")


def may_compile(device: torch.device) -> bool:
    """Return whether kernels are compiled when they are first used for tensors of ``device``."""
    return find_spec("numba" if device.type == "cpu" else "triton") is not None


@functools.cache  # a look for an imported module takes 10 µs, and each bucket has several
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"lightning_gc.kernels.{name}")


@functools.cache
def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None


def used_here(tensor: Tensor) -> None:
    """Keep the memory of ``tensor`` until the current stream has done its queued work.

    The training thread allocates restored tensors, and the background thread replaces them while
    its stream still has to read them. Without this call the allocator would give the memory to the
    training thread's next tensor at once. Nothing is done on the host.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
