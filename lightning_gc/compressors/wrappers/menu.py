"""Menu: several compressors. One works at a time, and the level is the choice."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from lightning_gc.compressors.base import Bound, Compressor, Knob, Traits, Waits, Worst
from lightning_gc.compressors.identity import Identity
from lightning_gc.compressors.joint import CodecScheme, Whole
from lightning_gc.compressors.low_rank.powersgd import PowerSGD
from lightning_gc.compressors.quantisers.cast import Cast
from lightning_gc.compressors.quantisers.qsgd import QSGD
from lightning_gc.compressors.sparsifiers.topk import TopK
from lightning_gc.compressors.wrappers.wrapper import Wrapper
from lightning_gc.core import Bucket, Flow, Structure, Wire
from lightning_gc.core.combinations import judge
from lightning_gc.core.refusal import refuse
from lightning_gc.core.registry import did_you_mean
from lightning_gc.core.saved_state import NOTHING, Leaf, Record
from lightning_gc.core.settings import short

_SIZE = 1 << 20
"""Elements of a square matrix: its payloads put the compressors in order."""
_OWNER = "method of the menu"
"""Entry of a parameter's state: the name of the compressor to which the state belongs."""


class Entries(Mapping[str, Compressor]):
    """Compressors by name, in ascending order of bytes. It is not changed once it is made."""

    def __init__(self, compressors: Mapping[str, Compressor]) -> None:
        self._found = dict(sorted(compressors.items(), key=lambda entry: _nbytes(entry[1])))

    def __getitem__(self, name: str) -> Compressor:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Entries) and tuple(self.items()) == tuple(other.items())

    def __hash__(self) -> int:
        return hash(tuple(self._found.items()))

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{name!r}: {short(each)}" for name, each in self.items()) + "}"


def _nbytes(compressor: Compressor) -> float:
    return sum(field.nbytes for field in compressor.wire(_SIZE))


