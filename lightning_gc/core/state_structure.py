"""Declare the structure of saved state; loading refuses other values and names their place."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


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
