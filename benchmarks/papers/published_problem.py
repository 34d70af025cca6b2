"""A problem on which published code and ours take the same steps, and how to call such code."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gc.testing import Lockstep

WORKERS, STEPS = 4, 200
SAMPLES, FEATURES, CLASSES = 60, 40, 24
Gradients = Callable[[Tensor], list[Tensor]]


class Problem:
    """Logistic or least squares regression, with other data on each worker."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        shift = draw.standard_normal((WORKERS, 1, FEATURES))
        self.inputs = draw.standard_normal((WORKERS, SAMPLES, FEATURES)) + shift
        self.signs = np.sign(draw.standard_normal((WORKERS, SAMPLES)))
        self.targets = draw.standard_normal((WORKERS, SAMPLES, CLASSES))
        self.start = draw.standard_normal(FEATURES)

    def logistic(self, weights: Tensor) -> list[Tensor]:
        """Return each worker's gradient; the regulariser is 0.05·‖w‖²."""
        found = []
        for x, y in zip(self.inputs, self.signs, strict=True):
            inputs, signs = torch.from_numpy(x), torch.from_numpy(y)
            slope = -signs * torch.sigmoid(-signs * (inputs @ weights))
            found.append(inputs.t() @ slope / SAMPLES + 0.1 * weights)
        return found

    def squares(self, weights: Tensor) -> list[Tensor]:
        """Return each worker's gradient of least squares, ``(CLASSES, FEATURES)``."""
        pairs = zip(self.inputs, self.targets, strict=True)
        each = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in pairs]
        return [(x @ weights.t() - y).t() @ x / SAMPLES for x, y in each]


def descend(start: Tensor, rate: float, step: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return the weights after each step, given what is applied for weights."""
    weights, course = start.clone(), []
    for _ in range(STEPS):
        weights = weights - rate * step(weights)
        course.append(weights)
    return course


def ours(
    gradients: Gradients, lockstep: Lockstep, before: Callable[[int], None] = lambda _: None
) -> Callable[[Tensor], Tensor]:
    """Return what our engines apply; ``before`` is called with the number of each step.

    Weights of three dimensions are two matrices, each a parameter.
    """
    steps = iter(range(STEPS))

    def step(weights: Tensor) -> Tensor:
        before(next(steps))
        if weights.dim() < 3:
            return lockstep.step([{"w": each} for each in gradients(weights)]).mean["w"]
        each = [dict(zip("01", pair, strict=True)) for pair in gradients(weights)]
        return torch.stack(list(lockstep.step(each).mean.values()))

    return step


def functions(path: Path, known: dict[str, Any]) -> SimpleNamespace:
    """Return the functions and classes of a script, without running the rest of it."""
    kept = (ast.FunctionDef, ast.ClassDef)
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, kept)]
    space = known | {"__name__": path.stem}
    exec(compile(tree, str(path), "exec"), space)
    return SimpleNamespace(**space)
