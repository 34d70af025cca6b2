"""Experiments on the papers' claims: what they consist of, their command line, page and plot.

A cell is one run: a dict of plain settings, its seed among them. Its row goes to a JSONL file as
soon as it is there, so an interruption costs what is under way. A run that diverged or failed is a
row too.

    python benchmarks/papers/heterogeneity.py --data libsvm/               # what is missing
    python benchmarks/papers/heterogeneity.py --since 2026-11-29           # again what is older
    python benchmarks/papers/heterogeneity.py --page                       # page and plot only
    python benchmarks/papers/heterogeneity.py --plot                       # the plot only
    python benchmarks/papers/thesis.py --jobs 8                            # eight runs at a time
    python benchmarks/papers/thesis.py --only hidden=48 hidden=24 workers=1    # some of the cells
    python benchmarks/papers/heterogeneity.py --set epochs=1 --seeds 1 --out runs/try    # quickly
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import cell_runs
from cell_runs import Before, Train, read
from cell_runs import Cell as Cell  # experiments take these from here
from cell_runs import Row as Row
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats  # type: ignore[import-untyped]

from lightning_gc.methods import plot_style

RESULTS = Path(__file__).parents[1] / "results" / "papers"
IMAGES = Path(__file__).parents[2] / "docs" / "images"


class Claim(NamedTuple):
    """One line of a paper, and what was found.

    Attributes:
        text: what the paper says.
        theirs: its figure; empty where it has none.
        ours: figures of this experiment.
        verdict: agrees, disagrees, or cannot be told.
    """

    text: str
    theirs: str
    ours: str
    verdict: str


@dataclass(frozen=True)
class Experiment:
    """What is run, and what is made of it.

    Attributes:
        name: of the files.
        about: the page's first paragraph.
        cells: returns all cells for a number of seeds.
        train: runs one cell; gets the folder or file of data, returns figures.
        page: returns the page's tables.
        claims: returns what is held against the papers.
        draw: draws the plot.
        seeds: how many, unless the command line says so.
        data: what ``--data`` must be; empty: there is none.
        free: tasks that need none.
        before: returns the cells that a cell's settings depend on. They are run first, those that
            have no row; the cell is given to ``train`` with their rows as ``cell["before"]``.
        after: writes what there is besides page and plot; gets rows, and the files' common stem.
    """

    name: str
    about: str
    cells: Callable[[int], list[Cell]]
    train: Train
    page: Callable[[list[Row]], str]
    claims: Callable[[list[Row]], list[Claim]]
    draw: Callable[[list[Row], Figure], None]
    seeds: int = 3
    data: str = ""
    free: frozenset[str] = frozenset({"digits"})
    before: Before = lambda cell: ()
    after: Callable[[list[Row], Path], None] = lambda rows, stem: None


def write(experiment: Experiment, cells: Sequence[Cell], out: Path) -> str:
    """Write page and plot of the rows that there are; return the page."""
    rows = read(out / f"{experiment.name}.jsonl", cells)
    failed = [row for row in rows if "failed" in row]
    good = [row for row in rows if "failed" not in row]
    stem = out / f"{experiment.name}_{datetime.date.today():%Y%m%d}"
    torches = cell_runs.versions(out / f"{experiment.name}.jsonl", cells) or [version("torch")]
    versions = f"lightning-gc {version('lightning-gc')}, torch {' and '.join(torches)}"
    cpu = sum(row["cpu"] for row in rows)
    given = " --data DATA" if experiment.data else ""
    text = f"# {experiment.name.replace('_', ' ').capitalize()}, {datetime.date.today()}\n\n"
    text += f"`python benchmarks/papers/{Path(sys.argv[0]).name}{given}`, {versions}, one thread.\n"
    text += f"{len(good)} of {len(cells)} runs, {cpu / 60:.0f} CPU minutes.\n\n"
    text += f"{experiment.about.strip()}\n\n"
    claims = experiment.claims(good) if good else []
    if claims:
        text += table(["the papers", "their figure", "ours", "verdict"], claims) + "\n"
        text += (
            "*Agrees* and *disagrees*: the 95 % interval of the difference, paired by seed, lies "
        )
        text += (
            "on one side of zero (Student's t), unless the line says otherwise. That is for each "
        )
        text += "line by itself: of twenty without an effect, one would say so.\n\n"
    text += experiment.page(good) if good else ""
    text += f"\n![{experiment.name}]({stem.name}.svg)\n"
    text += "".join(f"\n- Failed: {row}" for row in failed)
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".md").write_text(text)
    plot(experiment, good, stem)
    experiment.after(good, stem)
    return text


def plot(experiment: Experiment, rows: list[Row], stem: Path) -> None:
    """Write the page's plot, and the documentation's copy where it shows the plot."""

    def draw(figure: Figure) -> None:
        if rows:
            experiment.draw(rows, figure)

    image = plot_style.svg(draw, experiment.name)
    stem.with_suffix(".svg").write_bytes(image)
    copy = IMAGES / f"{experiment.name}.svg"
    if stem.parent == RESULTS and copy.exists():
        copy.write_bytes(image)


def main(experiment: Experiment) -> int:
    """Run, write, print; return 1 if a cell failed."""
    parser = argparse.ArgumentParser(description=experiment.about)
    add = parser.add_argument
    add("--data", type=Path, default=os.environ.get("PAPERS_DATA"), help=experiment.data)
    add("--seeds", type=int, default=experiment.seeds, help="(default: %(default)s)")
    add("--set", nargs="+", default=[], metavar="NAME=VALUE", help="of all cells with it")
    add("--only", nargs="+", default=[], metavar="NAME=VALUE", help="cells to run; any of several")
    add("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    add("--since", default="", metavar="DATE", help="run cells again whose rows are older")
    add("--page", action="store_true", help="run nothing")
    add("--plot", action="store_true", help="run nothing, and draw the newest page's plot again")
    add("--out", type=Path, default=RESULTS, help="folder of the JSONL, the page and the plot")
    options = parser.parse_args()
    changes = {name: given[-1] for name, given in _pairs(options.set).items()}
    only = _pairs(options.only)
    cells = experiment.cells(options.seeds)
    known = {name: None for cell in cells for name in cell}  # in order
    if unknown := (changes.keys() | only.keys()) - known.keys():
        parser.error(f"{', '.join(sorted(unknown))}: cells have {', '.join(known)}.")
    cells = [cell | {n: v for n, v in changes.items() if n in cell} for cell in cells]
    if options.plot:
        good = [
            r for r in read(options.out / f"{experiment.name}.jsonl", cells) if "failed" not in r
        ]
        stem = max(options.out.glob(f"{experiment.name}_2*.md")).with_suffix("")
        plot(experiment, good, stem)
        experiment.after(good, stem)
        return 0
    chosen = [] if options.page else [cell for cell in cells if _is_among(cell, only)]
    needs = [cell for cell in chosen if experiment.data and cell.get("task") not in experiment.free]
    if needs and options.data is None:
        parser.error(f"--data: {experiment.data} (or the environment variable PAPERS_DATA).")
    if options.jobs < 1:
        parser.error("--jobs must be at least 1.")
    if chosen:
        path = options.out / f"{experiment.name}.jsonl"
        data = options.data and Path(options.data)
        cell_runs.run(
            experiment.train, experiment.before, chosen, path, data, options.jobs, options.since
        )
    sys.stdout.write(write(experiment, cells, options.out))
    return int(any("failed" in r for r in read(options.out / f"{experiment.name}.jsonl", cells)))


def where(rows: Iterable[Row], **settings: Any) -> list[Row]:
    """Return the rows of these settings, in the order of their seeds."""
    found = [row for row in rows if settings.items() <= row.items()]
    return sorted(found, key=lambda row: int(row["seed"]))


def values(rows: Iterable[Row], figure: str) -> list[float]:
    """Return a figure of all rows; infinite where a run diverged."""
    return [math.inf if row[figure] is None else float(row[figure]) for row in rows]


def spread(numbers: Sequence[float], how: str = ".2f", times: float = 1.0) -> str:
    """Return mean ± standard deviation of those that are finite, and how many are not."""
    finite = [number * times for number in numbers if math.isfinite(number)]
    lost = len(numbers) - len(finite)
    if not finite:
        return f"diverged ({lost})" if lost else "–"
    text = f"{statistics.mean(finite):{how}}"
    text += f" ± {statistics.stdev(finite):{how.lstrip('+')}}" if len(finite) > 1 else ""
    return f"{text} ({lost} diverged)" if lost else text


def verdict(lower: Sequence[float], higher: Sequence[float]) -> str:
    """Say whether the first is lower than the second, as claimed, in pairs of one seed each."""
    apart = [b - a for a, b in zip(lower, higher, strict=True)]
    if any(map(math.isnan, apart)) or len(apart) < 2:
        return "cannot be told"
    if not all(map(math.isfinite, apart)):
        return "agrees" if min(apart) > 0 else "disagrees" if max(apart) < 0 else "cannot be told"
    low, high = interval(apart)
    return "agrees" if low > 0 else "disagrees" if high < 0 else "cannot be told"


def interval(apart: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of two or more differences (Student's t)."""
    mean, error = statistics.mean(apart), statistics.stdev(apart) / math.sqrt(len(apart))
    reach = float(stats.t.ppf(0.975, len(apart) - 1)) * error
    return mean - reach, mean + reach


