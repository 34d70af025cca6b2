"""Start a Triton kernel by one call of the driver, prepared once per variant.

Triton works out in every launch what a variant fixes once. Its launch takes 10 to 29 µs of the
host, a prepared one 4 to 9 µs. The first launch of a variant goes Triton's way, which compiles it.
Its results are then compared with those of a prepared launch. What is not known to be equal goes
Triton's way always: AMD's GPUs, scratch memory, clusters, cooperative launches.

Triton's versions append different pointers to scratch memory to a kernel's parameters. They are
counted in the kernel's PTX, so no version is asked for.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

from lightning_gc.kernels import dispatch
from lightning_gc.kernels.recording import Write

_FORMATS = {
    **{"i1": "?", "u1": "?", "i8": "b", "u8": "B", "i16": "h", "u16": "H"},
    **{"i32": "i", "u32": "I", "fp32": "f", "f32": "f"},
}
"""Triton's type of a number -> ``struct``'s. A number of 64 bits needs a variant that is left to
Triton."""
_SINGLE = (("num_ctas", 1), ("launch_cooperative_grid", False), ("launch_pdl", False))
_hooks: Any = triton.knobs.runtime if hasattr(triton, "knobs") else CompiledKernel


class PerThread(threading.local):
    """Variants of one thread, by the kernel's identity. A new thread begins with Triton's way.

    Attributes:
        variants: which arguments Triton specialises on, and what is prepared; None: nothing can be.
    """

    def __init__(self) -> None:
        self.variants: dict[int, tuple[list[int], dict[Any, Variant | None]]] = {}


_mine = PerThread()
UNTRIED: Any = object()
_trusted = True  # until a prepared launch has given another result
EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch options: a product and a sum round twice, as two torch operations do."""


class Unknown(Exception):
    """A variant that only Triton can start."""


class Variant:
    """A compiled kernel that is ready to be started by one thread.

    The call gives up the interpreter's lock, as Triton's own does, so its arguments lie in memory
    of the thread. With the lock held, a full queue of launches would stop the thread that empties
    it.

    Args:
        compiled: as Triton's launch returns it.
        program: the kernel.
        constants: by name.

    Attributes:
        formats: of the parameters, for ``struct``.
        sizes: of the parameters, in bytes.

    Raises:
        Unknown: it has what only Triton's launch can do.
    """

    def __init__(
        self, compiled: Any, program: JITFunction[Any], constants: Mapping[str, Any]
    ) -> None:
        known = compiled.metadata
        if known.target.backend != "cuda" or "ptx" not in compiled.asm:
            raise Unknown
        if any(getattr(known, name, usual) != usual for name, usual in _SINGLE):
            raise Unknown
        if any(getattr(known, f"{k}_scratch_size", 0) for k in ("global", "profile")):
            raise Unknown
        entry = re.search(r"\.visible \.entry \w+\(([^)]*)\)", compiled.asm["ptx"])
        if entry is None:
            raise Unknown
        formats = _formats(compiled, program, constants)
        missing = entry[1].count(".param ") - len(formats)
        if missing < 0:
            raise Unknown
        formats += ["P"] * missing
        layout, offsets = "@", list[int]()
        for each in formats:
            layout += each
            offsets.append(struct.calcsize(layout) - struct.calcsize(each))
        form = struct.Struct(layout)
        self.formats, self._offsets = formats, offsets
        self.sizes = [struct.calcsize(each) for each in formats]
        self._zeros = (0,) * missing
        self._pack, self._buffer = form.pack_into, ctypes.create_string_buffer(form.size)
        self._pointers = self._pointers_into(self._buffer)
        self._fixed = (known.num_warps * getattr(known, "warp_size", 32), 1, 1, known.shared)
        self._function = ctypes.c_void_p(compiled.function)
        self._kept = compiled  # which unloads its module when it is freed

    def _pointers_into(self, buffer: ctypes.Array[ctypes.c_char]) -> ctypes.c_void_p:
        base, many = ctypes.addressof(buffer), ctypes.c_void_p * len(self._offsets)
        return ctypes.cast(many(*[base + at for at in self._offsets]), ctypes.c_void_p)

    def start(self, grid: Sequence[int], values: Sequence[Any], stream: int) -> None:
        """Start the kernel.

        Args:
            grid: numbers of programs, one to three.
            values: of the arguments without the constants; tensors as addresses.
            stream: the driver's handle of it.

        Raises:
            struct.error: a number does not fit the variant's type, so it needs another one.
        """
        self._pack(self._buffer, 0, *values, *self._zeros)
        error = driver_call()(*self._arguments(grid, stream, self._pointers))
        if error:
            fail(error)

    def copied(
        self, grid: Sequence[int], stream: int, places: Sequence[int]
    ) -> tuple[tuple[Any, ...], list[Write]]:
        """Return the driver's arguments for what was started last, in memory of their own.

        Args:
            grid: as for ``start``.
            stream: as for ``start``.
            places: indices of arguments that will be others.

        Returns:
            The arguments, which keep their memory alive; and for each of ``places`` what
            writes a number.
        """
        buffer = ctypes.create_string_buffer(self._buffer.raw, len(self._buffer))
        pointers = self._pointers_into(buffer)
        pointers.kept = buffer  # type: ignore[attr-defined] # which only its addresses are in
        writes: list[Write] = [
            (struct.Struct("@" + self.formats[at]).pack_into, (buffer, self._offsets[at]))
            for at in places
        ]
        return self._arguments(grid, stream, pointers), writes

    def _arguments(
        self, grid: Sequence[int], stream: int, pointers: ctypes.c_void_p
    ) -> tuple[Any, ...]:
        x, y, z = (*grid, 1, 1)[:3]
        return (self._function, x, y, z, *self._fixed, stream, pointers, None)


