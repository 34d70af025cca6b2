"""Record what a stretch of an exchange starts on a GPU, and start it again without its Python.

A method's Python computes the same addresses, sizes and constants in every step of one layout. Only
what lies in the tensors differs, and the number of the step. So the launches of two equal steps are
kept, with all tensors that they read and write, and are started again.

A tape sees torch's operations and Triton's launches. It refuses where the host has read a number
that may be another one next time: a value on the device, a random number, data of the host, or the
step, unless it is handed to a kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_gc.kernels import dispatch

Write = tuple[Callable[..., None], tuple[Any, ...]]
"""A function that writes a step's number for a kernel, and its first arguments."""
STEP = "the step"
_running = threading.local()
_READS = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
_SAME = {"detach", "alias", "_unsafe_view"}
"""Operations whose result is a view, although their schema does not say so."""
_ZEROS = {"zeros", "zeros_like", "new_zeros"}
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class WatchedStep(int):
    """The number of a step, which tells a tape if the host reads it. Kernels may be given it."""

    tape: Tape


def _watched(name: str) -> Callable[..., Any]:
    def read(step: WatchedStep, *others: Any) -> Any:
        result = getattr(int, name)(step, *others)
        if name not in _FINAL or result is not _FINAL[name]:
            step.tape.refuse("the host reads the number of the step")
        return result

    return read


_FINAL = {"__lt__": False, "__le__": False, "__ge__": True, "__gt__": True}
"""Comparisons and the result that they have in all later steps too."""
_BOTH = ("add", "sub", "mul", "floordiv", "truediv", "mod", "divmod", "pow")
_BITS = ("lshift", "rshift", "and", "or", "xor", "neg", "pos", "abs", "invert")
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool")
_TURNED = ("int", "float", "index", "repr", "str", "format")
for _name in (*_BOTH, *(f"r{name}" for name in _BOTH), *_BITS, *_COMPARED, *_TURNED):
    setattr(WatchedStep, f"__{_name}__", _watched(f"__{_name}__"))


class Span:
    """Work between two requests, in the order in which it is started."""

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., int | None], tuple[Any, ...]]] = []
        self._writes: list[Write] = []

    def add(
        self, call: Callable[..., int | None], given: tuple[Any, ...], writes: Sequence[Write]
    ) -> None:
        """Keep a call, which returns the driver's error, and what writes the step for it."""
        self._calls.append((call, given))
        self._writes += writes

    def start(self, step: int) -> None:
        """Start everything again, in the step of this number."""
        for write, place in self._writes:
            write(*place, step)
        for call, given in self._calls:
            if error := call(*given):
                dispatch.launcher().fail(error)