def table(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table; numbers stand to the right."""
    rows = [[str(cell) for cell in line] for line in lines]
    right = [all(row[i][:1] in "0123456789−-+–d" for row in rows) for i in range(len(head))]
    marks = ["---:" if to_right else "---" for to_right in right]
    return "".join(f"| {' | '.join(line)} |\n" for line in (list(head), marks, *rows))


def _is_among(cell: Cell, only: dict[str, list[Any]]) -> bool:
    return all(name in cell and cell[name] in given for name, given in only.items())


def _pairs(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return name -> the values given for it, in their order."""
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found.setdefault(name, []).append(json.loads(value))
        except ValueError:
            found.setdefault(name, []).append(value)
    return found


def label_points(axes: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """Write names beside points, each at the nearest place without a name, a point or an edge.

    A name that fits nowhere near its point is left out.

    Args:
        axes: their limits are final.
        points: x, y and the name of each; points without a name are kept free.
    """
    figure: Any = axes.figure
    figure.draw_without_rendering()  # places the panels
    scale, frame = 72 / figure.dpi, axes.get_window_extent()
    left, low, right, top = (scale * edge for edge in frame.extents)
    at = [scale * axes.transData.transform((x, y)) for x, y, _ in points]
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in at]  # left, bottom, right, top
    # Rightwards and leftwards of the point, nearest first.
    places = [(side, dy) for away in range(0, 90, 2) for dy in (away, -away) for side in (1, -1)]
    for (x, y, name), (px, py) in zip(points, at, strict=True):
        if not name:
            continue
        text = axes.annotate(name, (x, y))
        size = text.get_window_extent()
        width, height = scale * size.width, scale * size.height - 2
        text.remove()
        for side, dy in places:
            gap = side * (5 + abs(dy) / 6)
            x0, y0 = px + gap - (width if side < 0 else 0), py + dy - height / 2
            box = (x0, y0, x0 + width, y0 + height)
            inside = left < box[0] and low < box[1] and box[2] < right and box[3] < top
            if inside and not any(
                box[0] < c and a < box[2] and box[1] < d and b < box[3] for a, b, c, d in taken
            ):
                break
        else:
            continue
        taken.append(box)
        line = {"arrowstyle": "-", "color": plot_style.MUTED, "lw": 0.5, "shrinkA": 0, "shrinkB": 3}
        line["relpos"] = (0 if side > 0 else 1, 0.5)
        axes.annotate(
            name,
            (x, y),
            (gap, dy),
            textcoords="offset points",
            va="center",
            ha="left" if side > 0 else "right",
            arrowprops=line if abs(dy) > height / 2 else None,
        )
