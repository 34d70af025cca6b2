"""The three small models on which methods are compared at equal tuning budgets.

An LSTM with clipped SGD, a ResNet with momentum, a transformer with AdamW; a run of each takes
seconds of CPU time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tasks
import transformer_module
from catalogue import is_direction

Cell = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """One model, its data and optimizer.

    Attributes:
        about: what it is, for the page.
        rates: lowest and highest learning rate that is drawn: a factor of four to both sides of
            what suits it without compression.
        directions: the same for methods whose result is a direction, of another length than a
            gradient.
        train: trains once.
        width: units or channels.
        epochs: of a run.
        momenta: of the optimizer, drawn by those methods whose memory has none.
    """

    about: str
    rates: tuple[float, float]
    directions: tuple[float, float]
    train: Callable[[Cell, tasks.Method], tasks.Figures]
    width: int
    epochs: int
    momenta: tuple[float, ...] = ()


def lstm(cell: Cell, method: tasks.Method) -> tasks.Figures:
    """Train the demo's language model; 99 steps an epoch."""
    return tasks.words({**cell, "hidden": cell["width"], "columns": 20}, method)


def resnet(cell: Cell, method: tasks.Method) -> tasks.Figures:
    """Train the ResNet on digits; 18 steps an epoch with four workers."""
    return tasks.photos({**cell, "batch": 16}, method)


def transformer(cell: Cell, method: tasks.Method) -> tasks.Figures:
    """Train the transformer; 90 steps an epoch with four workers."""
    return transformer_module.train({**cell, "columns": 24}, method)


MODELS = {
    "lstm": Model(
        about="the docs LSTM, 64 units, plain SGD, clipped",
        rates=(5.0, 80.0),
        directions=(0.0003, 0.01),
        train=lstm,
        width=64,
        epochs=2,
    ),
    "resnet": Model(
        about="a ResNet on digits, width 16, SGD with momentum",
        rates=(0.0125, 0.2),
        directions=(0.0001, 0.01),
        train=resnet,
        width=16,
        epochs=8,
        momenta=(0.9,),
    ),
    "transformer": Model(
        about="a transformer on the docs, two layers, 64 wide, AdamW, clipped",
        rates=(0.00075, 0.012),
        directions=(0.00075, 0.012),
        train=transformer,
        width=transformer_module.WIDTH,
        epochs=2,
        # Compressed gradients often train better without: benchmarks/papers/adam.py.
        momenta=(0.9, 0.0),
    ),
}


def train(cell: Cell, settings: Cell, method: tasks.Method) -> tasks.Figures:
    """Train a cell's model with a method, at a draw's learning rate and momentum."""
    how: Cell = {name: settings[name] for name in ("rate", "momentum") if name in settings}
    # A direction has one length in every step: clipping would only change the rate.
    clip: Cell = {"clip": 0.0} if is_direction(method.compressor) else {}
    return MODELS[cell["model"]].train({**cell, **how, **clip}, method)