def _formats(compiled: Any, program: JITFunction[Any], constants: Mapping[str, Any]) -> list[str]:
    """Return ``struct``'s type of each argument, without the constants."""
    names, types = program.arg_names, dict[str, str]()
    for key, kind in compiled.src.signature.items():  # by name, by index, or by a path of one
        index = key[0] if isinstance(key, tuple) else key
        types[names[index] if isinstance(index, int) else index] = kind
    kinds = [types[name] for name in names if name not in constants]
    if not all(kind.startswith("*") or kind in _FORMATS for kind in kinds):
        raise Unknown
    return ["P" if kind.startswith("*") else _FORMATS[kind] for kind in kinds]


@functools.cache
def driver_call() -> Callable[..., int]:
    """Return ``cuLaunchKernel``."""
    call: Any = _library().cuLaunchKernel
    number, address = ctypes.c_uint, ctypes.c_void_p
    call.argtypes = [address, *[number] * 7, address, address, address]
    return call  # type: ignore[no-any-return]


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def fail(error: int) -> None:
    """Raise RuntimeError for the driver's error."""
    text = ctypes.c_char_p()
    _library().cuGetErrorString(error, ctypes.byref(text))
    raise RuntimeError(
        f"CUDA error {error}: {(text.value or b'unknown').decode()}. To find out whether our "
        f"launches cause it, set {dispatch.SWITCH}=written: Triton then starts all kernels. "
        f"{dispatch.WITHOUT}"
    )


def hooked() -> bool:
    """Return whether a profiler wants to be told of Triton's launches."""
    hook = _hooks.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))


def queue_of(device: int) -> tuple[int, int, bool]:
    """Return the current device, the driver's handle of the stream, and if a profiler watches."""
    now = driver.active
    return now.get_current_device(), now.get_current_stream(device), hooked()


def by_triton(
    program: Any, grid: Sequence[int], arguments: Sequence[Any], constants: Mapping[str, Any]
) -> Any:
    """Start a kernel by Triton's own launch; return what it has compiled."""
    try:
        with torch.cuda.device_of(next(each for each in arguments if isinstance(each, Tensor))):
            return program[tuple(grid)](*arguments, **constants, **EXACT)
    except Exception as error:  # any exception of a compiler or driver
        name = getattr(program, "__name__", program)
        error.add_note(f"Triton could not start lightning_gc's kernel {name}. {dispatch.WITHOUT}")
        raise


