"""The thesis's whole protocol, small: 60 random draws of each method, several models and workers.

    python benchmarks/papers/thesis.py --only hidden=48 workers=1      # the medium model alone
    python benchmarks/papers/thesis.py                                 # and five other cells

Cost, from ten runs on one core of a busy machine: with 48 units and one worker 4.7 to 5.7 CPU
seconds an epoch, tests included, so 840 runs take 12 CPU hours at most; runs that stop early, less.
Seven draws of each repetition are 294 runs: 4 hours, and for the other five cells 4 (24 units, also
with W = 2, which was not measured), 6 (96 units), 5 (W = 2) and 7 (W = 4). That is 38 hours in all;
60 draws in all six cells, as in the thesis, would be 87. Draws are run one after the other, each
for all methods, and the page compares those that all methods have: interrupt it when there are
enough.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import frame
import tasks
from frame import Cell, Claim, Experiment, Row, spread, table, values, verdict, where
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from optuna.trial import FixedTrial
from pytorch_lightning import Callback
from shared import hush
from tune_language_model import LanguageModel, Text

from lightning_gc import tuning
from lightning_gc.methods import plot_style, yaml_config
from lightning_gc.tuning.early_stopping import EarlyStopping
from lightning_gc.tuning.trial import fit

CONFIG = tasks.ROOT / "configs" / "thesis.yaml"  # whose methods and ranges these are
SECTIONS = yaml_config.read(CONFIG)
METHODS = yaml_config.methods_in(SECTIONS)
RANGES = {**SECTIONS["tune"]["space"], "memory.momentum": {"low": 0.1, "high": 0.9}}
# Units and workers -> draws of each repetition. The thesis has as many in all six.
DRAWS = {(48, 1): 20, (48, 2): 7, (48, 4): 7, (24, 1): 7, (24, 2): 7, (96, 1): 7}
ABOUT = """
Thesis, Figures 5.2 to 5.10 and B.1 to B.6: orderings, not values; its 13 methods, and Random-k
without feedback. Its LSTM with 48 units (medium),
24 (small) and 96 (large) on Python's documentation, 20 columns that the workers share, 99 steps an
epoch; methods, norms and ranges of `configs/thesis.yaml`: rate drawn from 1 to 50, constant in a
run, dropout from 0 to 0.8, DGC's momentum from 0.1 to 0.9, every tensor compressed, clipped at 0.25
after averaging; at most 10 epochs, a run stops after 2 without an improvement (thesis: 50 and 10).

The thesis draws 60 settings once. Here a seed is a repetition of the search with weights and draws
of its own, the same for all methods: 20 draws for the medium model and one worker (60 in sum), 7
for the others. Of each repetition the draw with the best validation perplexity is tested once, at
its best epoch; the thesis chose on the test text. Where cells are compared, all have the draws that
the smallest one has.
"""


class TrainLoss(Callback):
    """Keeps the mean training loss of every epoch."""

    def __init__(self) -> None:
        self.epochs: list[float] = []
        self._sum, self._count = 0.0, 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        """Add one worker's loss, which Lightning has divided by the accumulated batches."""
        self._sum += float(outputs["loss"]) * trainer.accumulate_grad_batches
        self._count += 1

    def on_train_epoch_end(self, *_: Any) -> None:
        """Close the epoch."""
        self.epochs.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0


def cells(seeds: int) -> list[Cell]:
    """Return all draws of all methods, so that those that are done are of all methods."""
    shared = {"epochs": 10, "patience": 2, "columns": 20}
    return [
        {"method": method, "draw": draw, "hidden": hidden, "workers": workers, **shared}
        | {"seed": seed}
        for (hidden, workers), draws in DRAWS.items()
        for draw in range(draws)
        for seed in range(seeds)
        for method in METHODS
    ]


def drawn(cell: Cell) -> dict[str, float]:
    """Return a draw's settings: uniform, and the same for all methods, models and workers."""
    source = random.Random(f"{cell['seed']} {cell['draw']}")
    return {name: source.uniform(ends["low"], ends["high"]) for name, ends in RANGES.items()}