class Tape(TorchDispatchMode):
    """Notes what is started on a device while it runs.

    Args:
        step: number of the step.
        most: bytes that all tensors made meanwhile may have, since they are kept.

    Attributes:
        step: the number, to be handed on instead.
        seen: what was started and on what, in a form that is equal in an equal step.
        refused: why it cannot be started again, or None.
    """

    def __init__(self, step: int, most: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step = WatchedStep(step)
        self.step.tape = self
        self.seen: list[Any] = []
        self.refused: str | None = None
        self._plain, self._left = step, most
        self._span, self._listens = Span(), True
        self._made: dict[int, int] = {}  # memory -> its number
        self._given: set[int] = set()  # memory that was there before
        self._kept: list[Tensor] = []  # else memory could be taken twice

    @contextmanager
    def runs(self) -> Iterator[None]:
        """Note what the body starts in this thread."""
        _running.tape = self
        try:
            with self:
                yield
        finally:
            _running.tape = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Note nothing that the body starts, such as Triton's own work to start a kernel."""
        self._listens = False
        try:
            yield
        finally:
            self._listens = True

    def cut(self) -> Span:
        """Return what has been started since the last cut."""
        span, self._span = self._span, Span()
        self.seen.append("cut")
        return span

    def refuse(self, why: str) -> None:
        """Tell why this cannot be started again."""
        self.refused = self.refused or why

    def asks(self, request: str, tensors: Sequence[Tensor]) -> None:
        """Take note of a request."""
        self._kept += tensors
        self._given |= set(map(_memory, tensors))
        self.seen.append((request, [self._form(tensor) for tensor in tensors]))

    def arrives(self, tensors: Sequence[Tensor]) -> None:
        """Take note of tensors that have been made, or in which others have written."""
        for tensor in tensors:
            memory = _memory(tensor)
            if memory not in self._made:
                self._made[memory] = len(self._made)
                self._left -= 0 if memory in self._given else tensor.untyped_storage().nbytes()
        self._kept += tensors
        if self._left < 0:
            self.refuse("its tensors would need too much memory")

    def without_steps(self, arguments: Sequence[Any]) -> tuple[list[int], list[Any]]:
        """Return where the step is among a kernel's arguments, and them with a plain number."""
        places = [i for i, argument in enumerate(arguments) if isinstance(argument, WatchedStep)]
        return places, [self._plain if i in places else a for i, a in enumerate(arguments)]

    def add(
        self,
        call: Callable[..., int | None],
        given: tuple[Any, ...],
        writes: Sequence[Write],
        what: Any,
        arguments: Any,
    ) -> None:
        """Note something that was started.

        Args:
            call: starts it again, with ``given``.
            given: its arguments.
            writes: what writes the step.
            what: names it.
            arguments: all that it was given, in any nesting; ``STEP`` for the step's number.
        """
        leaves = tree_leaves(arguments)
        self._kept += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.seen.append((what, [self._form(leaf) for leaf in leaves]))
        self._span.add(call, given, writes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.refused is None and self._listens:
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        schema = func._schema
        name = schema.name.removeprefix("aten::")
        if _READS.intersection(func.tags) or name == "lift_fresh":  # data of the host
            self.refuse(f"{name} may have another result next time")
            return
        leaves = tree_leaves((args, kwargs, result))
        if len({leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}) > 1:
            self.refuse(f"{name} copies from one device to another")
            return
        outputs = tree_leaves(result)
        if schema.is_mutable:
            again = partial(_call, func, args, kwargs)
        elif name in _SAME or any(each.alias_info is not None for each in schema.returns):
            return
        else:
            self.arrives(outputs)
            if name in _EMPTY:
                return
            zeros = name in _ZEROS
            again = partial(_zero if zeros else _write, outputs, func, args, kwargs)
        self.add(again, (), (), name, (args, kwargs, outputs))

    def _form(self, leaf: Any) -> Any:
        """Return what is equal in an equal step: of a tensor the place, of others themselves."""
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        place = self._made.get(_memory(leaf))
        at = leaf.data_ptr() if place is None else (place, leaf.storage_offset())
        return at, leaf.dtype, leaf.shape, leaf.stride()


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a request or reply; torch's trees do not enter a ``Packed``."""
    if isinstance(value, Tensor):
        return [value]
    nested = value if isinstance(value, list | tuple) else ()
    return [tensor for each in nested for tensor in tensors_of(each)]


def running() -> Tape | None:
    """Return the tape that runs in this thread."""
    found: Tape | None = getattr(_running, "tape", None)
    return found


def _call(func: Any, args: Any, kwargs: Any) -> None:
    func(*args, **kwargs)


def _zero(outputs: Sequence[Tensor], *_: Any) -> None:
    for output in outputs:
        output.zero_()


def _write(outputs: Sequence[Tensor], func: Any, args: Any, kwargs: Any) -> None:
    """Write the results of an operation to the tensors of the first time."""
    results = tree_leaves(func(*args, **kwargs))
    for output, result in zip(outputs, results, strict=True):
        output.copy_(result)


def _memory(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata  # which meta tensors have too
    return address
