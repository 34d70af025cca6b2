"""Goodput and loss of elastic local steps under deaths and joins; in virtual time and for real.

python benchmarks/papers/goodput.py --only kind=protocol --jobs 2
python benchmarks/papers/goodput.py --only kind=loss --jobs 2
python benchmarks/papers/goodput.py --only kind=real      # alone on the machine, 30 minutes
python benchmarks/papers/goodput.py --only kind=join      # alone too
python benchmarks/papers/goodput.py --page
"""

from __future__ import annotations

import random
import statistics
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import frame
from frame import Cell, Claim, Experiment, Row, spread, table, values, where
from goodput_jobs import ARMS, Jobs, Task, loss_of, measured, replayed, run
from goodput_rounds import Fault, Site, Terms, faults, rolled, worker_steps
from matplotlib.figure import Figure

from lightning_gc.methods import plot_style

DEATHS, JOINS = 20, 25  # one in so many rounds
ROUNDS = 100
WORKERS = (4, 8, 16, 32, 64)
ENDS: dict[str, dict[str, Any]] = {  # how a machine ends, and the timeout
    "broken": {"silent": False, "timeout": 30.0},
    "silent": {"silent": True, "timeout": 30.0},
    "silent, `timeout=10`": {"silent": True, "timeout": 10.0},
}
LOSSES = {4: (40, 2), 64: (40, 1)}  # workers -> rounds, rows of a batch
REAL, LENGTH, SECONDS = 4, 60, 0.15  # workers, rounds, and seconds of a step
BALLAST = (0, 10_000_000)
ABOUT = f"""
Workers die and join while they train with local steps. There is one death in every {DEATHS} rounds
and one join in every {JOINS}, at random moments, for {ROUNDS} rounds. *Goodput* is committed
worker-steps per second, as a share of the undisturbed run's. A worker-step is one optimizer step of
one worker. It is committed if the round was committed with this worker. So a repeated round, a wait
for a timeout, the lost steps of a dead worker and its absence until another one joins all lower it.

In *virtual time* the library's keeper and members decide, and machines only count seconds: 8 steps
of 1 s, 5 % more or less, an exchange of 2 s, a snapshot of 4 s, and the defaults `grace=5`,
`timeout=30`. *Broken*: a dead machine's connections close, and the others notice after 0.3 s.
*Silent*: they stay open, and the timeout notices. A machine that dies in a step stops reporting.
The others go on without it once it has been silent for `grace`. *Real*: four jobs of this machine
over Gloo, for {LENGTH} rounds. A step is padded to {SECONDS} s. Jobs are killed by SIGKILL, with
`grace=1` and `timeout=5`. They train a perceptron, because only time counts. Every real run is
replayed from its roll, and the replay's weights have the same bits. The rate without failures is
seed 0's.

Losses are of the small transformer of `local_steps.py`, with AdamW at 0.006 and H = 8. Runs with
failures go on until they have as many committed worker-steps as the undisturbed run, so tokens are
equal. Workers train for 40 rounds: four of them in batches of two rows, and 64 of them in batches
of one row.
"""