@dataclass(frozen=True)
class Menu(Compressor):
    """Choose among compressors: one of them works, and a controller may choose another one.

    At a choice each bit is as with that compressor alone: it has the scheme that ``schemes`` names
    or its default one, and sends small tensors as it would alone. Errors are kept when the choice
    changes, and the next compressor sends them. A compressor's own state, such as PowerSGD's last
    factors, is dropped.

    The level is the place of the choice in ascending order of the bytes of a matrix of 2^20
    elements, from 1. Controllers that are given their levels can drive a menu, such as ``Schedule``
    and ``BandwidthAware``. ``Menu.names`` has that order.

    Args:
        compressors: name -> compressor, at least two. Each may have its own wrappers.
        choice: name of the compressor that works at first; by default the first one that is given.
        schemes: name -> scheme of that choice, an instance or its name, such as
            ``{"topk in two rounds": "two_shot"}``; others have their default. A ``scheme`` that is
            given beside the menu counts for all.

    Communication pattern:
        The chosen compressor's. If a controller gives parameters different compressors with
        different schemes, all codecs use ``AllGather()``.

    Bound:
        The worst one of all compressors.

    Raises:
        ValueError: fewer than two compressors, an unknown name, another menu inside, or a
            compressor that cannot stand beside others: one with a vote, which leaves no
            error for the next one, and one that reads the state of all tensors.

    Example:
        >>> from lightning_gc import QSGD, Cast, Identity, Menu
        >>> menu = Menu({"dense": Identity(), "cast": Cast(), "qsgd": QSGD(4)})
        >>> menu.names, menu.level
        (('qsgd', 'cast', 'dense'), 3)
        >>> menu.at(1).chosen
        QSGD(bits=4, block_size=512, norm='max')

    When to use:
        Where it is not known before the run which method pays, because the link or the step's time
        is not known, or changes.
    """

    compressors: Mapping[str, Compressor]
    choice: str | None = None  # never after construction
    schemes: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        given = self.compressors
        if not isinstance(given, Mapping) or len(given) < 2:
            raise ValueError(
                f"Menu(compressors={given!r}): give at least two compressors by name, such as "
                f"Menu({{'dense': Identity(), 'qsgd': QSGD(4)}})."
            )
        for name, compressor in given.items():
            _check(name, compressor)
        if self.choice is None:
            object.__setattr__(self, "choice", next(iter(given)))
        named: Any = self.schemes
        if isinstance(named, str):
            why = "give the scheme of each choice, such as {'topk': 'two_shot'}; for one scheme of "
            refuse("Menu", f"{why}all, give the strategy scheme=...", schemes=named)
        own = dict(named)
        object.__setattr__(self, "schemes", tuple(own.items()))  # hashable
        for field, name in (("choice", self._name), *(("schemes", each) for each in own)):
            if name not in given:
                raise ValueError(
                    f"Menu({field}={name!r}): this is not on the menu{did_you_mean(name, given)}; "
                    f"give one of {', '.join(map(repr, given))}."
                )
        entries = given if isinstance(given, Entries) else Entries(given)
        object.__setattr__(self, "compressors", entries)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the compressors, in ascending order of bytes."""
        return tuple(self.compressors)

    @property
    def sixteen(self) -> str:
        """Name of the choice that sends 16 bits of each element, or an empty text."""
        found = (name for name, each in self.compressors.items() if _nbytes(each) == 2 * _SIZE)
        return next(found, "")

    def __repr__(self) -> str:
        """Return the menu as it is written; checkpoints compare it."""
        own = f", schemes={dict(self.schemes)!r}" if self.schemes else ""
        return f"Menu(compressors={self.compressors!r}, choice={self.choice!r}{own})"

    def __str__(self) -> str:
        """Return the names, for tables and the log; what they stand for is in the repr."""
        return f"Menu({', '.join(self.names)})"

    @property
    def _name(self) -> str:
        assert self.choice is not None
        return self.choice

    @property
    def level(self) -> int:
        """The place of the choice in ``names``, from 1."""
        return self.names.index(self._name) + 1

    def at(self, level: float) -> Self:
        """Return this menu with the choice at a place, clamped to the range of places."""
        if math.isnan(level):
            raise ValueError(f"{self} cannot be set to level nan; give a place in its order.")
        assert self.knob is not None
        return replace(self, choice=self.names[int(self.knob.clamp(level)) - 1])

    @property
    def chosen(self) -> Compressor:
        """The compressor that works."""
        return self.compressors[self._name]

    def each(self, change: Callable[[Compressor], Compressor]) -> Self:
        """Return this menu with every compressor changed, in the same order."""
        changed = {name: change(compressor) for name, compressor in self.compressors.items()}
        return replace(self, compressors=changed)

    @functools.cached_property
    def traits(self) -> Traits:
        """The traits that all compressors share, with the kind of the one with the fewest bytes."""
        found = [compressor.traits for compressor in self.compressors.values()]
        return Traits(
            kind=found[0].kind,
            linear=all(each.linear for each in found),
            unbiased=all(each.unbiased for each in found),
            elementwise=all(each.elementwise for each in found),
            exact=all(each.exact for each in found),
            needs_sums=any(each.needs_sums for each in found),
            portable=all(each.portable for each in found),
            knob=Knob("choice", 1, len(found), "linear", integer=True),
        )

    @property
    def waits(self) -> Waits:
        found = [compressor.waits for compressor in self.compressors.values()]
        return Waits(min(each.least for each in found), max(each.limit for each in found))

    @property
    def whole(self) -> Whole:
        return self.chosen.whole

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme | None) -> Flow:
        yield from self.chosen.flow(bucket, buffer, out, scheme)

    def bound(self, numel: int) -> Bound:
        return Worst(tuple(each.bound(numel) for each in self.compressors.values()))

    def wire(self, numel: int) -> Wire:
        """Return the wire format of the compressor that works."""
        return self.chosen.wire(numel)

    def keeps(self, shape: tuple[int, ...]) -> Structure:
        return _StateOf(tuple((n, c.keeps(shape)) for n, c in self.compressors.items()))

    def own(self, state: dict[str, Any], shape: tuple[int, ...]) -> None:
        """Drop a parameter's state if it is another compressor's."""
        if state and state.get(_OWNER) != self._name:
            state.clear()
        if not state and self.chosen.keeps(shape) is not NOTHING:
            state[_OWNER] = self._name

    def compresses(self, shape: tuple[int, ...]) -> bool:
        return self.chosen.compresses(shape)

    def compressing_step(self, step: int) -> int:
        return self.chosen.compressing_step(step)

    def for_shape(self, shape: tuple[int, ...]) -> Compressor | None:
        return self.chosen.for_shape(shape)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        rounding = {"dense": Identity(), "cast": Cast(), "qsgd": QSGD(4)}
        biased = {"topk": TopK(0.05), "cast": Cast(), "powersgd": PowerSGD(2)}
        return cls(rounding), cls(rounding, "qsgd"), cls(biased), cls(biased, "powersgd")


@dataclass(frozen=True)
class _StateOf(Structure):
    """Structure of a parameter's state, which names the compressor to which it belongs."""

    known: tuple[tuple[str, Structure], ...]

    def check(self, value: Any, place: str = "") -> None:
        if value == {}:
            return
        known = dict(self.known)
        owner = Leaf(f"one of {', '.join(map(repr, known))}", lambda name: name in known)
        Record({_OWNER: owner}, others=_ANY).check(value, place)
        own = {name: each for name, each in value.items() if name != _OWNER}
        if own:  # a tensor that it does not compress has no state of its own
            known[value[_OWNER]].check(own, place)


_ANY = Leaf("anything", lambda value: True)


def _check(name: Any, compressor: Any) -> None:
    """Raise ValueError if a compressor cannot stand in a menu."""
    if not isinstance(name, str) or not name:
        refuse("Menu", f"{name!r} is not a name; give each compressor a text as its name")
    if not isinstance(compressor, Compressor):
        raise ValueError(
            f"Menu({{{name!r}: {compressor!r}}}): give an instance of a compressor, such as "
            f"QSGD(4)."
        )
    judge("Compressors of a Menu", compressor=compressor, name=name)


def compressors_of(compressor: Compressor) -> tuple[Compressor, ...]:
    """Return all compressors of a menu; of another compressor, itself.

    Raises:
        ValueError: a menu inside a wrapper.
    """
    if isinstance(compressor, Menu):
        return tuple(compressor.compressors.values())
    inner = compressor
    while isinstance(inner, Wrapper):
        outer, inner = inner, inner.inner
        if isinstance(inner, Menu):
            raise ValueError(
                f"{type(outer).__name__} wraps a menu, whose compressors have schemes of "
                f"their own; put the wrapper around compressors of the menu."
            )
    return (compressor,)


def chosen_of(compressor: Compressor) -> Compressor:
    """Return the compressor that works: a menu's choice, or the compressor itself."""
    return compressor.chosen if isinstance(compressor, Menu) else compressor
