"""Run the cells of an experiment that its file of results lacks; make a page and a plot of all.

A cell is one run: a dict of plain settings, its seed among them. Its row goes to a JSONL file as
soon as it is there, so an interruption costs one cell. A run that diverged or failed is a row too.

    python benchmarks/papers/heterogeneity.py --data libsvm/               # what is missing
    python benchmarks/papers/heterogeneity.py --page                       # page and plot only
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
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

mpl.use("Agg")
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn
from scipy import stats  # type: ignore[import-untyped]

Cell = dict[str, Any]
Row = dict[str, Any]  # a cell and its figures; a figure that is no number is None
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377", "#66ccee", "#bbbbbb", "#000000")
RESULTS = Path(__file__).parents[1] / "results" / "papers"


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
        before: returns the cells that a cell's settings depend on. They are run first, those that
            have no row; the cell is given to ``train`` with their rows as ``cell["before"]``.
    """

    name: str
    about: str
    cells: Callable[[int], list[Cell]]
    train: Callable[[Cell, Path | None], Row]
    page: Callable[[list[Row]], str]
    claims: Callable[[list[Row]], list[Claim]]
    draw: Callable[[list[Row], Figure], None]
    seeds: int = 3
    data: str = ""
    before: Callable[[Cell], Sequence[Cell]] = lambda cell: ()


def read(path: Path, cells: Sequence[Cell]) -> list[Row]:
    """Return the rows of these cells, in their order; of a cell that was run twice, the last."""
    lines = path.read_text().splitlines() if path.is_file() else []
    found = {_key(row["cell"]): row for row in map(json.loads, lines)}
    rows = [found[_key(cell)] for cell in cells if _key(cell) in found]
    return [{**row["cell"], **row["figures"], "cpu": row["cpu"]} for row in rows]


def run(experiment: Experiment, cells: Sequence[Cell], path: Path, data: Path | None) -> None:
    """Run the cells that have no row, or a failed one, one after the other."""
    cells = in_order(experiment, cells)
    done = [row for row in read(path, cells) if "failed" not in row]
    kept = {_key({name: row[name] for name in cell}) for cell in cells[:1] for row in done}
    todo = [cell for cell in cells if _key(cell) not in kept]
    path.parent.mkdir(parents=True, exist_ok=True)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    bar = (*Progress.get_default_columns()[:-1], TimeRemainingColumn(elapsed_when_finished=True))
    with Progress(*bar, console=console) as progress, path.open("a") as file:
        began = time.monotonic()
        task = progress.add_task(experiment.name, total=len(todo))
        for index, cell in enumerate(todo, start=1):
            started = time.process_time()
            try:
                figures = experiment.train(cell | _found(experiment, cell, path), data)
            except Exception as error:  # one cell's failure does not take the others away
                figures = {"failed": f"{type(error).__name__}: {error}"}
            cpu = round(time.process_time() - started, 2)
            row = {"cell": cell, "figures": _plain(figures), "cpu": cpu}
            file.write(json.dumps(row) + "\n")
            file.flush()
            left = (time.monotonic() - began) / index * (len(todo) - index)
            shown = ", ".join(f"{name} {_short(value)}" for name, value in cell.items())
            what = figures.get("failed") or _short(next(iter(figures.values())))
            console.print(
                f"{index}/{len(todo)}  {shown}: {what}, {cpu:.0f} s, {left / 60:.0f} min left"
            )
            progress.advance(task)


def in_order(experiment: Experiment, cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells, each after those that it depends on."""
    groups = [(*experiment.before(cell), cell) for cell in cells]
    return list({_key(cell): cell for group in groups for cell in group}.values())


def write(experiment: Experiment, cells: Sequence[Cell], out: Path) -> str:
    """Write page and plot of the rows that there are; return the page."""
    rows = read(out / f"{experiment.name}.jsonl", cells)
    failed = [row for row in rows if "failed" in row]
    good = [row for row in rows if "failed" not in row]
    stem = out / f"{experiment.name}_{datetime.date.today():%Y%m%d}"
    versions = ", ".join(f"{part} {version(part)}" for part in ("lightning-gc", "torch"))
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
    with mpl.rc_context({"svg.hashsalt": experiment.name, "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        if good:
            experiment.draw(good, figure)
        figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None})
    return text


def main(experiment: Experiment) -> int:
    """Run, write, print; return 1 if a cell failed."""
    parser = argparse.ArgumentParser(description=experiment.about)
    add = parser.add_argument
    add("--data", type=Path, default=os.environ.get("PAPERS_DATA"), help=experiment.data)
    add("--seeds", type=int, default=experiment.seeds, help="(default: %(default)s)")
    add("--set", nargs="+", default=[], metavar="NAME=VALUE", help="of all cells")
    add("--only", nargs="+", default=[], metavar="NAME=VALUE", help="cells to run")
    add("--page", action="store_true", help="run nothing")
    add("--out", type=Path, default=RESULTS, help="folder of the JSONL, the page and the plot")
    options = parser.parse_args()
    changes, only = _pairs(options.set), _pairs(options.only)
    cells = experiment.cells(options.seeds)
    if unknown := (changes.keys() | only.keys()) - cells[0].keys():
        parser.error(f"{', '.join(sorted(unknown))}: cells have {', '.join(cells[0])}.")
    cells = [cell | changes for cell in cells]
    chosen = [cell for cell in cells if only.items() <= cell.items() and not options.page]
    needs = [cell for cell in chosen if experiment.data and cell.get("task") != "digits"]
    if needs and options.data is None:
        parser.error(f"--data: {experiment.data} (or the environment variable PAPERS_DATA).")
    if chosen:
        path = options.out / f"{experiment.name}.jsonl"
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)  # saturated activations have gradients that take long
        try:
            run(experiment, chosen, path, options.data and Path(options.data))
        finally:
            torch.set_flush_denormal(False)
            torch.set_num_threads(threads)
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
    mean, error = statistics.mean(apart), statistics.stdev(apart) / math.sqrt(len(apart))
    reach = float(stats.t.ppf(0.975, len(apart) - 1)) * error
    return "agrees" if mean > reach else "disagrees" if mean < -reach else "cannot be told"


def table(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table; numbers stand to the right."""
    rows = [[str(cell) for cell in line] for line in lines]
    right = [all(row[i][:1] in "0123456789−-+–d" for row in rows) for i in range(len(head))]
    marks = ["---:" if to_right else "---" for to_right in right]
    return "".join(f"| {' | '.join(line)} |\n" for line in (list(head), marks, *rows))


def _key(cell: Cell) -> str:
    return json.dumps(cell, sort_keys=True)


def _found(experiment: Experiment, cell: Cell, path: Path) -> Cell:
    """Return the rows that a cell depends on, named as ``train`` reads them."""
    first = experiment.before(cell)
    rows = read(path, first)  # run by now
    for other, row in zip(first, rows, strict=True):
        if "failed" in row:
            raise ValueError(f"{_key(other)}, on which this cell depends, failed; run it again.")
    return {"before": rows} if rows else {}


def _plain(figures: Row) -> Row:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }


def _pairs(texts: Sequence[str]) -> Cell:
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