def train(cell: Cell, data: Path | None) -> Row:
    """Run one cell, as ``lightning-gc tune`` runs a trial."""
    hush()
    method, settings, losses = METHODS[cell["method"]], drawn(cell), TrainLoss()
    rate, dropout = settings["model.learning_rate"], settings["model.dropout"]

    def build(trial: Any) -> tuple[Any, ...]:
        model = LanguageModel(cell["hidden"], rate, dropout)
        return model, Text(data, cell["columns"]), {"callbacks": [losses]}

    rules = tuning.Experiment(
        "thesis",
        build,
        metric="validation_perplexity",
        test_metric="test_perplexity",
        patience=cell["patience"],
        workers=cell["workers"],
        trainer={
            "accelerator": "cpu",
            "max_epochs": cell["epochs"],
            "gradient_clip_val": tasks.CLIP,
            "num_sanity_val_steps": 0,
        },
    )
    stopping = EarlyStopping(rules, method)
    test = fit(rules, method, FixedTrial(settings), stopping.update, cell["seed"], final=True)
    record = stopping.record()
    return {
        "validation": min(filter(math.isfinite, stopping.curve), default=math.inf),
        "test": test,
        "rate": rate,
        "dropout": dropout,
        "momentum": settings["memory.momentum"] if method.tuned_memory else None,
        "best_epoch": record["best_epoch"] + 1,
        "epochs_run": record["epochs"],
        "course": [value if math.isfinite(value) else None for value in stopping.curve],
        "train_course": [value if math.isfinite(value) else None for value in losses.epochs],
        "encoding_ratio": record["encoding_ratio"],
        "cpu_seconds": sum(stopping.cpu_seconds) / len(stopping.cpu_seconds),
    }


Place = tuple[int, int]  # units, and workers
DENSE, NO_FEEDBACK = "dense", "randomk_50x_no_feedback"
MEDIUM, SMALL, LARGE = (48, 1), (24, 1), (96, 1)
FAMILIES = {
    "Top-k": ("topk_50x", "topk_500x", "topk_5000x"),
    "DGC": ("dgc_50x", "dgc_500x", "dgc_5000x"),
    "QSGD": ("qsgd_7_bits", "qsgd_5_bits", "qsgd_3_bits"),
    "Random-k": ("randomk_50x", "randomk_500x", "randomk_5000x"),
}
COLOURS = dict(zip(FAMILIES, plot_style.SERIES, strict=False))
SPARSE = ("Top-k", "DGC")


def complete(rows: list[Row]) -> list[Row]:
    """Return the rows of draws that all methods have."""
    methods = {row["method"] for row in rows}
    key = ("hidden", "workers", "seed", "draw")
    has: dict[tuple[int, ...], set[str]] = {}
    for row in rows:
        has.setdefault(tuple(row[name] for name in key), set()).add(row["method"])
    return [row for row in rows if has[tuple(row[name] for name in key)] == methods]


def places(rows: list[Row]) -> list[Place]:
    """Return units and workers of which there are rows."""
    return list(dict.fromkeys((row["hidden"], row["workers"]) for row in rows))


def alike(rows: list[Row], among: Iterable[Place]) -> list[Row]:
    """Return the rows of these places with the draws that all of them have."""
    drawn = [
        {(r["seed"], r["draw"]) for r in rows if (r["hidden"], r["workers"]) == each}
        for each in among
    ]
    shared = set.intersection(*drawn) if drawn else set()
    return [row for row in rows if (row["seed"], row["draw"]) in shared]


def searches(rows: list[Row], method: str, place: Place) -> list[list[Row]]:
    """Return a method's draws of every repetition, the best validation first."""
    runs = where(rows, method=method, hidden=place[0], workers=place[1])
    return [
        sorted(group, key=lambda row: values([row], "validation")[0])
        for _, group in itertools.groupby(runs, key=lambda row: int(row["seed"]))
    ]


def winners(rows: list[Row], method: str, place: Place, figure: str = "test") -> list[float]:
    """Return a figure of every repetition's winner."""
    return [values(runs, figure)[0] for runs in searches(rows, method, place)]


def top(rows: list[Row], method: str, place: Place, figure: str) -> list[float]:
    """Return a figure's mean over the best of every repetition: 8 in 60, as in the thesis."""
    return [statistics.fmean(values(_best(runs), figure)) for runs in searches(rows, method, place)]


