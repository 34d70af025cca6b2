"""OwnState: numbers, queues and random streams that each simulated worker has for itself."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

_LARGE = 1 << 26
"""Largest tensor, in bytes, of which each worker has a copy."""
_SOME = 8
"""Elements of a tensor that are looked at, beside their sum."""
_MANY = 10_000
"""Most entries of a container, and of containers in it, that are looked into."""
_DEEP = 6
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES = {"lightning", "lightning_fabric", "lightning_gc", "pytorch_lightning", "torch"}
"""Packages with objects that are not looked into, wherever they lie; of torch, schedulers are."""
_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of packages with objects that are not looked into, such as runs of a tracker's."""
_SHARED = (Dataset, DataLoader, Optimizer, type)
_READ: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    torch.Generator: (torch.Generator.get_state, lambda stream, state: stream.set_state(state)),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (
        lambda stream: stream.get_state(legacy=False),
        np.random.RandomState.set_state,
    ),
    np.random.Generator: (
        lambda stream: stream.bit_generator.state,
        lambda stream, state: setattr(stream.bit_generator, "state", state),
    ),
}
"""Kinds of random streams: how to read and set their state."""


class Scope:
    """Says which tensors and modules belong to others: to the module that is trained.

    Args:
        tensors: their memory is not copied, nor the memory of their gradients and views.
        modules: not looked into.
    """

    def __init__(self, tensors: Iterable[Tensor], modules: Iterable[nn.Module]) -> None:
        self._tensors, self._of = tensors, modules

    @cached_property
    def _memory(self) -> set[int]:
        return {
            each.untyped_storage().data_ptr()
            for tensor in self._tensors
            for each in (tensor, tensor.grad)
            if each is not None and each.numel()
        }

    @cached_property
    def _modules(self) -> set[int]:
        return {id(module) for module in self._of}

    def holds(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            plain = value.layout is torch.strided and value.numel()
            return not plain or value.untyped_storage().data_ptr() in self._memory
        return isinstance(value, nn.Module) and id(value) in self._modules


@dataclass(frozen=True)
class TooLarge:
    """Stands for content that is not copied; it differs once that has been changed."""

    seen: Any


class PlainContent(dict[Any, Any]):
    """Content of a container of numbers and texts, which is compared as a whole."""


class Untouched:
    """Says which tensors are as at the last look, by a few operations for all of them.

    What is written by ``.data`` has no version count, so sums and some elements are compared too.
    """

    def __init__(self) -> None:
        self._views: dict[int, tuple[Tensor, Tensor]] = {}
        self._seen: dict[int, tuple[Any, ...]] = {}

    def begin(self, tensors: Iterable[Tensor]) -> None:
        """Look at these; others are not known."""
        before = self._views
        self._views = {}
        for each in tensors:
            if type(each) in (Tensor, nn.Parameter) and each.is_contiguous():
                known = before.get(id(each))
                if known is None or known[1].data_ptr() != each.data_ptr():
                    some = each.detach().view(-1)[:: max(each.numel() // _SOME, 1)][:_SOME]
                    known = (each, some)
                self._views[id(each)] = known
        self._seen = self._look()

    def again(self) -> set[int]:
        """Look at the same ones; return the ids of those that are as before."""
        before, self._seen = self._seen, self._look()
        return {name for name, seen in self._seen.items() if seen == before[name]}

    @torch.no_grad()
    def _look(self) -> dict[int, tuple[Any, ...]]:
        kinds: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        for pair in self._views.values():
            kinds.setdefault((pair[0].dtype, pair[0].device), []).append(pair)
        seen: dict[int, tuple[Any, ...]] = {}
        for (dtype, _), pairs in kinds.items():
            values = iter(torch.cat([some for _, some in pairs]).tolist())
            sums = [0.0] * len(pairs)
            if dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
                sums = torch.stack(torch._foreach_norm([each for each, _ in pairs], 1)).tolist()
            for (each, some), total in zip(pairs, sums, strict=True):
                seen[id(each)] = (*_place(each), total, *islice(values, some.numel()))
        return seen


class KeptValue:
    """A value and a copy of its content: put back, it is the same object with that content.

    Args:
        value: a number, text, tensor, array, random stream, or a container or object of these.
            Others are kept as they are.
        scope: what belongs to others.
        large: bytes from which on a tensor is not copied.
    """

    __slots__ = ("content", "joint", "value")

    def __init__(
        self,
        value: Any,
        scope: Scope,
        large: float = _LARGE,
        around: tuple[int, ...] = (),
        left: list[int] | None = None,
    ) -> None:
        self.value = value
        self.content: Any = None
        self.joint = False  # a record that several workers have added to
        if isinstance(value, _NUMBERS) or scope.holds(value) or id(value) in around:
            return
        if isinstance(value, Tensor):
            small = value.numel() * value.element_size() <= large
            copied = value.detach().clone() if small else None
            self.content = TooLarge(_place(value)) if copied is None else copied
        elif isinstance(value, np.ndarray):
            self.content = TooLarge(None) if value.nbytes > large else value.copy()
        elif (stream := _stream(value)) is not None:
            self.content = stream[0](value)
        elif (parts := _parts(value)) is not None and len(around) < _DEEP:
            within, left = (*around, id(value)), left or [_MANY]
            left[0] -= len(parts)
            if left[0] < 0:
                self.content = TooLarge(_seen(value))
            elif all(type(each) in _NUMBERS for each in parts.values()):
                self.content = PlainContent(parts)
            else:
                made = {k: KeptValue(each, scope, large, within, left) for k, each in parts.items()}
                self.content = made if left[0] >= 0 else TooLarge(_seen(value))

    def same(self, value: Any, untouched: Collection[int] = ()) -> bool:
        """Return whether a value has this content; NaN equals NaN.

        Args:
            value: of the same worker, now.
            untouched: ids of tensors that have not been changed.
        """
        if isinstance(self.content, Tensor | np.ndarray):
            as_before = value is self.value and id(value) in untouched
            return as_before or _equal_states(self.content, value)
        if isinstance(self.content, TooLarge):
            return value is self.value and self.content.seen == _seen(value)
        if self.content is None:
            if isinstance(self.value, _NUMBERS) and isinstance(value, _NUMBERS):
                nan = value != value and self.value != self.value
                return type(value) is type(self.value) and bool(value == self.value or nan)
            return value is self.value
        if type(value) is not type(self.value):
            return False
        if (stream := _stream(value)) is not None:
            return _equal_states(stream[0](value), self.content)
        parts = _parts(value)
        if parts is None or len(parts) != len(self.content):
            return False
        if isinstance(self.content, PlainContent):
            return bool(parts == self.content)
        return all(k in parts and kept.same(parts[k], untouched) for k, kept in self._inner.items())

    @property
    def _inner(self) -> dict[Any, KeptValue]:
        """Return what a container holds, by key; nothing for anything else."""
        plain = type(self.content) is not dict or _stream(self.value) is not None
        return {} if plain else self.content

    def tensors(self) -> Iterator[Tensor]:
        """Return those that have been copied."""
        if isinstance(self.content, Tensor) and isinstance(self.value, Tensor):
            yield self.value
        for each in self._inner.values():
            yield from each.tensors()

    def alike(self, other: KeptValue) -> bool:
        """Return whether two workers' values have the same content."""
        one, two = self.content, other.content
        if self._inner and other._inner:
            known = one.keys() == two.keys()
            return known and all(kept.alike(two[key]) for key, kept in one.items())
        if one is None or two is None or isinstance(one, TooLarge):
            return one is two and self.same(other.value)
        return _equal_states(one, two)

    def grown(self, value: Any, scope: Scope) -> bool:
        """Return whether a list has more entries, and no tensor among them; keep these too."""
        known = self.content
        if type(value) is not list or value is not self.value or not isinstance(known, dict):
            return False
        size = len(known)
        more = KeptValue(value[size:], scope)
        tensor = more.large or next(more.tensors(), None) is not None
        if tensor or not KeptValue(value[:size], scope).alike(self):
            return False
        self.joint = True
        if isinstance(known, PlainContent) and isinstance(more.content, PlainContent):
            known.update(enumerate(more.content.values(), size))
        else:
            self.content = KeptValue(value, scope).content
        return True

    @property
    def is_reset(self) -> bool:
        """Whether it is None, zero or empty, which real workers set theirs to as well."""
        if isinstance(self.value, _NUMBERS):
            return not self.value
        return isinstance(self.content, PlainContent) and not self.content

    @property
    def large(self) -> bool:
        """Whether it holds what has not been copied."""
        inner = any(each.large for each in self._inner.values())
        return inner or isinstance(self.content, TooLarge)

    def put(self) -> Any:
        """Return the value, with the content that was kept."""
        value, content = self.value, self.content
        if content is None or isinstance(content, TooLarge):
            return value
        if isinstance(value, Tensor):
            if value.shape == content.shape and value.dtype == content.dtype:
                if not _equal(value, content):
                    value.detach().copy_(content)
            else:
                value.data = content.clone()
        elif isinstance(value, np.ndarray):
            value[...] = content
        elif (stream := _stream(value)) is not None:
            stream[1](value, content)
        else:
            inner = self._inner
            _refill(value, {k: inner[k].put() if inner else each for k, each in content.items()})
        return value


def _place(value: Tensor) -> tuple[int, int]:
    return value.data_ptr(), 0 if value.is_inference() else value._version


def _seen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _place(value)
    parts = _parts(value)
    return None if parts is None or type(value) is list else len(parts)


def _stream(value: Any) -> Any:
    return next((both for kind, both in _READ.items() if isinstance(value, kind)), None)


def is_stream(value: Any) -> bool:
    """Return whether it is a random stream with a state that can be read and set."""
    return _stream(value) is not None


def own_stream(stream: Any) -> Any:
    """Return a stream of its own that continues as this one does."""
    if not isinstance(stream, torch.Generator):
        return copy.deepcopy(stream)
    return torch.Generator(stream.device).set_state(stream.get_state())


def _parts(value: Any) -> Any:
    """Return what a container or an object of the user holds, by key; None for anything else."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple | deque):
        return dict(enumerate(value))
    if isinstance(value, set):
        return dict.fromkeys(value)
    if isinstance(value, nn.Module):
        parts = {f"{n}.{k}": v for n, m in value.named_modules() for k, v in fields_of(m).items()}
        return parts | dict(value.named_parameters()) | dict(value.named_buffers())
    if isinstance(value, _SHARED) or callable(value) or not hasattr(value, "__dict__"):
        return None
    if isinstance(value, LRScheduler | Sampler) or _is_users(package_of(type(value))):
        return vars(value)
    return None


@cache
def _is_users(package: str) -> bool:
    """Return whether a package is the user's: neither Python's, nor ours, nor installed."""
    if package in _LIBRARIES or package in sys.stdlib_module_names - {"__main__"}:
        return False
    place = getattr(sys.modules.get(package), "__file__", None)
    return place is None or _INSTALLED.isdisjoint(Path(place).parts)


def _refill(value: Any, parts: Mapping[Any, Any]) -> None:
    if isinstance(value, dict):
        value.clear()
        value.update(parts)
    elif isinstance(value, list):
        value[:] = parts.values()
    elif isinstance(value, deque):
        value.clear()
        value.extend(parts.values())
    elif isinstance(value, set):
        value.clear()
        value.update(parts)
    elif isinstance(value, nn.Module):
        for name, module in value.named_modules():
            own = {k: parts[f"{name}.{k}"] for k in fields_of(module) if f"{name}.{k}" in parts}
            vars(module).update(own)
    elif not isinstance(value, tuple):
        vars(value).clear()
        vars(value).update(parts)


def package_of(kind: Any) -> str:
    """Return the name of the package that a class or a function is from."""
    return str(kind.__module__).partition(".")[0]


_MODULES = frozenset(vars(nn.Module()))


def fields_of(module: nn.Module) -> dict[str, Any]:
    """Return what a module keeps besides parameters, buffers and modules; of torch's, nothing."""
    kinds = {package_of(kind) for kind in type(module).__mro__}
    if package_of(type(module)) == "torch" or "torchmetrics" in kinds:  # synchronised by itself
        return {}
    return {name: each for name, each in vars(module).items() if name not in _MODULES}


def _equal(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if torch.equal(one.detach(), other):
        return True
    nan = one.detach().isnan() if one.is_floating_point() or one.is_complex() else None
    if nan is None or not nan.any() or not torch.equal(nan, other.isnan()):
        return False
    return torch.equal(one.detach()[~nan], other[~nan])


def _equal_states(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and _equal(one, other)
    if isinstance(one, np.ndarray):
        alike = isinstance(other, np.ndarray) and (one.shape, one.dtype) == (
            other.shape,
            other.dtype,
        )
        return alike and bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal_states(one[k], other[k]) for k in one)
    return bool(one == other)


@dataclass(frozen=True)
class Holder:
    """Names a dict that holds values of a worker.

    Attributes:
        label: names it in messages, after the name of a value; each has another one.
        values: by name.
        left_out: names of values that are common, or kept elsewhere.
        large: bytes from which on a tensor is not copied.
    """

    label: str
    values: dict[str, Any]
    left_out: frozenset[str] = frozenset()
    large: float = _LARGE


Key = tuple[str, str]


class OwnValues:
    """Lets each simulated worker have its own numbers, tensors, queues and random streams.

    One that changes in a worker's turn is that worker's from then on, such as Prodigy's ``d`` or a
    number that ``training_step`` counts up. One that changes between turns, as a scheduler sets a
    learning rate, is common to all. Between turns holders have worker 0's. A list of numbers or
    texts that only grows is one record of all workers; one of tensors is each worker's own.

    Args:
        workers: W.
        holders: returns what holds the values, and what belongs to others.
        says: called with what has happened to a value, its label and its name. ``"differing"``: it
            changes between turns while workers have different ones. ``"too_large"``: it changes in
            a turn and was too large to be kept for each worker. ``"joint"``: a record of all
            workers becomes each one's own.

    Attributes:
        present: the one that has its turn, or None.
    """

    def __init__(
        self,
        workers: int,
        holders: Callable[[], tuple[list[Holder], Scope]],
        says: Callable[[str, str, str], None],
    ) -> None:
        self._workers, self._holders, self._says = workers, holders, says
        self.present: int | None = None
        self.forget()

    def forget(self) -> None:
        """Let all workers have the values that holders have next."""
        self._common: dict[Key, KeptValue] = {}
        self._own: list[dict[Key, KeptValue]] = [{} for _ in range(self._workers)]
        self._untouched = Untouched()

    def enter(self, worker: int | None) -> None:
        """Begin a worker's turn, or with None none's."""
        if worker == self.present:
            return
        holders, scope = self._holders()
        changed = self._changes(holders, scope)
        if self.present is not None:
            for key in [key for key, kept in changed.items() if kept.large]:
                if key in self._common:
                    self._says("too_large", *key)
                    self._common[key] = changed.pop(key)
            for key in changed:
                if key in self._common and self._common[key].joint:
                    self._says("joint", *key)
            self._own[self.present] |= changed
        else:
            self._share(changed)
        self.present = worker
        put = self._put(holders, worker or 0)
        if changed or put:
            known = (self._common | self._own[worker or 0]).values()
            self._untouched.begin(
                t for each in known if each.content is not None for t in each.tensors()
            )

    @contextmanager
    def own(self, worker: int | None) -> Iterator[None]:
        """Begin a worker's turn, and at the end the one before."""
        before = self.present
        self.enter(worker)
        try:
            yield
        finally:
            self.enter(before)

    def _share(self, changed: dict[Key, KeptValue]) -> None:
        """Give all workers what has been changed between turns."""
        for key, kept in changed.items():
            known = [own.get(key, self._common.get(key)) for own in self._own]
            first = known[0]
            if first is not None and any(
                each is None or not first.alike(each) for each in known[1:]
            ):
                if _stream(kept.value) is not None:  # each worker's goes on where it is
                    self._own[0][key] = kept
                    continue
                if not kept.is_reset:
                    self._says("differing", *key)
            self._common[key] = kept
            for own in self._own:
                own.pop(key, None)

    def _changes(self, holders: list[Holder], scope: Scope) -> dict[Key, KeptValue]:
        """Return the values that are not those of the worker that is present."""
        known = self._common | self._own[self.present or 0]
        changed: dict[Key, KeptValue] = {}
        untouched = self._untouched.again()
        for holder in holders:
            for name, value in holder.values.items():
                key = (holder.label, name)
                kept = known.get(key)
                if kept is None:
                    if name not in holder.left_out:
                        changed[key] = KeptValue(value, scope, holder.large)
                    continue
                if (kept.value is value and kept.content is None) or kept.same(value, untouched):
                    continue
                apart = any(key in own for own in self._own)
                if apart or not kept.grown(value, scope):
                    changed[key] = KeptValue(value, scope, holder.large)
        return changed

    def _put(self, holders: list[Holder], worker: int) -> bool:
        """Give holders what is a worker's own; return whether any worker has something."""
        if not any(self._own):
            return False
        given = self._common | self._own[worker]
        apart = {key for own in self._own for key in own}
        for holder in holders:
            for name in [name for name in holder.values if (holder.label, name) in apart]:
                if (holder.label, name) not in given:  # another worker's turn has added it
                    del holder.values[name]
        places = {holder.label: holder.values for holder in holders}
        for label, name in apart & given.keys():
            kept, values = given[label, name], places.get(label)
            if values is not None and not (name in values and kept.same(values[name])):
                values[name] = kept.put()
        return True


_GLOBAL = {
    "torch": torch.default_generator,
    "python": random._inst,
    "numpy": np.random.mtrand._rand,
}


def random_holder(device: torch.device) -> Holder:
    """Return the global random streams, of which each process has its own."""
    streams = dict(_GLOBAL)
    if device.type == "cuda":
        streams["cuda"] = torch.cuda.default_generators[device.index or 0]
    return Holder("random numbers", streams)


def module_holders(module: Any) -> list[Holder]:
    """Return what a LightningModule, its parts and the user's callbacks keep, and schedulers."""
    base = next(kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule")
    lightning = frozenset(vars(base())) | _MODULES | {"on_train_batch_end"}
    held = [
        Holder(name or type(module).__name__, vars(part), lightning if part is module else _MODULES)
        for name, part in module.named_modules()
        if part is module or fields_of(part)
    ]
    trainer = module.trainer
    for index, callback in enumerate(trainer.callbacks):
        if is_users(callback):
            label = f"callbacks[{index}], {type(callback).__name__}"
            held.append(Holder(label, vars(callback), frozenset({"on_train_batch_end"})))
    for index, config in enumerate(trainer.lr_scheduler_configs):
        held.append(Holder(f"lr_schedulers[{index}]", vars(config.scheduler)))
    return held


def sampler_holders(sampler: Any, index: int) -> list[Holder]:
    """Return what a sampler keeps, and the one that it draws from, but no data."""
    fields = getattr(sampler, "__dict__", None)
    label = f"{type(sampler).__name__} of loader {index}"
    return [] if fields is None else [Holder(label, fields, frozenset({"data_source", "dataset"}))]


def is_users(callback: Any) -> bool:
    """Return whether a callback has nothing of Lightning's own callbacks but their base."""
    of_lightning = {"lightning", "lightning_gc", "pytorch_lightning"}
    kinds = [kind for kind in type(callback).__mro__ if package_of(kind) in of_lightning]
    return all(kind.__name__ == "Callback" for kind in kinds)


_OPTIMIZER = frozenset(vars(torch.optim.SGD([nn.Parameter()], lr=0.1))) - {"defaults"} | {"step"}


def optimizer_holders(parts: list[Any]) -> list[Holder]:
    """Return what optimizers keep their settings in; groups that several share once."""
    groups = {id(group): group for part in parts for group in part.param_groups}
    held = [
        Holder(f"param_groups[{index}] of the optimizer", group, frozenset({"params"}))
        for index, group in enumerate(groups.values())
    ]
    for index, part in enumerate(parts):
        label = f"{type(part).__name__}{f' {index}' * bool(index)}"
        held.append(Holder(label, vars(part), _OPTIMIZER))
    return held