def start(
    program: Any,
    grid: Sequence[int],
    arguments: Sequence[Any],
    constants: Mapping[str, Any],
    *,
    may_prepare: bool,
) -> tuple[Variant, int] | None:
    """Start a kernel; return how and on which stream, or None if Triton did it.

    Args:
        program: as declared by ``launch.kernel``.
        grid: numbers of programs, one to three.
        arguments: tensors and numbers, in the kernel's order.
        constants: its constants, and Triton's options, by name.
        may_prepare: whether a new variant is prepared, for which the host waits. The switch may
            refuse it.
    """
    if not _trusted or not isinstance(program, JITFunction) or 0 in grid or hooked():
        by_triton(program, grid, arguments, constants)
        return None
    known = _mine.variants.get(id(program))
    if known is None:
        free = [each for each in program.params if not each.is_constexpr]
        aligned = [i for i, each in enumerate(free) if not each.do_not_specialize]
        known = _mine.variants[id(program)] = (aligned, {})
    aligned, variants = known
    values, key, here = list[Any](), list[Any](constants.items()), None
    for argument in arguments:
        if isinstance(argument, Tensor):
            here = argument if here is None else here
            key.append(argument.dtype)
            argument = argument.data_ptr()
        values.append(argument)
    for i in aligned:  # for Triton they are other variants
        key.append((values[i] % 16 == 0, values[i] == 1))
    assert here is not None
    device = max(here.get_device(), 0)
    key.append(device)
    variant = variants.get(tuple(key), UNTRIED)
    if variant is None or driver.active.get_current_device() != device:
        by_triton(program, grid, arguments, constants)
        return None
    stream = driver.active.get_current_stream(device)
    if variant is not UNTRIED:
        try:
            variant.start(grid, values, stream)
        except (struct.error, OverflowError):  # a larger number: another variant
            by_triton(program, grid, arguments, constants)
            return None
        return variant, stream
    launch = functools.partial(by_triton, program, grid, arguments, constants)
    if not may_prepare or not dispatch.allowed().prepared:
        launch()
        return None
    with torch.no_grad():
        variants[tuple(key)] = _first(program, constants, arguments, launch, grid, stream)
    return None


def _first(
    program: JITFunction[Any],
    constants: Mapping[str, Any],
    arguments: Sequence[Any],
    launch: Callable[[], Any],
    grid: Sequence[int],
    stream: int,
) -> Any:
    """Launch by Triton, and compare its result with a prepared launch's, on copies.

    All is copied that the kernel can reach. The host waits, once per variant. Return the variant;
    None leaves it to Triton, and ``UNTRIED`` to a launch that is not captured in a user's graph.
    """
    global _trusted
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        launch()  # into a user's graph, which must have no launch of a trial, and no copies
        return UNTRIED
    reached = {tensor.untyped_storage().data_ptr(): _whole(tensor) for tensor in tensors}
    try:
        copies = {address: whole.clone() for address, whole in reached.items()}
    except torch.OutOfMemoryError:
        launch()
        return None
    compiled = launch()
    moved = {address: copy.data_ptr() - address for address, copy in copies.items()}
    if any(distance % 16 for distance in moved.values()):
        return None  # another variant
    values = [
        each.data_ptr() + moved[each.untyped_storage().data_ptr()]
        if isinstance(each, Tensor)
        else each
        for each in arguments
    ]
    try:
        variant = Variant(compiled, program, constants)
        variant.start(grid, values, stream)
        same = all(equal(whole, copies[address]) for address, whole in reached.items())
    except (Unknown, OSError, struct.error, OverflowError, RuntimeError):  # the driver's, too
        return None
    if same:
        return variant
    _trusted = False
    warnings.warn(
        f"The kernel {program.__name__} gave another result when the driver started it directly. "
        f"All kernels are started by Triton {triton.__version__} instead, with the same results in "
        f"more time. {dispatch.SWITCH}=written lets Triton start them from the beginning.",
        stacklevel=2,
    )
    return None


equal = torch.equal


def _whole(tensor: Tensor) -> Tensor:
    """Return the allocation in which a tensor lies, as bytes."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())