def excess(rows: list[Row], method: str, place: Place) -> list[float]:
    """Return log(test perplexity / dense's) of every repetition."""
    pairs = zip(winners(rows, method, place), winners(rows, DENSE, place), strict=True)
    return [math.log(own / dense) for own, dense in pairs]


def ready(rows: list[Row]) -> bool:
    """Return whether all methods have been run with the medium model and one worker."""
    wanted = {DENSE, NO_FEEDBACK, *(method for family in FAMILIES.values() for method in family)}
    return wanted <= {r["method"] for r in where(rows, hidden=MEDIUM[0], workers=MEDIUM[1])}


def percent(logs: list[float]) -> str:
    """Return logs of ratios as percentages above."""
    return spread([math.expm1(log) for log in logs], "+.1f", 100)


def page(rows: list[Row]) -> str:
    """Return the tables."""
    rows = complete(rows)
    some = places(rows)
    counts = [len(where(rows, method=DENSE, hidden=h, workers=w)) for h, w in some]
    text = (
        "## Test perplexity, all cells (Figures 5.2 to 5.4, B.1 to B.3)\n\nDraws of each method: "
    )
    text += ", ".join(f"{h} units, W = {w}: {n}" for (h, w), n in zip(some, counts, strict=True))
    text += ". Compared are the draws that all cells have. Of dense the perplexity, of the others "
    text += "how far it is above dense's, in percent.\n\n"
    shared = alike(rows, some)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = [[DENSE, *(spread(winners(shared, DENSE, place), ".1f") for place in some)]]
    for method in methods:
        if method != DENSE:
            lines.append([method, *(percent(excess(shared, method, place)) for place in some)])
    text += table(["", *(f"{h} units, W = {w}" for h, w in some)], lines)
    for place in some:
        text += f"\n## {place[0]} units, {place[1]} workers\n\n"
        text += "Of the winners: perplexities and ratio. Of the best 8 in 60, and two of a search "
        text += "at least: the rest.\n\n"
        head = ["", "test", "validation", "encoding ratio", "CPU s per epoch"]
        head += ["best epoch", "rate", "dropout", "momentum"]
        lines = []
        for method in methods:
            line = [spread(winners(rows, method, place, n), ".1f") for n in ("test", "validation")]
            ratio = next(iter(searches(rows, method, place)))[0]["encoding_ratio"]
            line.append(f"{ratio:,.1f}" if ratio else "1.0")
            shown = {"cpu_seconds": ".2f", "best_epoch": ".1f", "rate": ".1f", "dropout": ".2f"}
            line += [spread(top(rows, method, place, n), how) for n, how in shown.items()]
            momentum = where(rows, method=method)[0]["momentum"] is not None
            line.append(spread(top(rows, method, place, "momentum"), ".2f") if momentum else "–")
            lines.append([method, *line])
        text += table(head, lines)
    return text


def claims(rows: list[Row]) -> list[Claim]:
    """Hold the thesis's orderings against ours."""
    rows = complete(rows)
    if not ready(rows):
        return []
    return [*_quality(rows), *_settings(rows), *_sizes(rows), *_workers(rows)]


