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
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_gc.core.flow import Arrived
from lightning_gc.kernels import dispatch

Write = tuple[Callable[..., None], tuple[Any, ...]]
"""A function that writes a step's number for a kernel, and its first arguments."""
STEP = "the step"
_BLOCK = 512
"""Bytes; tensors begin at multiples of it, as CUDA's allocator lets them."""
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


class WatchedStep:
    """The number of a step, which tells a tape if the host reads it. Kernels may be given it.

    It is no ``int``, whose number C code reads without a call, as ``range`` and indexing do.
    """

    __slots__ = ("number", "tape")

    def __init__(self, number: int, tape: Tape) -> None:
        self.number, self.tape = number, tape

    def __getattr__(self, name: str) -> Any:
        self.tape.refuse(_READ)
        return getattr(self.number, name)


_READ = "the host reads the number of the step"


def _watched(name: str) -> Callable[..., Any]:
    def read(step: WatchedStep, *others: Any) -> Any:
        others = tuple(o.number if isinstance(o, WatchedStep) else o for o in others)
        result = getattr(int, name)(step.number, *others)
        if name not in _FINAL or result is not _FINAL[name]:
            step.tape.refuse(_READ)
        return result

    return read


_FINAL = {"__lt__": False, "__le__": False, "__ge__": True, "__gt__": True}
"""Comparisons and the result that they have in all later steps too."""
_BOTH = ("add", "sub", "mul", "floordiv", "truediv", "mod", "divmod", "pow")
_BITS = ("lshift", "rshift", "and", "or", "xor", "neg", "pos", "abs", "invert")
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool")
_TURNED = ("int", "float", "index", "repr", "str", "format", "round", "floor", "ceil", "trunc")
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

    Without ``memory`` it only looks, and counts the bytes of all tensors that are made, but keeps
    none of them. With it, they are made there. Several exchanges can then share the memory, since
    one runs at a time. A tensor that outlives its exchange must not lie there: caches are filled by
    the first step, and a tape refuses as soon as anything differs from the step before.

    Args:
        step: number of the step.
        device: on which all is done.
        before: what was seen in an equal step, and memory of the bytes that it needed, uint8.
        most: bytes of tensors that are made, from which on it refuses.

    Attributes:
        step: the number, to be handed on instead.
        seen: what was started and on what, in a form that is equal in an equal step.
        nbytes: of all tensors that were made.
        refused: why it cannot be started again, or None.
        kept: with ``memory``, all tensors that were given or made: launches have only their
            addresses.
    """

    def __init__(
        self,
        step: int,
        device: torch.device,
        before: tuple[Sequence[Any], Tensor] | None = None,
        most: float = float("inf"),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step = WatchedStep(step, self)
        self._most = most
        self.seen: list[Any] = []
        self.nbytes = 0
        self.refused: str | None = None
        self._before = None if before is None else before[0]
        self._memory = None if before is None else before[1]
        self._plain, self._device = step, device
        self._span, self._listens = Span(), True
        self._starts: list[int] = []  # first bytes of tensors in the memory
        self._made: dict[int, int] = {}  # allocation -> number of the tensor, elsewhere
        self._weak: list[StorageWeakRef] = []  # of these: no other allocation is mistaken for one
        self._replies: set[int] = set()  # allocations of others, and numbers of tensors
        self.kept: list[Tensor] = []

    @contextmanager
    def runs(self) -> Iterator[None]:
        """Note what the body starts in this thread."""
        _running.tape = self
        try:
            with self:
                yield
        finally:
            _running.tape = None

    @property
    def is_large(self) -> bool:
        """Whether more was made than is permitted."""
        return self.nbytes > self._most

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Note nothing that the body starts, such as Triton's own work to start a kernel."""
        self._listens = False
        try:
            yield
        finally:
            self._listens = True

    @property
    def complete(self) -> bool:
        """Whether all was as in the step before, and lies in the memory."""
        before = self._before
        return self.refused is None and before is not None and len(before) == len(self.seen)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in the memory."""
        return self._memory is not None and allocation(tensor) == allocation(self._memory)

    def cut(self) -> Span:
        """Return what has been started since the last cut."""
        span, self._span = self._span, Span()
        self._see("cut")
        return span

    def refuse(self, why: str) -> None:
        """Tell why this cannot be started again; keep nothing of it."""
        self.refused = self.refused or why
        self._span, self.kept = Span(), []

    def asks(self, request: str, tensors: Sequence[Tensor]) -> None:
        """Take note of a request."""
        self._keep(tensors)
        self._see((request, [self._form(tensor) for tensor in tensors]))

    def arrives(self, reply: Any) -> Any:
        """Return a reply, moved to the memory if that can be."""
        if isinstance(reply, Arrived):
            number = len(self._made) + len(self._starts)
            (memory,) = self._placed([reply.memory])
            self._replies |= {number, allocation(reply.memory)}
            if memory is not reply.memory:
                reply = reply.moved(memory)
        tensors = tensors_of(reply)
        self._keep(tensors)
        others = [allocation(tensor) for tensor in tensors if not self.holds(tensor)]
        self._weak += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        self._replies |= set(others) - self._made.keys()
        return reply

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
        self._see((what, [self._form(leaf) for leaf in leaves]))
        if self._keep([leaf for leaf in leaves if isinstance(leaf, Tensor)]):
            self._span.add(call, given, writes)

    def _keep(self, tensors: Sequence[Tensor]) -> bool:
        """Keep tensors, if what is started is kept at all; return whether it is."""
        keeps = self._memory is not None and self.refused is None
        if keeps:
            self.kept += tensors
        return keeps

    def _see(self, what: Any) -> None:
        at = len(self.seen)
        self.seen.append(what)
        if self._before is not None and self._before[at : at + 1] != [what]:
            self.refuse("it differs from the step before")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.refused is None and self._listens:
            return self._noted(func, args, kwargs, result)
        return result

    def _noted(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Note an operation, and return its result, maybe in the memory."""
        schema = func._schema
        name = schema.name.removeprefix("aten::")
        if _READS.intersection(func.tags) or name == "lift_fresh":  # data of the host
            self.refuse(f"{name} may have another result next time")
            return result
        leaves = tree_leaves((args, kwargs, result))
        if any(leaf.device != self._device for leaf in leaves if isinstance(leaf, Tensor)):
            self.refuse(f"{name} has numbers of the host")
            return result
        if schema.is_mutable:
            self.add(partial(_call, func, args, kwargs), (), (), name, (args, kwargs))
            return result
        if name in _SAME or any(each.alias_info is not None for each in schema.returns):
            return result
        results, spec = tree_flatten(result)
        if not all(isinstance(each, Tensor) for each in results):
            self.refuse(f"{name} returns numbers to the host")
            return result
        kept = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        forms = [self._form(leaf) for leaf in tree_leaves((args, kwargs))]
        self._see((name, forms, [(each.dtype, each.shape, each.stride()) for each in results]))
        if self.refused is not None:
            return result
        outputs = self._placed(results)
        if self._keep([*kept, *outputs]) and name not in _EMPTY:
            zeros = name in _ZEROS
            write = (
                partial(_zero, outputs) if zeros else partial(_write, outputs, func, args, kwargs)
            )
            self._span.add(write, (), ())
            for output, each in zip(outputs, results, strict=True):
                if output is not each:
                    output.copy_(each)
        return tree_unflatten(outputs, spec)

    def _placed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return places for tensors in the memory, or count their bytes and return them."""
        placed = []
        for tensor in tensors:
            spans = [
                (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
            ]
            start, nbytes = self.nbytes, (1 + sum(spans)) * tensor.element_size()
            if not tensor.numel():
                placed.append(tensor)
                continue
            self.nbytes += -(-nbytes // _BLOCK) * _BLOCK
            if self.is_large:
                self.refuse("it makes too much")
            if self._memory is None:
                self._made[allocation(tensor)] = len(self._made)
                self._weak.append(StorageWeakRef(tensor.untyped_storage()))
                placed.append(tensor)
                continue
            self._starts.append(start)
            data = self._memory[start : start + nbytes].view(tensor.dtype)
            placed.append(data.as_strided(tensor.shape, tensor.stride()))
        return placed

    def _form(self, leaf: Any) -> Any:
        """Return what is equal in an equal step: of a tensor the place, of others themselves."""
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        where: Any
        memory, offset = allocation(leaf), leaf.storage_offset() * leaf.element_size()
        if self.holds(leaf):
            number = bisect_right(self._starts, offset) - 1
            where = "reply" if number in self._replies else (number, offset - self._starts[number])
        elif memory in self._replies:
            where = "reply"
        elif memory in self._made:
            where = self._made[memory], offset
        else:
            where = leaf.data_ptr()
        return where, leaf.dtype, leaf.shape, leaf.stride()


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


def _zero(outputs: Sequence[Tensor]) -> None:
    for output in outputs:
        output.zero_()


def _write(outputs: Sequence[Tensor], func: Any, args: Any, kwargs: Any) -> None:
    """Write the results of an operation to the tensors of the first time."""
    results = tree_leaves(func(*args, **kwargs))
    for output, result in zip(outputs, results, strict=True):
        output.copy_(result)


def allocation(tensor: Tensor) -> int:
    """Return a number of the memory in which a tensor lies, as long as that is held."""
    address: int = tensor.untyped_storage()._cdata  # which meta tensors have too
    return address
