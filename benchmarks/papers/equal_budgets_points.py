"""Winners of the searches at equal budgets: their points, the Pareto front, and ranks.

A point is a winner: a method's mean loss over seeds on a model, at the fewest bytes that it was
chosen for.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frame import Row, values, where

BEST = "best"  # stands for the draw in the cells of winners
ANY = 0  # some methods send more than dense
TARGETS = (ANY, 8, 30, 100, 300)
"""Times fewer bytes than dense."""
SLACK = 0.95  # of a ratio, which varies with the seed where it depends on gradients
RESAMPLED = 1000


@dataclass(frozen=True)
class Point:
    """A winner's runs.

    Attributes:
        model: that was trained.
        method: its name.
        kind: of its compressor.
        losses: one for each seed, infinite where a run diverged.
        ratio: mean over seeds of how many times fewer bytes than dense it sends.
        bytes: of a worker in a step, mean over seeds.
        settings: as drawn.
        accuracy: mean over seeds; None of language models.
    """

    model: str
    method: str
    kind: str
    losses: tuple[float, ...]
    ratio: float
    bytes: float
    settings: Mapping[str, Any]
    accuracy: float | None = None

    @property
    def loss(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.losses)


def label(target: int) -> str:
    """Return a ratio as headings show it."""
    return "any ratio" if target == ANY else f"{target}x"


def trained(row: Row) -> bool:
    """Return whether a run's training loss became lower than in its first step."""
    return row["loss"] is not None and not row.get("diverged", True)


def chosen(draws: Iterable[Row], target: float) -> Row | None:
    """Return the draw of least loss among those that send so many times fewer bytes, if any."""
    some = [row for row in draws if row["loss"] is not None and (row["ratio"] or 0) >= target]
    return min(some, key=lambda row: float(row["loss"]), default=None)


def point(rows: Sequence[Row], model: str, method: str, target: int) -> Point | None:
    """Return the winner for a ratio; None where it was not run, or nothing reaches the ratio."""
    runs = where(rows, model=model, method=method, draw=BEST, target=target)
    if runs and runs[0]["as"] is not None:
        return point(rows, model, method, runs[0]["as"])
    sent = [row for row in runs if row.get("ratio") is not None]
    if not sent or runs[0]["pick"] is None:
        return None
    ratio, size = (statistics.fmean(values(sent, name)) for name in ("ratio", "bytes"))
    kind, settings, losses = sent[0]["kind"], sent[0]["settings"], tuple(values(runs, "loss"))
    accuracy = statistics.fmean(values(sent, "accuracy")) if "accuracy" in sent[0] else None
    return Point(model, method, kind, losses, ratio, size, settings, accuracy)


def points(rows: Sequence[Row], model: str) -> list[Point]:
    """Return all winners on a model, each once."""
    methods = dict.fromkeys(row["method"] for row in rows)
    all_of_them = [point(rows, model, method, t) for method in methods for t in TARGETS]
    return list({(p.method, p.ratio, p.losses): p for p in all_of_them if p}.values())


def entries(rows: Sequence[Row], model: str, target: int) -> list[Point]:
    """Return the winners for a ratio, of all methods that reach it, the lowest loss first."""
    methods = dict.fromkeys(row["method"] for row in rows)
    found = [point(rows, model, method, target) for method in methods]
    reached = [p for p in found if p is not None and p.ratio >= SLACK * target]
    return sorted(reached, key=lambda p: p.loss)


def front(some: Iterable[Point]) -> list[Point]:
    """Return the points that no other one beats in both loss and bytes, fewest bytes last."""
    found: list[Point] = []
    for p in sorted(some, key=lambda p: (p.bytes, p.loss), reverse=True):
        # What sends more bytes must have less loss.
        found = [q for q in found if q.loss < p.loss]
        if math.isfinite(p.loss):
            found.append(p)
    return found


def ranks(losses: Mapping[str, float]) -> dict[str, float]:
    """Return the rank of each name, from 1; the mean of their ranks for those that are equal."""
    ordered = sorted(losses.values())
    return {
        name: ordered.index(loss) + (1 + ordered.count(loss)) / 2 for name, loss in losses.items()
    }


def mean_ranks(
    by_model: Sequence[Sequence[Point]],
) -> dict[str, tuple[float, float, float]]:
    """Return method -> its mean rank over models, and the 95 % interval that seeds leave.

    Of methods that have a point on every model. Each resampling draws every point's seeds anew,
    with replacement, and ranks the means. Deviations from a mean are enlarged by √(n/(n − 1)), as
    n seeds show too little of them. Empty where there is one seed only, or no method.
    """
    shared = set.intersection(*({p.method for p in some} for some in by_model)) if by_model else ()
    groups = [[p for p in some if p.method in shared] for some in by_model]
    if not shared:
        return {}
    source = random.Random(0)

    def mean(drawn: bool) -> dict[str, float]:
        each = [
            ranks({p.method: resampled(p.losses, source) if drawn else p.loss for p in group})
            for group in groups
        ]
        return {name: statistics.fmean(rank[name] for rank in each) for name in each[0]}

    many = [mean(True) for _ in range(RESAMPLED)]
    found = {}
    for name, rank in mean(False).items():
        drawn = sorted(one[name] for one in many)
        ends = drawn[round(0.025 * (RESAMPLED - 1))], drawn[round(0.975 * (RESAMPLED - 1))]
        alone = any(p.method == name and len(p.losses) < 2 for group in groups for p in group)
        found[name] = (rank, math.nan, math.nan) if alone else (rank, *ends)
    return dict(sorted(found.items(), key=lambda item: item[1][0]))


def resampled(losses: Sequence[float], source: random.Random) -> float:
    """Return the mean of losses drawn with replacement, its deviation enlarged."""
    n, mean = len(losses), statistics.fmean(losses)
    if n < 2 or not math.isfinite(mean):  # a method that diverged once is last
        return mean
    return mean + math.sqrt(n / (n - 1)) * (statistics.fmean(source.choices(losses, k=n)) - mean)