def _quality(rows: list[Row]) -> list[Claim]:
    """The medium model with one worker: Figures 5.1 to 5.3 and 5.7."""
    methods = [NO_FEEDBACK, *(method for family in FAMILIES.values() for method in family)]
    above = {method: excess(rows, method, MEDIUM) for method in methods}
    even = [0.0] * len(above["topk_50x"])
    found = []
    for name, gain, loss in (("Top-k", "−2.8 %", "+17 %"), ("DGC", "−4.0 %", "+35 %")):
        mild, middle, harsh = FAMILIES[name]
        text = f"5.2: {name} at 50x is better than dense"
        found.append(Claim(text, gain, f"{percent(above[mild])} %", verdict(above[mild], even)))
        text = f"5.2: {name} at 500x is at most 4 % above dense"
        ours, most = f"{percent(above[middle])} %", [math.log(1.04)] * len(even)
        found.append(Claim(text, "−2 to +4 %", ours, verdict(above[middle], most)))
        text = f"5.2: {name} at 5000x is worse than dense"
        found.append(Claim(text, loss, f"{percent(above[harsh])} %", verdict(even, above[harsh])))
    for text, low, high in (
        ("5.3: DGC is better than Top-k at 50x", "dgc_50x", "topk_50x"),
        ("5.3: Top-k is better than DGC at 5000x", "topk_5000x", "dgc_5000x"),
        ("Random-k is worse than Top-k, 50x", "topk_50x", "randomk_50x"),
        ("5.1: ... more so without error feedback", "randomk_50x", NO_FEEDBACK),
    ):
        said = f"{percent(above[low])} against {percent(above[high])} % above dense"
        found.append(Claim(text, "", said, verdict(above[low], above[high])))
    for method in FAMILIES["QSGD"]:
        inside = [math.log(0.988) < x < math.log(1.033) for x in above[method]]
        said = "agrees (all)" if all(inside) else "cannot be told" if any(inside) else "disagrees"
        said = said if len(inside) > 1 else "cannot be told"
        text = f"5.2: {method} is in line with dense: within what theirs differ by"
        found.append(Claim(text, "−1.2 to +3.3 %", f"{percent(above[method])} %", said))
    for method in (FAMILIES[name][0] for name in SPARSE):
        own, dense = (early(rows, each) for each in (method, DENSE))
        ours = f"{spread(own, '.3f')} against {spread(dense, '.3f')}"
        text = f"5.7: {method} trains faster than dense at first: train loss of the second epoch"
        found.append(Claim(text, "by eye", ours, verdict(own, dense)))
    return found


def early(rows: list[Row], method: str) -> list[float]:
    """Return the winners' training loss in the second epoch, a fifth of the run."""
    courses = [runs[0]["train_course"] for runs in searches(rows, method, MEDIUM)]
    return [math.inf if len(course) < 2 or course[1] is None else course[1] for course in courses]


def _settings(rows: list[Row]) -> list[Claim]:
    """Where the best draws lie: Figures 5.8 to 5.10."""
    found = []
    for name in (*SPARSE, "QSGD"):
        mild, _, harsh = FAMILIES[name]
        a, b = (top(rows, method, MEDIUM, "best_epoch") for method in (mild, harsh))
        ours = f"epoch {spread(a, '.1f')} at {mild}, {spread(b, '.1f')} at {harsh}"
        text = f"5.8: {name} is best later at the highest ratio than at the lowest"
        found.append(Claim(text, "44 to 47 of 50", ours, verdict(a, b)))
    high = mean([top(rows, m, MEDIUM, "rate") for m in (DENSE, *FAMILIES["QSGD"])])
    for name in SPARSE:
        low = mean([top(rows, method, MEDIUM, "rate") for method in FAMILIES[name]])
        ours = f"{spread(low, '.1f')} against {spread(high, '.1f')}"
        text = f"5.9: {name} has lower rates than dense and QSGD"
        theirs = {"Top-k": "22 against 31", "DGC": "21 against 31"}[name]
        found.append(Claim(text, theirs, ours, verdict(low, high)))
        mild, _, harsh = FAMILIES[name]
        a, b = (top(rows, method, MEDIUM, "dropout") for method in (mild, harsh))
        theirs = {"Top-k": "0.31, 0.29", "DGC": "0.39, 0.14"}[name]
        ours = f"{spread(a)}, {spread(b)}"
        text = f"5.10: {name}'s dropout is lower at 5000x than at 50x"
        found.append(Claim(text, theirs, ours, verdict(b, a)))
    return found


def _sizes(rows: list[Row]) -> list[Claim]:
    """Small against large, one worker: Figure 5.4."""
    if not {SMALL, LARGE} <= set(places(rows)):
        return []
    rows = alike(rows, (SMALL, LARGE))
    found = []
    for name, theirs in (("Top-k", "+46 against +14 %"), ("DGC", "+43 against +17 %")):
        small, large = (excess(rows, FAMILIES[name][2], place) for place in (SMALL, LARGE))
        ours = f"{percent(small)} against {percent(large)} %"
        text = f"5.4: {name} at 5000x costs the large model less than the small one"
        found.append(Claim(text, theirs, ours, verdict(large, small)))
    return found


