"""Logistic regression with an L2 penalty: the function, its gradients and its minimum; madelon."""

from __future__ import annotations

import gzip
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Regression:
    """The problem: samples times labels, and its constants."""

    samples: Tensor  # (m, d) float64, each times its label −1 or 1
    l2: float
    rate: float

    @classmethod
    def of(cls, samples: Tensor, labels: Tensor) -> tuple[Regression, float]:
        """Return the problem and its L."""
        smoothness = float(torch.linalg.matrix_norm(samples, 2)) ** 2 / (4 * len(samples))
        l2 = smoothness / 1e4
        return cls(samples * labels[:, None], l2, 1 / (smoothness + l2)), smoothness

    def value(self, x: Tensor) -> float:
        """Return f(x)."""
        margins = self.samples @ x
        losses = torch.logaddexp(torch.zeros_like(margins), -margins)
        return float(losses.mean() + self.l2 / 2 * x.square().sum())

    def gradients(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return the gradients of single terms, ``(rows, d)``."""
        return self.l2 * x - torch.sigmoid(-(rows @ x))[:, None] * rows

    def minimum(self) -> tuple[Tensor, float]:
        """Return x* and f*, by Newton's method: the Hessian is small and positive definite."""
        x = torch.zeros_like(self.samples[0])
        for _ in range(15):
            share = torch.sigmoid(-(self.samples @ x))
            weights = (share * (1 - share) / len(share))[:, None]
            hessian = self.samples.T @ (weights * self.samples) + self.l2 * torch.eye(len(x)).to(x)
            x = x - torch.linalg.solve(hessian, self.gradients(x, self.samples).mean(0))
        return x, self.value(x)


def lines_of(folder: Path, name: str) -> list[str] | None:
    """Return the lines of a file, gzipped or not; None if it is not there."""
    for path, opened in ((folder / name, open), (folder / f"{name}.gz", gzip.open)):
        if path.is_file():
            with opened(path, "rt") as file:
                return list(file)
    return None


def madelon(folder: Path) -> tuple[Tensor, Tensor]:
    """Return madelon's samples, ``(m, d)``, and labels, ``(m,)``; exit with 2 without them."""
    rows = lines_of(folder, "madelon_train.data")
    labels = lines_of(folder, "madelon_train.labels")
    if rows is None or labels is None:
        pairs = [line.partition(" ") for line in lines_of(folder, "madelon") or ()]
        labels, rows = [label for label, _, _ in pairs], [row for _, _, row in pairs]
    if not rows:
        sys.stderr.write(f"{folder} has neither madelon_train.data and .labels nor madelon.\n")
        raise SystemExit(2)
    values = [[float(word.rpartition(":")[2]) for word in row.split()] for row in rows]
    return torch.tensor(values).double(), torch.tensor([float(label) for label in labels]).double()
