"""Levels: validate, clamp and apply the compression levels that a controller or a user sets."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_gc.compressors.base import Codec, Compressor, Knob
from lightning_gc.compressors.identity import Identity
from lightning_gc.compressors.wrappers.menu import Menu, chosen_of, compressors_of
from lightning_gc.compressors.wrappers.per_parameter import PerParameter, with_levels
from lightning_gc.core import Each, Leaf, Number, Optional, Pair, Structure
from lightning_gc.engine.compatibility import default_scheme
from lightning_gc.schemes import AllGather, Scheme

Requested = tuple[float | None, Mapping[str, float | None]]
"""A level for all parameters, and levels by parameter name: the arguments of ``Levels.set``."""


class Levels:
    """The compressor at its current levels, with any wrappers.

    Args:
        compressor: with its own level.
        scheme: as ``combine`` returns it. With None, a ``Collective`` needs none, and each
            choice of a menu has its own.
        knob: a narrower range of levels than the compressor's; None: all of that range.

    Attributes:
        compressor: at the common level, with the levels by name.
        scheme: of the compressor at these levels.
        exact: what is exchanged now is the gradient.
        on_menu: the level is the choice of a compressor.
        traits: the compressor's, which levels do not change.
        uncompressed: all parameters are sent dense; the compressor is not run.
        sends_whole: they are, in a menu: what is exchanged is the gradient, as plain DDP would.
        changed: levels have been set.
    """

    def __init__(
        self, compressor: Compressor, scheme: Scheme | None = None, knob: Knob | None = None
    ) -> None:
        self._first, self._scheme = compressor, scheme
        self.traits = compressor.traits
        self._knob = knob = knob or compressor.knob
        tightest = compressor if knob is None else compressor.at(knob.tightest)
        self._at_most = compressors_of(compressor) if isinstance(compressor, Menu) else (tightest,)
        self.scheme, self.exact = scheme, self.traits.exact
        self.on_menu = isinstance(compressor, Menu)
        self.forget()

    def forget(self) -> None:
        """Go back to the compressor's own level, as if none had been set."""
        self.compressor = self._common_compressor = self._first
        self.uncompressed = False
        self._common = self._first.level
        self._by_name: dict[str, float | None] = {}
        self.changed = False
        self._follow()

    def set(self, level: float | None, levels: Mapping[str, float | None] | None = None) -> None:
        """Set the compression level, between rounds. Errors are kept.

        Args:
            level: for all parameters; None sends them uncompressed, with their errors.
            levels: parameter name -> level, for those that differ.

        Raises:
            ValueError: an invalid level, a compressor without a knob, or levels by name for one
                that works on whole buckets.

        Warns:
            UserWarning: a level outside the knob's range, which is clamped.
        """
        compressor = self._common_compressor
        by_name = {name: self._clamped(v, name) for name, v in (levels or {}).items()}
        level = self._clamped(level, "all parameters")
        if level is not None:
            compressor = compressor.at(level)
        # Elementwise codecs work on whole buckets, but with the same result per parameter.
        whole = self.traits.elementwise and isinstance(compressor, Codec)
        divisible = (
            PerParameter(compressor) if whole or isinstance(compressor, Menu) else compressor
        )
        self.compressor = (
            with_levels(divisible, by_name, dense=level is None) if by_name else compressor
        )
        self._common_compressor, self._common, self._by_name = compressor, level, by_name
        self.uncompressed = level is None and not by_name
        self.changed = True
        self._follow()

    def _follow(self) -> None:
        """Let a menu's scheme follow the choice."""
        self.sends_whole = self.uncompressed and self.on_menu
        if not self.on_menu:
            return
        if self.sends_whole:
            dense = Identity()
            self.scheme, self.exact = self._scheme or default_scheme(dense), dense.traits.exact
            return
        levels = {self._common, *self._by_name.values()}
        found = {self.scheme_of(self._first.at(level)) for level in levels if level is not None}
        schemes = [scheme for scheme in found if scheme is not None]
        common = schemes[0] if schemes else self.scheme_of(self._common_compressor)
        self.scheme = common if len(schemes) < 2 else AllGather()  # which all codecs can use
        used_alone = self._first if self._by_name else chosen_of(self._common_compressor)
        self.exact = used_alone.traits.exact

    def scheme_of(self, compressor: Compressor) -> Scheme | None:
        """Return the scheme of the compressor at a level."""
        menu = isinstance(compressor, Menu) and self._scheme is None
        return default_scheme(compressor) if menu else self._scheme

    def own_state(
        self, state: Mapping[str, dict[str, Any]], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Drop compressors' state of parameters that another compressor of a menu takes now."""
        menu = self._common_compressor
        if isinstance(menu, Menu):
            for name, shape in shapes.items():
                level = self._by_name.get(name, self._common)
                if level is not None:
                    (menu.at(level) if self._by_name else menu).own(state[name], shape)

    def sample(self, level: float) -> Compressor:
        """Return the compressor with one level for all parameters, without setting it."""
        clamped = self._clamped(level, "an error curve")
        assert clamped is not None
        return self._common_compressor.at(clamped)

    def requested(self) -> Requested | None:
        """Return the arguments of the last ``set``, clamped; None if there was none."""
        return (self._common, dict(self._by_name)) if self.changed else None

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of this shape is compressed, if not now, then at other levels."""
        return any(compressor.compresses(shape) for compressor in self._at_most)

    def of(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, float | None]:
        """Return the level of each parameter; None: uncompressed for now, or no knob."""
        found = {name: self._by_name.get(name, self._common) for name in shapes}
        levels = {level for level in found.values() if level is not None}
        at = {level: self._common_compressor.at(level) for level in levels}
        return {
            name: level if level is not None and at[level].compresses(shapes[name]) else None
            for name, level in found.items()
        }

    def compressor_of(self, name: str, shape: tuple[int, ...]) -> Compressor | None:
        """Return the compressor of one parameter at its level; None: it is uncompressed."""
        compressor = self._common_compressor
        if self._knob is not None:
            level = self._by_name.get(name, self._common)
            if level is None:
                return None
            compressor = compressor.at(level)
        if isinstance(compressor, Menu):
            compressor = compressor.chosen
        return compressor if compressor.compresses(shape) else None

    def _clamped(self, level: float | None, part: str) -> float | None:
        """Clamp a level to the knob's range, with a warning; None stays None."""
        knob = self._knob
        if level is None:
            return None
        if knob is None or not 0 <= level < float("inf"):
            raise ValueError(
                f"Level {level!r} for {part} makes no sense to {self._common_compressor}"
                + (f": {knob.field} is in {knob.low:g}..{knob.high:g}." if knob else ".")
            )
        nearest = knob.clamp(level)
        if not knob.low <= level <= knob.high:  # whole numbers are rounded without a word
            warnings.warn(
                f"Level {level!r} for {part} is outside {knob.field}'s {knob.low:g}.."
                f"{knob.high:g} and has been set to {nearest!r}.",
                stacklevel=4,
            )
        return nearest


@dataclass(frozen=True)
class RequestedLevels(Structure):
    """Structure of ``Levels.requested()``: levels in the knob's range that can be set."""

    compressor: Compressor

    def check(self, value: Any, place: str = "") -> None:
        """Raise ValueError if ``value``, found at ``place``, is something else."""
        knob = self.compressor.knob
        level: Structure = Leaf("None, because the compressor has no knob", lambda v: v is None)
        if knob is not None:
            level = Optional(Number(knob.low, knob.high))
        Optional(Pair(level, Each(level))).check(value, place)
        if value is None:
            return
        try:
            Levels(self.compressor).set(*value)
        except ValueError as error:
            raise ValueError(f"{place or 'the state'} cannot be set: {error}") from error
