"""The three small models on which methods are compared at equal tuning budgets.

An LSTM with clipped SGD, a ResNet with momentum, a transformer with AdamW; a run of each takes
seconds of CPU time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tasks
import transformer_module
from catalogue import is_direction
from transformer import WIDTH

from lightning_gc.memories import Memory

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
        guess: the loss of a guess at equal odds.
        rates_for: the optimizer's momentum that ``rates`` suit; None if momentum does not make its
            steps longer.
        momenta: of the optimizer, drawn by those methods whose memory has none.
        decay: of weights, where it is a part of the gradient; some memories have to add it.
    """

    about: str
    rates: tuple[float, float]
    directions: tuple[float, float]
    train: Callable[[Cell, tasks.Method], tasks.Figures]
    width: int
    epochs: int
    guess: float
    rates_for: float | None
    momenta: tuple[float, ...] = ()
    decay: float = 0.0


def lstm(cell: Cell, method: tasks.Method) -> tasks.Figures:
    """Train the demo's language model without dropout; 124 steps an epoch."""
    return tasks.words({**cell, "hidden": cell["width"], "columns": 16, "dropout": 0.0}, method)


def resnet(cell: Cell, method: tasks.Method) -> tasks.Figures:
    """Train the ResNet on digits; 18 steps an epoch with four workers."""
    return tasks.photos({**cell, "batch": 16}, method)


def transformer(cell: Cell, method: tasks.Method) -> tasks.Figures:
    """Train the transformer; 67 steps an epoch with four workers."""
    return transformer_module.train({**cell, "columns": 32}, method)


MODELS = {
    "lstm": Model(
        about="the docs LSTM, 64 units, plain SGD, clipped, no dropout",
        rates=(7.0, 112.0),
        directions=(0.001, 0.06),
        train=lstm,
        width=64,
        epochs=2,
        guess=math.log(2132),  # words
        rates_for=0.0,
    ),
    "resnet": Model(
        about="a ResNet on digits, width 16, SGD with momentum",
        rates=(0.0125, 0.2),
        directions=(0.0001, 0.01),
        train=resnet,
        width=16,
        epochs=8,
        guess=math.log(10),
        rates_for=0.9,
        momenta=(0.9,),
        decay=tasks.DECAY,
    ),
    "transformer": Model(
        about="a transformer on the docs, two layers, 64 wide, AdamW, clipped",
        rates=(0.0015, 0.024),
        directions=(0.0015, 0.024),
        train=transformer,
        width=WIDTH,
        epochs=2,
        guess=math.log(2132),
        rates_for=None,
        # Compressed gradients often train better without: benchmarks/papers/adam.py.
        momenta=(0.9, 0.0),
    ),
}


def train(cell: Cell, settings: Cell, method: tasks.Method) -> tasks.Figures:
    """Train a cell's model with a method, at a draw's learning rate and momentum."""
    model, memory = MODELS[cell["model"]], method.memory
    how: Cell = {name: settings[name] for name in ("rate", "momentum") if name in settings}
    if is_direction(method.compressor):  # of one length in every step: the rate alone counts
        how["clip"] = 0.0
    if model.decay and memory is not None and refuses(memory, weight_decay=model.decay):
        how["weight_decay"] = 0.0
        method = replace(method, memory=replace(memory, weight_decay=model.decay))  # type: ignore[type-var]
    return model.train({**cell, **how}, method)


def refuses(memory: Memory, **group: float) -> bool:
    """Return whether a memory refuses a setting of the optimizer, as it has its own."""
    try:
        memory.check_optimizer(group)
    except ValueError:
        return True
    return False
