"""Levels that somebody else has chosen, made sense of."""

from __future__ import annotations

import warnings

from lightning_gc.compressors.base import Compressor


def clamped(compressor: Compressor, level: float | None, whose: str) -> float | None:
    """Return the value of the knob's range nearest to ``level``; None stays None.

    Raises:
        ValueError: a level that is nonsense, or a compressor without a knob.

    Warns:
        UserWarning: a level outside the knob's range.
    """
    knob = compressor.knob
    if level is None:
        return None
    if knob is None or not 0 <= level < float("inf"):
        raise ValueError(
            f"Level {level!r} for {whose} makes no sense to {compressor!r}"
            + (f": {knob.field} is in {knob.low:g}..{knob.high:g}." if knob else ".")
        )
    nearest = knob.clamp(level)
    if nearest != level:
        warnings.warn(
            f"Level {level!r} for {whose} is outside {knob.field}'s {knob.low:g}..{knob.high:g} "
            f"and has been set to {nearest!r}.",
            stacklevel=4,
        )
    return nearest
