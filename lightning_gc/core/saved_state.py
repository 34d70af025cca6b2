"""Saved state: nested dicts of tensors and plain values; map, average, hash and check them.

Each class declares the structure of its saved state next to the code that returns it. Loading
refuses other values and names their place.
"""

from __future__ import annotations

import abc
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

Tree = dict[str, Any]


def average(trees: Sequence[Tree]) -> Tree:
    """Return the mean of trees of the same structure; a leaf missing from a tree counts as zero.

    A new number of workers can all start with the mean of the old errors. The mean error over
    workers stays the same, so no gradient is lost.
    """
    return _merge(trees, 1 / len(trees))


def _merge(trees: Sequence[Tree], share: float) -> Tree:
    merged: Tree = {}
    for name in dict.fromkeys(name for tree in trees for name in tree):
        leaves = [tree[name] for tree in trees if name in tree]
        if isinstance(leaves[0], dict):
            merged[name] = _merge(leaves, share)
        elif isinstance(leaves[0], Tensor):
            total = leaves[0].float() * share
            for leaf in leaves[1:]:
                total.add_(leaf.float(), alpha=share)
            merged[name] = total
        else:
            merged[name] = sum(leaf * share for leaf in leaves)
    return merged


def each_tensor(tree: Tree, change: Callable[[Tensor], Tensor]) -> Tree:
    """Return a copy with ``change`` applied to every tensor."""
    return _each_leaf(tree, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def reduced(tree: Tree, mean: Callable[[Tensor], Tensor]) -> Tree:
    """Return the mean of all workers' trees of the same structure, by the collective ``mean``."""

    def mean_of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return mean(leaf.float())
        return float(mean(torch.tensor(float(leaf), dtype=torch.float64, device="cpu")))

    return _each_leaf(tree, mean_of)


def _each_leaf(tree: Tree, change: Callable[[Any], Any]) -> Tree:
    return {
        name: _each_leaf(leaf, change) if isinstance(leaf, dict) else change(leaf)
        for name, leaf in tree.items()
    }


CHECKSUM = "sha256"
"""Name of a state's checksum in it: over names and values, not over a file's encoding."""


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...


def checksum(value: Any) -> str:
    """Return the SHA-256 of nested dicts and lists of tensors, numbers, texts and None.

    The order of a dict's names does not matter. Shapes, dtypes and every bit of a tensor do.

    Raises:
        ValueError: a value of another type, which a checkpoint could hold only as pickled code.

    Example:
        >>> checksum({"a": 1, "b": [2.0]}) == checksum({"b": [2.0], "a": 1})
        True
        >>> checksum({"a": 1}) == checksum({"a": 1.0})
        False
    """
    digest = hashlib.sha256()
    _add(digest, value)
    return digest.hexdigest()


def with_checksum(state: Tree) -> Tree:
    """Return a copy of ``state`` with its checksum under ``"sha256"``."""
    return state | {CHECKSUM: checksum(state)}


def check_checksum(state: Mapping[str, Any]) -> None:
    """Raise ValueError if a state made by ``with_checksum`` has changed."""
    content = {name: value for name, value in state.items() if name != CHECKSUM}
    if state.get(CHECKSUM) != checksum(content):
        raise ValueError("its content does not have the checksum that it was saved with")


def _add(digest: _Hash, value: Any) -> None:
    """Hash a value after its kind and length, so that different values give different bytes."""
    if isinstance(value, dict):
        digest.update(f"dict {len(value)};".encode())
        for name in sorted(value, key=repr):
            _add(digest, name)
            _add(digest, value[name])
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)};".encode())
        for each in value:
            _add(digest, each)
    elif isinstance(value, Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    elif value is None or isinstance(value, bool | int | float | str):
        text = _as_plain(value).encode()
        digest.update(f"{len(text)};".encode() + text)
    else:
        raise ValueError(
            f"State can hold tensors, numbers, texts, lists and dicts only, but it has {value!r} "
            f"of {type(value).__name__}; keep it as one of these."
        )


def unsaved(value: Any, place: str = "") -> str:
    """Return where a state holds a value that ``checksum`` refuses, and its type; else ``""``."""
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        inside = (unsaved(each, f"{place}[{name!r}]") for name, each in pairs)
        return next(filter(None, inside), "")
    if value is None or isinstance(value, Tensor | bool | int | float | str):
        return ""
    return f"{type(value).__name__} at {place}"


def _as_plain(value: bool | int | float | str | None) -> str:
    # A file returns subclasses, such as NumPy's numbers, as the plain type.
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return f"{kind.__name__} {kind(value)!r}"
    return "None"


class Structure(abc.ABC):
    """The rule for a value in saved state, declared next to the code that returns the state."""

    @abc.abstractmethod
    def check(self, value: Any, place: str = "") -> None:
        """Raise ValueError if ``value`` breaks the rule; ``place`` is its path in the state."""


@dataclass(frozen=True)
class Leaf(Structure):
    """A value without parts.

    Args:
        rule: the rule in words, such as "a number".
        holds: the rule as a predicate.
    """

    rule: str
    holds: Callable[[Any], bool]

    def check(self, value: Any, place: str = "") -> None:
        if not self.holds(value):
            raise ValueError(f"{place or 'the state'} is {_in_words(value)}, not {self.rule}")


@dataclass(frozen=True)
class Optional(Structure):
    """None, or a value of structure ``of``."""

    of: Structure

    def check(self, value: Any, place: str = "") -> None:
        if value is not None:
            self.of.check(value, place)


@dataclass(frozen=True)
class Each(Structure):
    """A dict from names to values of structure ``of``."""

    of: Structure

    def check(self, value: Any, place: str = "") -> None:
        _DICT.check(value, place)
        for name, each in value.items():
            self.of.check(each, _within(place, name))


@dataclass(frozen=True)
class Listed(Structure):
    """A list of values of structure ``of``."""

    of: Structure

    def check(self, value: Any, place: str = "") -> None:
        _LIST.check(value, place)
        for index, each in enumerate(value):
            self.of.check(each, _within(place, index))


@dataclass(frozen=True)
class Pair(Structure):
    """A list of two values."""

    first: Structure
    second: Structure

    def check(self, value: Any, place: str = "") -> None:
        _PAIR.check(value, place)
        self.first.check(value[0], _within(place, 0))
        self.second.check(value[1], _within(place, 1))


@dataclass(frozen=True)
class OneOf(Structure):
    """A dict of structure ``first`` if it has all names of ``first``, otherwise ``second``."""

    first: Record
    second: Record

    def check(self, value: Any, place: str = "") -> None:
        _DICT.check(value, place)
        named = self.first.always.keys() <= value.keys()
        (self.first if named else self.second).check(value, place)


@dataclass(frozen=True)
class Record(Structure):
    """A dict with a structure for each name.

    Args:
        always: required names.
        maybe: optional names.
        others: the structure for all other names; None refuses other names.
    """

    always: Mapping[str, Structure] = field(default_factory=dict)
    maybe: Mapping[str, Structure] = field(default_factory=dict)
    others: Structure | None = None

    def check(self, value: Any, place: str = "") -> None:
        _DICT.check(value, place)
        known = {**self.always, **self.maybe}
        for name in self.always:
            if name not in value:
                raise ValueError(f"{_within(place, name)} is missing")
        for name, each in value.items():
            structure = known.get(name, self.others)
            if structure is None:
                raise ValueError(f"{_within(place, name)} does not belong there")
            structure.check(each, _within(place, name))


@dataclass(frozen=True)
class Plain(Structure):
    """Finite tensors, numbers, texts, None, and lists and dicts of these."""

    def check(self, value: Any, place: str = "") -> None:
        if isinstance(value, dict):
            Each(self).check(value, place)
        elif isinstance(value, list | tuple):
            Listed(self).check(value, place)
        else:
            _PLAIN_LEAF.check(value, place)


@dataclass(frozen=True)
class Number(Structure):
    """A number in ``low..high``, both included.

    Args:
        low: the least number.
        high: the greatest number; infinity allows every finite number from ``low`` on.
        whole: whether only whole numbers are allowed.
    """

    low: float = -math.inf
    high: float = math.inf
    whole: bool = False

    def check(self, value: Any, place: str = "") -> None:
        kind = "whole number" if self.whole else "finite number"
        rule = f"a {kind}{_range_in_words(self.low, self.high)}"
        Leaf(rule, self._holds).check(value, place)

    def _holds(self, value: Any) -> bool:
        fits = type(value) is int if self.whole else _is_number(value) and math.isfinite(value)
        return fits and self.low <= value <= self.high


@dataclass(frozen=True)
class Numbers(Structure):
    """A tensor of finite floating-point numbers in ``low..high``.

    Args:
        shape: the sizes; a pair is the least and the greatest size of a dimension.
        low: the least number.
        high: the greatest number.
        dtype: None allows every floating-point type.
    """

    shape: tuple[int | tuple[int, int], ...]
    low: float = -math.inf
    high: float = math.inf
    dtype: torch.dtype | None = None

    def check(self, value: Any, place: str = "") -> None:
        ERRORS.check(value, place)
        sizes = [(size, size) if isinstance(size, int) else size for size in self.shape]
        fits = value.dim() == len(sizes) and all(
            least <= size <= most for size, (least, most) in zip(value.shape, sizes, strict=True)
        )
        if not fits:
            expected = [f"{a}" if a == b else f"{a}..{b}" for a, b in sizes]
            raise ValueError(
                f"{place or 'the state'} has shape {tuple(value.shape)}, not "
                f"({', '.join(expected)})"
            )
        if self.dtype not in (None, value.dtype):
            raise ValueError(f"{place or 'the state'} is of {value.dtype}, not {self.dtype}")
        if value.numel() and not self.low <= float(value.min()) <= float(value.max()) <= self.high:
            raise ValueError(
                f"{place or 'the state'} has numbers in {float(value.min()):g}.."
                f"{float(value.max()):g}, not numbers{_range_in_words(self.low, self.high)}"
            )


def _range_in_words(low: float, high: float) -> str:
    if low == -math.inf:
        return "" if high == math.inf else f" of at most {high:g}"
    return f" of at least {low:g}" if high == math.inf else f" in {low:g}..{high:g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


NUMBER = Leaf("a number", _is_number)
ANYTHING = Leaf("", lambda v: True)
FINITE = Leaf("a finite number", lambda v: _is_number(v) and math.isfinite(v))
LEVEL = Optional(
    Leaf("a finite number of at least 0", lambda v: _is_number(v) and 0 <= v < math.inf)
)
INTEGER = Leaf("a whole number", lambda v: type(v) is int)
WHOLE = Leaf("a whole number of at least 0", lambda v: type(v) is int and v >= 0)
COUNT = Leaf("a whole number of at least 1", lambda v: type(v) is int and v >= 1)
TEXT = Leaf("a text", lambda v: isinstance(v, str))
FLAG = Leaf("True or False", lambda v: isinstance(v, bool))
FLOATS = Leaf("a tensor of floating-point numbers", _is_floating)
ERRORS = Leaf(
    "a tensor of finite floating-point numbers", lambda v: _is_floating(v) and _is_finite(v)
)
"""A memory's buffer, which is finite because the guard removes NaN and infinity."""

NOTHING = Leaf("an empty dict: the compressor's `keeps` declares no state", lambda v: v == {})

_DICT = Leaf(
    "a dict with texts as keys",
    lambda v: isinstance(v, dict) and all(isinstance(name, str) for name in v),
)
_LIST = Leaf("a list", lambda v: isinstance(v, list | tuple))
_PAIR = Leaf("a list of two", lambda v: isinstance(v, list | tuple) and len(v) == 2)
_PLAIN_LEAF = Leaf(
    "a number, a text, None or a tensor without NaN and infinity",
    lambda v: (
        v is None or isinstance(v, int | float | str) or (isinstance(v, Tensor) and _is_finite(v))
    ),
)


def _within(place: str, name: str | int) -> str:
    return f"{place}/{name}" if place else str(name)


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        finite = "" if _is_finite(value) else " with NaN or infinity"
        return f"a tensor of {value.dtype}{finite}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
