"""Start Triton's kernels without a GPU: a driver's library that does nothing, under Triton's own.

Triton's binder, its cache, its launcher and its C extension run as they are. Kernels are compiled
for an H100 by the compiler in Triton's wheel. ``install`` must be called before a kernel is
compiled, in a process of its own: the library cannot be taken out again. It needs gcc.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gc.kernels import dispatch

SOURCE = Path(__file__).with_suffix(".c")
STREAM = 7


class Stub:
    """The library.

    Args:
        folder: for it.
    """

    def __init__(self, folder: Path) -> None:
        library = folder / "libcuda.so.1"
        named = f"-Wl,-soname,{library.name}"
        build = ["gcc", "-O2", "-shared", "-fPIC", named, "-o", str(library), str(SOURCE)]
        subprocess.run(build, check=True)
        (folder / "libcuda.so").symlink_to(library)  # with which Triton 3.2 links
        self._library: Any = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._library.stub_launches.restype = ctypes.c_long
        self._library.stub_seen.restype = ctypes.POINTER(ctypes.c_ubyte * 512)
        self._library.stub_dims.restype = ctypes.POINTER(ctypes.c_uint * 7)
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)

    @property
    def launches(self) -> int:
        """Kernels started so far."""
        found: int = self._library.stub_launches()
        return found

    def given(self, sizes: Sequence[int], start: Callable[[], object]) -> tuple[bytes, list[int]]:
        """Return what the driver is given for the one kernel that ``start`` starts.

        Args:
            sizes: bytes of each of the kernel's parameters.
            start: starts it.

        Returns:
            The parameters, in 8 bytes each; and grid, block and bytes of shared memory.
        """
        self._library.stub_sizes(len(sizes), (ctypes.c_int * len(sizes))(*sizes))
        start()
        given = bytes(self._library.stub_seen().contents), list(self._library.stub_dims().contents)
        self._library.stub_sizes(0, None)
        return given


def install(folder: Path) -> Stub:
    """Let Triton start kernels of tensors anywhere, and the program use them; return the stub."""
    stub = Stub(folder)
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    class Driver(nvidia.CudaDriver):  # type: ignore[misc]
        def __init__(self) -> None:
            self.utils = nvidia.CudaUtils()
            self.launcher_cls = nvidia.CudaLauncher
            self.get_device_capability = lambda device=0: (9, 0)
            self.get_current_stream = {0: STREAM}.__getitem__
            self.set_current_device = lambda device: None
            self.get_current_device = lambda: 0

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

    driver.set_active(Driver())
    from lightning_gc.kernels import gpu

    for _, name, _ in pkgutil.iter_modules(gpu.__path__):
        importlib.import_module(f"{gpu.__name__}.{name}")
    everywhere("fused", _fused)
    return stub


def everywhere(name: str, stand_in: Any) -> None:
    """Replace a function of the program in all modules that use it."""
    for module in [m for n, m in sys.modules.items() if n.startswith("lightning_gc.")]:
        if name in vars(module):
            setattr(module, name, stand_in)


def _fused(tensor: Tensor, family: str) -> bool:
    """Answer as ``dispatch.fused`` does for a GPU, in as many calls."""
    suitable = tensor.dtype == torch.float32 and tensor.is_contiguous()
    if not suitable or not 0 < tensor.numel() < dispatch.MAX_NUMEL:
        return False
    return _works(family, tensor.device)


@functools.cache
def _works(family: str, device: torch.device) -> bool:
    return True


def in_new_folder() -> Stub:
    """Install the stub in a temporary folder, which goes with the process."""
    folder = Path(tempfile.mkdtemp(prefix="lightning_gc_stub_"))
    atexit.register(shutil.rmtree, folder)
    return install(folder)