def cells(seeds: int) -> list[Cell]:
    """Return all: virtual time, losses, real jobs, and the cost of a join."""
    numbers = range(seeds)
    both = (False, True)
    found: list[Cell] = [
        {"kind": "protocol", "workers": w, **end, "seed": n}
        for w in WORKERS
        for end in ENDS.values()
        for n in range(seeds * max(1, 32 // w))  # virtual time is cheap
    ]
    found += [
        {"kind": "loss", "workers": w, "arm": arm, "failures": f, "seed": n}
        for w in LOSSES
        for arm in ARMS
        for f in both
        for n in numbers
    ]
    found += [
        {"kind": "real", "workers": REAL, "arm": arm, "failures": f, "seed": n}
        for n in numbers
        for arm in ARMS
        for f in both
        if f or n == 0
    ]
    return found + [{"kind": "join", "ballast": b, "seed": 0} for b in BALLAST]


def before(cell: Cell) -> Sequence[Cell]:
    """Return the undisturbed run of real jobs whose rate is compared."""
    if cell["kind"] == "real" and cell["failures"]:
        return [{**cell, "failures": False, "seed": 0}]
    return []


def train(cell: Cell, data: Path | None) -> Row:
    """Run one cell."""
    warnings.simplefilter("ignore")
    return {"protocol": protocol, "loss": loss, "real": real, "join": join}[cell["kind"]](cell)


def protocol(cell: Cell) -> Row:
    """Compare rates in virtual time."""
    seed, terms = cell["seed"], Terms(silent=cell["silent"], timeout=cell["timeout"])
    rates = []
    for disturbed in (False, True):
        draw = random.Random(seed)
        site = Site(cell["workers"], terms, draw)
        length = ROUNDS if disturbed else 20
        site.run(length, faults(length, DEATHS, JOINS, draw) if disturbed else [])
        rates.append(worker_steps(site.roll, terms.every) / site.seconds)
    return {
        "goodput": rates[1] / rates[0],
        "deaths": [each / terms.round for each in site.deaths],
        "repeated": sum(each.attempt > 0 for each in site.roll),
    }


def present(workers: int, seed: int) -> float:
    """Return the mean share of workers that are there, with the faults of a seed."""
    planned = faults(ROUNDS, DEATHS, JOINS, random.Random(seed))
    there = [
        sum((1 if each.what == "join" else -1) for each in planned if each.round < number)
        for number in range(ROUNDS)
    ]
    return 1 + statistics.fmean(there) / workers


def loss(cell: Cell) -> Row:
    """Train simulated workers by a roll of virtual time."""
    workers, seed = cell["workers"], cell["seed"]
    rounds, batch = LOSSES[workers]
    failing = (DEATHS, JOINS) if cell["failures"] else (0, 0)
    wanted = rounds * workers * Terms().every
    roll = rolled(workers, wanted, seed, *failing)
    task = Task(cell["arm"], seed, Terms().every * len(roll), batch=batch)
    found = loss_of(replayed(task, roll))
    done = worker_steps(list(roll), Terms().every) / wanted
    return {"loss": found, "rounds": len(roll), "tokens": done}


def real(cell: Cell) -> Row:
    """Train with jobs of this machine; compare rates with the undisturbed run."""
    seed, planned = cell["seed"], list[Fault]()
    if cell["failures"]:
        planned = faults(LENGTH, DEATHS, JOINS, random.Random(seed))
    found = run(Task(cell["arm"], seed, 8 * LENGTH, seconds=SECONDS, small=True), REAL, planned)
    if cell["failures"]:
        found = {"goodput": found["rate"] / cell["before"][0]["rate"], **found}
    return found


def join(cell: Cell) -> Row:
    """Measure how much longer rounds of 8 s are when a worker joins."""
    task = Task("QSGD(4)", cell["seed"], 16 * 28, every=16, seconds=0.5, ballast=cell["ballast"])
    planned = [Fault("join", number, 0.3) for number in (2, 6, 10, 14, 18, 22)]
    jobs = Jobs(task, 3, len(planned))
    jobs.play(planned)
    found = measured(jobs)
    jobs.close()
    usual = found["round"]
    return {
        "cost": [each / usual for each in found["joins"]],
        "quiet": [each / usual for each in found["quiet"]],
        "busy": [each / usual for each in found["cpu_joins"]],
        "busy_quiet": [each / usual for each in found["cpu_quiet"]],
        "round": usual,
    }


def _several(rows: Sequence[Row], name: str) -> list[float]:
    return [each for row in rows for each in row[name]]


def _median(rows: Sequence[Row], name: str) -> str:
    found = _several([row for row in rows if name in row], name)  # older rows have none
    return f"{statistics.median(found):+.1%}" if found else "–"


def _percent(rows: Sequence[Row]) -> str:
    goodput = values(rows, "goodput")
    return f"{statistics.fmean(goodput):.1%} ({min(goodput):.1%})" if goodput else "–"


def page(rows: list[Row]) -> str:
    """Return the tables."""
    shown = []
    for workers in WORKERS:
        kinds = [where(rows, kind="protocol", workers=workers, **end) for end in ENDS.values()]
        if all(kinds):
            again = [statistics.fmean(_several(each, "deaths")) for each in kinds]
            there = statistics.fmean(present(workers, row["seed"]) for row in kinds[0])
            figures = [f"{there:.1%}", *map(_percent, kinds), *(f"{each:.2f}" for each in again)]
            shown.append([workers, *figures, min(map(len, kinds))])
    head = ["workers", "present", *(f"{end}: goodput (least)" for end in ENDS)]
    head += [*(f"{end}: death to next commit" for end in ENDS), "seeds"]
    text = "## Goodput in virtual time\n\n*Present* is the share of workers that are there: the "
    text += "goodput if a death and a join took no time. *Death to next commit* is a "
    text += "mean, in rounds of 10 s.\n\n"
    text += table(head, shown)
    text += "\n## Losses at equal tokens\n\n" + _losses(rows)
    text += "\n## Real jobs\n\n" + _real(rows)
    return text + "\n## The cost of a join\n\n" + _joins(rows)


def _losses(rows: list[Row]) -> str:
    shown = []
    for workers, arm, plain, failing in _pairs(rows):
        apart = statistics.fmean(failing) - statistics.fmean(plain)
        mine = where(rows, kind="loss", workers=workers, arm=arm, failures=True)
        tokens = statistics.fmean(values(mine, "tokens"))
        losses = [spread(each, ".3f") for each in (plain, failing)]
        width = max(plain) - min(plain)
        shown.append([workers, arm, *losses, f"{apart:+.3f}", f"{width:.3f}", f"{tokens:.3f}"])
    head = ["workers", "sent", "undisturbed", "with failures", "difference"]
    return table([*head, "range of undisturbed seeds", "tokens, as a share"], shown)


def _pairs(rows: list[Row]) -> list[tuple[int, str, list[float], list[float]]]:
    """Return workers and arm, losses of undisturbed runs, and of those with failures."""
    found = []
    for workers in LOSSES:
        for arm in ARMS:
            kind = {"kind": "loss", "workers": workers, "arm": arm}
            both = [values(where(rows, **kind, failures=f), "loss") for f in (False, True)]
            if all(both):
                found.append((workers, arm, *both))
    return found  # type: ignore[return-value]


def _real(rows: list[Row]) -> str:
    shown = []
    for arm in ARMS:
        mine = where(rows, kind="real", arm=arm, failures=True)
        if mine:
            again = [d / row["round"] for row in mine for d in row["deaths"]]
            late = [d / row["round"] for row in mine for d in row["joins"]]
            usual = statistics.fmean(values(mine, "round"))
            figures = [f"{statistics.median(again):.2f} ({max(again):.2f})", len(again)]
            figures += [f"{statistics.median(late):+.2f}" if late else "–", len(late)]
            shown.append([arm, _percent(mine), f"{usual:.2f} s", *figures])
    head = ["sent", "goodput (least)", "round", "kill to next commit, in rounds (most)", "kills"]
    return table([*head, "a join, in rounds", "joins"], shown)


def _joins(rows: list[Row]) -> str:
    shown = []
    for ballast in BALLAST:
        mine = where(rows, kind="join", ballast=ballast)
        if mine:
            cost = _several(mine, "cost")
            usual = statistics.fmean(values(mine, "round"))
            shown.append(
                [
                    f"{ballast / 1e6:g} million more",
                    f"{usual:.2f} s",
                    f"{statistics.median(cost):+.1%}",
                    f"{min(cost):+.1%} to {max(cost):+.1%}",
                    len(cost),
                    f"±{statistics.pstdev(_several(mine, 'quiet')):.1%}",
                    *(_median(mine, name) for name in ("busy", "busy_quiet")),
                ]
            )
    text = "By how much the round before and the first round of a joiner are longer together, as a "
    text += "share of a usual round, for the members. *Quiet rounds* is the standard deviation of "
    text += "this figure where nobody joins.\n\n"
    text += "*CPU* is the CPU time by which these two rounds need more, as a share of a round's "
    text += "seconds. It is the median of the member that needs most.\n\n"
    head = ["parameters", "round", "median", "range", "joins", "quiet rounds"]
    return text + table([*head, "CPU", "CPU of quiet rounds"], shown)


def claims(rows: list[Row]) -> list[Claim]:
    """Hold goodput and losses against Decoupled DiLoCo's."""
    found = []
    kinds = {name: {"kind": "protocol", **end} for name, end in ENDS.items()}
    for name, settings in {**kinds, "real": {"kind": "real"}}.items():
        mine = [row for row in where(rows, **settings) if "goodput" in row]
        if mine:
            several = {row["workers"]: [] for row in mine}  # type: ignore[var-annotated]
            for row in mine:
                several[row["workers"]].append(row["goodput"])
            least = min(statistics.fmean(each) for each in several.values())
            text = f"goodput of at least 85 % under failures ({name}; by the means)"
            said = f"{least:.1%} at the worst number of workers"
            found.append(Claim(text, "88 %", said, "agrees" if least >= 0.85 else "disagrees"))
    for workers, arm, plain, failing in _pairs(rows):
        apart = statistics.fmean(failing) - statistics.fmean(plain)
        width = max(plain) - min(plain)
        text = f"equal quality at equal tokens: {arm}, {workers} workers (within the seeds' range)"
        said = f"{apart:+.3f}, range {width:.3f}"
        found.append(Claim(text, "equal", said, "agrees" if apart <= width else "disagrees"))
    return found


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw goodput by the number of workers."""
    ax = figure.subplots()
    lines: dict[str, dict[str, Any]] = {
        "virtual, broken connections": {"kind": "protocol", **ENDS["broken"]},
        "virtual, silent": {"kind": "protocol", **ENDS["silent"]},
        "real": {"kind": "real", "failures": True},
    }
    for index, (name, settings) in enumerate(lines.items()):
        mine = where(rows, **settings)
        numbers = sorted({row["workers"] for row in mine})
        means = [100 * statistics.fmean(values(where(mine, workers=n), "goodput")) for n in numbers]
        mark = plot_style.MARKERS[index]
        ax.plot(numbers, means, marker=mark, color=plot_style.SERIES[index], label=name)
    ax.set_xscale("log", base=2)
    plot_style.plain_log(ax.xaxis)
    ax.axhline(85, color="gray", linewidth=0.8, linestyle=":")
    ax.set(xlabel="workers at first", ylabel="goodput, %")
    plot_style.legend(figure)


if __name__ == "__main__":
    sys.exit(
        frame.main(Experiment("goodput", ABOUT, cells, train, page, claims, draw, before=before))
    )
