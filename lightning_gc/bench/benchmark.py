"""Measure all methods in turn over several rounds, gather all workers' results, write a table."""

import argparse
import datetime
import json
import math
import platform
import shutil
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lightning_gc.bench import preparation
from lightning_gc.bench.baselines import (
    BF16,
    DEFAULT,
    FP16,
    NONE,
    PLAIN,
    baselines,
    select_methods,
)
from lightning_gc.bench.method_run import Measurement, measure
from lightning_gc.bench.preparation import BenchSetup
from lightning_gc.core.refusal import refuse
from lightning_gc.methods.lightning_flavour import pl, quiet_libraries
from lightning_gc.methods.method import Method
from lightning_gc.methods.text_table import markdown, plain
from lightning_gc.methods.yaml_config import methods_in, read
from lightning_gc.transports.distributed import Distributed, gather_text

Say = Callable[[str], None]
Rows = Mapping[str, Mapping[str, Any]]


def compare(
    setup: BenchSetup, methods: Mapping[str, Method], rounds: int, device: torch.device, say: Say
) -> dict[str, dict[str, Any]]:
    """Measure and return a row per method, the same on all workers.

    Needs a process group. Methods take turns, so that other load affects all methods equally.

    Args:
        setup: the same for all.
        methods: compressed methods; the baselines are always measured.
        rounds: measurements of each method.
        device: a device that the group's backend can send from.
        say: called with a line about each measurement.

    Raises:
        BenchError: a method has failed.
    """
    runs = {
        name: partial(measure, setup, name, methods.get(name))
        for name in (*baselines(setup.backend), *methods)
    }
    return take_turns(runs, methods, rounds, device, say)


def take_turns(
    runs: Mapping[str, Callable[[], Measurement]],
    counted: Collection[str],
    rounds: int,
    device: torch.device,
    say: Say,
    goes_on: Callable[[], bool] = lambda: True,
) -> dict[str, dict[str, Any]]:
    """Run each measurement once per round; return a row for each, as ``compare`` does.

    Args:
        runs: name -> measures once, on all workers.
        counted: names with counted bytes; the bytes of the others are computed.
        rounds: measurements of each.
        device: a device that the group's backend can send from.
        say: called with a line about each measurement.
        goes_on: called on all workers before each round after the first; all must return the same.
    """
    found: dict[str, list[Measurement]] = {name: [] for name in runs}
    for number in range(1, rounds + 1):
        if number > 1 and not goes_on():
            break
        for name, results in found.items():
            measured = runs[name]()
            results.append(measured)
            median = statistics.median(measured.seconds)
            say(f"round {number} of {rounds}  {name}: {median:.4f} s per step")
    ours = json.dumps({name: [vars(each) for each in results] for name, results in found.items()})
    texts = gather_text(ours, Distributed(), device, "finish the rounds")
    gathered = [json.loads(text) for text in texts]
    for name, results in found.items():
        results[:] = [Measurement(**each) for theirs in gathered for each in theirs[name]]
    return dict(_rows(found, counted))


