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

from equal_budgets_models import MODELS
from frame import Row, values, verdict, where

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
        losses: by seed; infinite where a run diverged.
        ratio: mean over seeds of how many times fewer bytes than dense it sends.
        bytes: of a worker in a step, mean over seeds.
        settings: as drawn.
        accuracy: mean over seeds; None of language models.
    """

    model: str
    method: str
    kind: str
    losses: Mapping[int, float]
    ratio: float
    bytes: float
    settings: Mapping[str, Any]
    accuracy: float | None = None

    @property
    def loss(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.losses.values())


def label(target: int) -> str:
    """Return a ratio as headings show it."""
    return "any ratio" if target == ANY else f"{target}x"


def trained(row: Row) -> bool:
    """Return whether a run's training loss, at its end, is lower than that of a guess."""
    loss = row.get("train_loss")
    return loss is not None and loss < MODELS[row["model"]].guess


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
    if len({row["pick"] for row in runs}) > 1:
        raise ValueError(f"{method} on {model} at {label(target)}: seeds have unlike draws.")
    ratio, size = (statistics.fmean(values(sent, name)) for name in ("ratio", "bytes"))
    kind, settings = sent[0]["kind"], sent[0]["settings"]
    losses = dict(zip((row["seed"] for row in runs), values(runs, "loss"), strict=True))
    accuracy = statistics.fmean(values(sent, "accuracy")) if "accuracy" in sent[0] else None
    return Point(model, method, kind, losses, ratio, size, settings, accuracy)


def compare(lower: Point, higher: Point) -> str:
    """Say whether the first has less loss, as ``frame.verdict`` does, by the seeds of both."""
    seeds = sorted(lower.losses.keys() & higher.losses.keys())
    return verdict([lower.losses[i] for i in seeds], [higher.losses[i] for i in seeds])


def points(rows: Sequence[Row], model: str) -> list[Point]:
    """Return all winners on a model, each once."""
    methods = dict.fromkeys(row["method"] for row in rows)
    all_of_them = [point(rows, model, method, t) for method in methods for t in TARGETS]
    return list({(p.method, p.ratio, *p.losses.values()): p for p in all_of_them if p}.values())


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
    """Return method -> its mean rank over models, and the interval that seeds leave.

    Of methods that have a point on every model. Each resampling draws the seeds of a model anew,
    with replacement, the same ones for all methods, and ranks the means; the interval holds 95 % of
    them. Deviations from a mean are enlarged by √(n/(n − 1)), as n seeds show too little of them.
    NaN where there is one seed only; empty where there is no method.
    """
    shared = set.intersection(*({p.method for p in some} for some in by_model)) if by_model else ()
    groups = [[p for p in some if p.method in shared] for some in by_model]
    if not shared:
        return {}
    source = random.Random(0)

    def mean(resample: bool) -> dict[str, float]:
        each = [ranks(resampled(group, source) if resample else means(group)) for group in groups]
        return {name: statistics.fmean(rank[name] for rank in each) for name in each[0]}

    many = [mean(True) for _ in range(RESAMPLED)]
    found = {}
    for name, rank in mean(False).items():
        drawn = sorted(one[name] for one in many)
        ends = drawn[round(0.025 * (RESAMPLED - 1))], drawn[round(0.975 * (RESAMPLED - 1))]
        alone = any(p.method == name and len(p.losses) < 2 for group in groups for p in group)
        found[name] = (rank, math.nan, math.nan) if alone else (rank, *ends)
    return dict(sorted(found.items(), key=lambda item: item[1][0]))


def means(group: Iterable[Point]) -> dict[str, float]:
    """Return each method's loss."""
    return {p.method: p.loss for p in group}


def resampled(group: Sequence[Point], source: random.Random) -> dict[str, float]:
    """Return each method's mean over seeds drawn with replacement, its deviation enlarged."""
    seeds = sorted({seed for p in group for seed in p.losses})
    drawn = source.choices(seeds, k=len(seeds))
    found = means(group)
    for p in group:
        some, n = [p.losses[seed] for seed in drawn if seed in p.losses], len(p.losses)
        if n > 1 and some and math.isfinite(p.loss):  # a method that diverged once is last
            found[p.method] += math.sqrt(n / (n - 1)) * (statistics.fmean(some) - p.loss)
    return found