def _workers(rows: list[Row]) -> list[Claim]:
    """One worker against four, the medium model: Figure 5.2."""
    four = (MEDIUM[0], 4)
    if four not in places(rows):
        return []
    rows = alike(rows, (MEDIUM, four))
    found = []
    for method in (DENSE, *FAMILIES["Top-k"], *FAMILIES["DGC"], *FAMILIES["QSGD"]):
        pairs = zip(winners(rows, method, four), winners(rows, method, MEDIUM), strict=True)
        change = [math.log(b / a) for b, a in pairs]
        said = verdict([0.0] * len(change), change)
        if len(change) > 1:
            said = "agrees: none found" if said == "cannot be told" else "disagrees"
        text = f"5.2: no trend over workers, {method}"
        found.append(Claim(text, "no strong trend", f"{percent(change)} % with four", said))
    return found


def mean(lists: list[list[float]]) -> list[float]:
    """Return the mean over methods, repetition by repetition."""
    return [statistics.fmean(column) for column in zip(*lists, strict=True)]


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw the thesis's figures, the medium model where it does not say otherwise."""
    rows = complete(rows)
    if not ready(rows):
        return
    figure.set_size_inches(plot_style.WIDTH, 20)
    ratios, sizes, curves, stops, rates, dropouts = figure.subplots(6, 1)
    some = places(rows)
    _ratios(ratios, rows, [place for place in some if place[0] == MEDIUM[0]])
    _ratios(sizes, rows, [place for place in some if place[1] == 1])
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for method in (DENSE, *(m for name in (*SPARSE, "QSGD") for m in FAMILIES[name])):
        courses = [runs[0]["train_course"] for runs in searches(rows, method, MEDIUM)]
        line = [statistics.fmean(x) for x in zip(*courses, strict=False) if None not in x]
        style = dict(zip((*_family(method), DENSE), ("-", "--", ":", "-"), strict=False))[method]
        curves.plot(range(1, len(line) + 1), line, style, color=_colour(method), lw=1, label=method)
    curves.set(xlabel="epoch", ylabel="training loss of the winners")
    plot_style.legend(curves)
    boxes = {"best_epoch": stops, "rate": rates, "dropout": dropouts}
    for name, ax in boxes.items():
        best = [
            [
                value
                for runs in searches(rows, method, MEDIUM)
                for value in values(_best(runs), name)
            ]
            for method in methods
        ]
        ax.boxplot(best, orientation="horizontal")
        ax.set_yticks(range(1, len(methods) + 1), methods)
        ax.set(xlabel=f"{name.replace('_', ' ')}, best 8 in 60")


def _ratios(ax: Axes, rows: list[Row], among: list[Place]) -> None:
    rows = alike(rows, among)
    for place, mark in zip(among, "osd", strict=False):
        for name, methods in FAMILIES.items():
            points = [
                (searches(rows, m, place)[0][0]["encoding_ratio"], percent_mean(rows, m, place))
                for m in methods
            ]
            ax.plot(*zip(*points, strict=True), f"{mark}-", ms=4, lw=0.8, color=COLOURS[name])
        label = f"{place[0]} units, W = {place[1]}"
        ax.plot([], [], mark, color=plot_style.INK, label=label)
    for name, colour in COLOURS.items():
        ax.plot([], [], color=colour, label=name)
    plot_style.legend(ax)
    ax.axhline(0, color=plot_style.MUTED, lw=0.8)
    plot_style.plain_log(ax.xaxis)
    ax.set(xlabel="encoding ratio", ylabel="test perplexity above dense's, %")


def percent_mean(rows: list[Row], method: str, place: Place) -> float:
    """Return the mean percentage above dense, of what is finite."""
    shares = [100 * math.expm1(log) for log in excess(rows, method, place) if math.isfinite(log)]
    return statistics.fmean(shares) if shares else math.nan


def _best(runs: list[Row]) -> list[Row]:
    return runs[: max(2, round(len(runs) * 8 / 60))]


def _family(method: str) -> tuple[str, ...]:
    return next((methods for methods in FAMILIES.values() if method in methods), ())


def _colour(method: str) -> str:
    return next((COLOURS[name] for name, ms in FAMILIES.items() if method in ms), plot_style.INK)


if __name__ == "__main__":
    sys.exit(frame.main(Experiment("thesis", ABOUT, cells, train, page, claims, draw)))
