"""``lightning-gc bench``: check the options, measure, print a table and write files."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_gc.bench.comparison import compare
from lightning_gc.bench.method_run import TRAINER_ARGUMENTS, BenchError, BenchSetup
from lightning_gc.bench.methods import DEFAULT, select_methods
from lightning_gc.bench.result_files import write
from lightning_gc.bench.table import COLUMNS, FOOTNOTE, cells
from lightning_gc.bench.worker_device import WorkerRank
from lightning_gc.strategies import process_shutdown
from lightning_gc.synchronizer.validation import check_agreement
from lightning_gc.text_table import plain
from lightning_gc.transports.distributed import Distributed
from lightning_gc.tuning.method import Method
from lightning_gc.tuning.terminal_progress import quiet_libraries
from lightning_gc.tuning.yaml_config import YAMLBuild, methods_in, read


def bench(options: argparse.Namespace) -> None:
    """Run the command on one worker.

    Raises:
        ValueError: an invalid option, file or environment.
        BenchError: a method has failed; unless another worker has, the traceback was printed.
    """
    worker = WorkerRank.from_environment()
    for name, least in (("rounds", 1), ("steps", 2), ("timeout", 1)):
        if getattr(options, name) < least:
            value = getattr(options, name)
            raise ValueError(f"--{name} {value:g}: must be at least {least}.")
    sections = read(options.config, needed=("model",))
    given = dict(sections.get("trainer") or {})
    device = worker.device(given.get("accelerator", "auto"))
    kept = {name: value for name, value in given.items() if name in TRAINER_ARGUMENTS}
    parts = {name: sections.get(name) for name in ("model", "data")} | {"trainer": kept}
    build = YAMLBuild(parts, ())
    build.check()
    methods = select_methods(options.compressor or DEFAULT, methods_in(sections))
    seed = sections.get("seed_everything", 0)
    setup = BenchSetup(
        build,
        worker,
        accelerator=device.type,
        backend="nccl" if device.type == "cuda" else "gloo",
        steps=options.steps,
        timeout=timedelta(seconds=options.timeout),
        ddp={"find_unused_parameters": True} if options.find_unused_parameters else {},
        seed=seed if type(seed) is int else 0,
    )
    say = _print if worker.rank == 0 else lambda text: None
    quiet_libraries()
    ignored = sorted(given.keys() - kept.keys() - {"accelerator"})
    if ignored:
        say(f"Left aside of the file's trainer: {', '.join(ignored)}.")
    rows = _measure(setup, methods, options, device, say)
    if worker.rank == 0:
        width = shutil.get_terminal_size(fallback=(120, 24)).columns
        say(f"{plain(COLUMNS, cells(rows), width)}\n{FOOTNOTE}")
        for path in write(options.out, options.config, setup, options.rounds, rows):
            say(str(path))


def _measure(
    setup: BenchSetup,
    methods: Mapping[str, Method],
    options: argparse.Namespace,
    device: torch.device,
    say: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(setup.backend, timeout=setup.timeout)
    process_shutdown.register()
    agreed = ("compressor", "rounds", "steps", "find_unused_parameters")
    same = {name: repr(getattr(options, name)) for name in agreed}
    same["the file's sections"] = repr(dict(setup.build.sections))
    check_agreement(same, Distributed(), device)
    before = signal.getsignal(signal.SIGTERM)
    try:
        rows = compare(setup, methods, options.rounds, device, say)
    except BenchError as error:
        if not error.other_worker:
            traceback.print_exception(error.__cause__)  # the user's code, or ours
        raise
    # Not after an error: leaving the group would wait for workers that are dead.
    signal.signal(signal.SIGTERM, before)
    dist.destroy_process_group()
    return rows


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
