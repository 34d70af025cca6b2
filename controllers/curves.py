"""Describe the error and bytes of one parameter's gradient as functions of the level (Curve)."""

from __future__ import annotations

from typing import NamedTuple


class Point(NamedTuple):
    """What a level costs.

    Attributes:
        level: value of the knob.
        error: ``‖x − C(x)‖``.
        nbytes: of one worker's message.
    """

    level: float
    error: float
    nbytes: float


class Curve(NamedTuple):
    """Error and bytes of a gradient at several levels.

    Attributes:
        norm: ``‖x‖`` of the gradient summed over the epoch, in units of the gradient.
        points: one per level.
    """

    norm: float
    points: tuple[Point, ...]
