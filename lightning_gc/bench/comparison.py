"""Measure all methods in turn, for several rounds, and gather the results of all workers."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from lightning_gc.bench.baselines import BASELINES, DEFAULT, NONE, select_methods
from lightning_gc.bench.method_run import BenchSetup, Measurement, measure
from lightning_gc.bench.preparation import explained, prepare, print_line, process_group
from lightning_gc.bench.table import COLUMNS, FOOTNOTE, cells, write
from lightning_gc.bench.worker_device import WorkerRank
from lightning_gc.core.text_table import plain
from lightning_gc.methods.lightning_flavour import quiet_libraries
from lightning_gc.methods.method import Method
from lightning_gc.methods.yaml_config import methods_in, read
from lightning_gc.transports.distributed import Distributed, gather_text

Say = Callable[[str], None]


def compare(
    setup: BenchSetup, methods: Mapping[str, Method], rounds: int, device: torch.device, say: Say
) -> dict[str, dict[str, Any]]:
    """Measure and return a row per method, the same on all workers.

    Needs a process group. Methods take turns, so that other load affects all alike.

    Args:
        setup: the same for all.
        methods: ours; the baselines are always measured.
        rounds: measurements of each method.
        device: one that the group's backend can send from.
        say: called with a line about each measurement.

    Raises:
        BenchError: a method has failed.
    """
    runs = {
        name: partial(measure, setup, name, methods.get(name)) for name in (*BASELINES, *methods)
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
    """Run each of several measurements in every round; return a row for each, as ``compare``.

    Args:
        runs: name -> measures once, on all workers.
        counted: names whose bytes are counted; those of others are computed.
        rounds: measurements of each.
        device: one that the group's backend can send from.
        say: called with a line about each measurement.
        goes_on: called before each round but the first, on all workers, which must answer alike.
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
    gathered = [json.loads(text) for text in gather_text(ours, Distributed(), device)]
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
    worker = WorkerRank.from_environment("bench")
    for name, least in (("rounds", 1), ("steps", 2), ("timeout", 1)):
        if getattr(options, name) < least:
            value = getattr(options, name)
            raise ValueError(f"--{name} {value:g}: must be at least {least}.")
    sections = read(options.config, needed=("model",))
    say = print_line if worker.rank == 0 else lambda text: None
    quiet_libraries()
    setup, device = prepare(
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
    with process_group(setup, device, same), explained():
        rows = compare(setup, methods, options.rounds, device, say)
    if worker.rank == 0:
        width = shutil.get_terminal_size(fallback=(120, 24)).columns
        say(f"{plain(COLUMNS, cells(rows), width)}\n{FOOTNOTE}")
        for path in write(options.out, options.config, setup, options.rounds, rows):
            say(str(path))