def _rows(
    found: Mapping[str, list[Measurement]], counted: Collection[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, measured in found.items():
        seconds = sorted(second for each in measured for second in each.seconds)
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        row: dict[str, Any] = {
            "seconds": middle,
            "low": low,
            "high": high,
            "bytes": statistics.mean(each.nbytes for each in measured),
            "source": "counted" if name in counted else "" if name == NONE else "computed",
        }
        losses = [each.loss for each in measured if each.loss is not None]
        if losses:
            row["loss"] = statistics.fmean(losses)
        yield name, row


def bench(options: argparse.Namespace) -> None:
    """Run the command on one worker.

    Raises:
        ValueError: an invalid option, file or environment.
        BenchError: a method has failed; unless another worker has, the traceback was printed.
    """
    worker = preparation.WorkerRank.from_environment("bench")
    for name, least in (("rounds", 1), ("steps", 2), ("timeout", 1)):
        if not getattr(options, name) >= least:  # NaN is not, either
            value = getattr(options, name)
            refuse(f"--{name} {value:g}: must be at least {least}")
    sections = read(options.config, needed=("model",))
    if worker.rank == 0:
        _refuse_other_files(options.out, options.config)
    say = preparation.print_line if worker.rank == 0 else lambda text: None
    quiet_libraries()
    setup, device = preparation.prepare(
        sections,
        worker,
        options.steps,
        options.timeout,
        find_unused_parameters=options.find_unused_parameters,
        say=say,
    )
    methods = select_methods(options.compressor or DEFAULT, methods_in(sections))
    agreed = ("compressor", "rounds", "steps", "find_unused_parameters")
    same = {name: repr(getattr(options, name)) for name in agreed}
    with preparation.process_group(setup, device, same), preparation.explained():
        rows = compare(setup, methods, options.rounds, device, say)
    if worker.rank == 0:
        notes = _READ + _ONE_BUCKET * (setup.backend == "gloo")
        report(rows, options.out, options.config, setup, options.rounds, notes)


def report(
    rows: Rows, folder: Path, config: Path, setup: BenchSetup, rounds: int, notes: str
) -> None:
    """Print the table and the verdict, and write ``<config>.md`` and ``<config>.json``."""
    width = shutil.get_terminal_size(fallback=(120, 24)).columns
    text = f"{plain(COLUMNS, cells(rows), width)}\n{FOOTNOTE}\n\n{verdict(rows)}"
    preparation.print_line(text)
    for path in _write(folder, config, setup, rounds, rows, notes):
        preparation.print_line(str(path))


COLUMNS = ("", "s per step", "speed relative to DDP", "times the limit", "bytes per step", "loss")
FOOTNOTE = "* computed. The others are counted. A speed below 1 is slower than plain DDP."


def cells(rows: Rows) -> list[list[str]]:
    """Return the table's cells, row by row.

    Args:
        rows: by method ``seconds`` and ``bytes``; where known ``low`` and ``high``, the quartiles
            of the seconds, ``source``, ``"computed"`` if bytes are not counted, and ``loss``.
    """
    plain, limit = (rows.get(name, {}).get("seconds", math.nan) for name in (PLAIN, NONE))
    found = []
    for method, row in rows.items():
        spread = f" ({row['low']:.4f}-{row['high']:.4f})" if "low" in row else ""
        star = "*" if row.get("source") == "computed" else ""
        found.append(
            [
                method,
                f"{row['seconds']:.4f}{spread}",
                f"{plain / row['seconds']:.2f}",
                f"{row['seconds'] / limit:.2f}",
                f"{row['bytes']:,.0f}{star}",
                f"{row['loss']:.3f}" if "loss" in row else "",
            ]
        )
    return found


LEAST_GAIN = 0.05
"""Minimum relative difference to plain DDP; smaller ones count as equally fast."""


def verdict(rows: Rows) -> str:
    """Return which method was faster than plain DDP, or that noise hides it, in a sentence or two.

    A method is faster if its median is at least 5 % shorter and its quartiles do not overlap plain
    DDP's. It is also compared with the quicker one of torch's 16-bit hooks. Accuracy is not judged.

    Args:
        rows: by method ``seconds`` and the quartiles ``low`` and ``high``.

    Example:
        >>> def row(seconds): return dict(seconds=seconds, low=seconds, high=seconds)
        >>> verdict({"plain DDP": row(0.4), "topk": row(0.2)}).partition(" Compare")[0]
        "Verdict: topk was fastest, at 2.00 times plain DDP's speed."
    """
    dense = rows[PLAIN]
    others = {name: row for name, row in rows.items() if name not in (PLAIN, NONE)}
    gains = {name: 1 - row["seconds"] / dense["seconds"] for name, row in others.items()}
    clear = [n for n, r in others.items() if gains[n] >= LEAST_GAIN and r["high"] < dense["low"]]
    if clear:
        best = max(clear, key=gains.__getitem__)
        speed = dense["seconds"] / rows[best]["seconds"]
        half = min(
            (n for n in (FP16, BF16) if n in rows), key=lambda n: rows[n]["seconds"], default=""
        )
        beside = ""
        if half not in ("", best):
            beside = f" and {rows[half]['seconds'] / rows[best]['seconds']:.2f} times {half}'s"
        return (
            f"Verdict: {best} was fastest, at {speed:.2f} times plain DDP's speed{beside}. Compare "
            f"accuracy with lightning-gc tune."
        )
    if not gains:
        return "Verdict: none, since no method was compared with plain DDP."
    best = max(gains, key=gains.__getitem__)
    if gains[best] >= LEAST_GAIN or (gains[best] > 0 and dense["high"] > 1.2 * dense["low"]):
        return (
            f"Verdict: too noisy to tell. The quartiles of {best} and plain DDP overlap. Measure "
            f"on an idle machine, or with more --rounds."
        )
    return (
        f"Verdict: stay with plain DDP. The best method, {best}, took "
        f"{rows[best]['seconds']:.4f} s per step against {dense['seconds']:.4f} s."
    )


_READ = """Seconds are the median over all workers and steps, with the quartiles in brackets.
They cover forward and backward pass, exchange and optimizer, but not the loading of data.
Bytes are the gradient bytes that one worker sends per step. The transport counts our methods'
bytes, with indices, scales and lengths. Bytes of DDP and torch's hooks (*) are computed for a
ring all-reduce. Both are without the network's headers. The loss is the mean over workers of the
last quarter of a round's steps, each method from the same weights."""
_ONE_BUCKET = """

PowerSGD's hook has one bucket: with several it can dead-lock over Gloo."""


def _files(folder: Path, config: Path) -> tuple[Path, Path]:
    return folder / f"{config.stem}.md", folder / f"{config.stem}.json"


def _refuse_other_files(folder: Path, config: Path) -> None:
    """Raise ValueError if a file that is not of an earlier measurement would be overwritten."""
    beginnings = f"# {config.stem}, ", '{\n "date": '
    for path, beginning in zip(_files(folder, config), beginnings, strict=True):
        ours = path.is_file() and path.read_bytes().startswith(beginning.encode())
        if path.exists() and not ours:
            refuse(
                f"{path} is not of lightning-gc bench and would be overwritten. Give another --out"
            )


def _write(
    folder: Path, config: Path, setup: BenchSetup, rounds: int, rows: Rows, notes: str
) -> tuple[Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    about = _about(config, setup, rounds)
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    table = markdown(COLUMNS, cells(rows))
    text = f"# {config.stem}, {about['date']}\n\n{verdict(rows)}\n\n{table}\n{facts}\n\n"
    page, data = _files(folder, config)
    page.write_text(f"{text}{notes}\n", encoding="utf-8")
    data.write_text(json.dumps({**about, "rows": _finite(rows)}, indent=1) + "\n")
    return page, data


def _about(config: Path, setup: BenchSetup, rounds: int) -> dict[str, Any]:
    worker, packages = setup.worker, ("torch", pl.__name__.partition(".")[0])
    versions = [f"Python {platform.python_version()}", *(f"{p} {version(p)}" for p in packages)]
    return {
        "date": str(datetime.date.today()),
        "config": config.name,
        "workers": worker.world_size,
        "machines": worker.world_size // worker.local_world_size,
        "device": f"{setup.accelerator}, {setup.backend}",
        "rounds": rounds,
        "steps": setup.steps,
        "versions": ", ".join(versions),
    }


def _finite(value: Any) -> Any:
    """Replace floats that JSON does not have, by strings such as "nan"."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
