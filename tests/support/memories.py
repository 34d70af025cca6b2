"""Runs of memories for several workers, and what their references in NumPy share."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lightning_gc import TopK
from lightning_gc.engine import Engine
from lightning_gc.memories import Memory
from lightning_gc.testing import Lockstep

Array = np.ndarray
WORKERS, STEPS, DENSITY = 3, 12, 0.1
TOP = TopK(DENSITY)
SHAPES = {"w": (8, 5), "b": (3,)}  # of b one element is a third


def gradients(step: int, idle: tuple[int, ...] = ()) -> list[dict[str, Array]]:
    """Return every worker's; ``w`` of the idle ones is zero."""
    draw = np.random.default_rng(step)
    made = [{n: draw.standard_normal(s) for n, s in SHAPES.items()} for _ in range(WORKERS)]
    for worker in idle:
        made[worker]["w"][:] = 0
    return made


def run(
    memory: Memory,
    compressor: Any = TOP,
    idle: Callable[[int], tuple[int, ...]] = lambda step: (),
    weights: dict[str, Array] | None = None,
) -> tuple[list[dict[str, Array]], list[Engine]]:
    """Return the mean of every step, and the engines."""
    lockstep = Lockstep(WORKERS, compressor, memory)
    lockstep.weights = {n: torch.tensor(w).float() for n, w in (weights or {}).items()}
    means = []
    for step in range(STEPS):
        made = gradients(step, idle(step))
        result = lockstep.step([{n: torch.tensor(g).float() for n, g in m.items()} for m in made])
        means.append({n: mean.double().numpy() for n, mean in result.mean.items()})
    return means, lockstep.engines


def top(x: Array) -> Array:
    """Return True at the largest magnitudes."""
    k = max(1, round(DENSITY * x.size))
    chosen = np.zeros(x.size, bool)
    chosen[np.argsort(-np.abs(x).reshape(-1))[:k]] = True
    return chosen.reshape(x.shape)


def compare(means: Sequence[dict[str, Array]], expected: Sequence[dict[str, Array]]) -> None:
    for got, wanted in zip(means, expected, strict=True):
        for name in SHAPES:
            np.testing.assert_allclose(got[name], wanted[name], rtol=1e-4, atol=1e-5)


def zeros() -> list[dict[str, Array]]:
    return [{n: np.zeros(s) for n, s in SHAPES.items()} for _ in range(WORKERS)]


def averaged(sent: list[Array]) -> Array:
    return np.mean(sent, axis=0)
