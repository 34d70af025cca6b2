"""``lightning-gc bench``: from the words of the command line to files and a table."""

from __future__ import annotations

import argparse
import signal
import traceback
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from lightning_gc.bench.comparison import compare
from lightning_gc.bench.method_run import KEPT, BenchError, Ground
from lightning_gc.bench.methods import DEFAULT, methods_of
from lightning_gc.bench.result_files import write
from lightning_gc.bench.table import COLUMNS, cells, terminal
from lightning_gc.bench.worker_device import Place
from lightning_gc.strategies import process_shutdown
from lightning_gc.strategies.validation import check_agreement
from lightning_gc.transports.distributed import Distributed
from lightning_gc.tuning.method import Method
from lightning_gc.tuning.terminal_progress import hush
from lightning_gc.tuning.yaml_config import FromFile, methods_in, read


def bench(options: argparse.Namespace) -> None:
    """Compare, print, write.

    Raises:
        ValueError: something in the request is wrong.
        BenchError: a method has not got through; where it is no other worker's fault, the
            traceback has been shown.
    """
    place = Place.from_environment()
    _check(options)
    sections = read(options.config, needed=("model",))
    given = dict(sections.get("trainer") or {})
    device = place.device(given.get("accelerator", "auto"))
    kept = {name: value for name, value in given.items() if name in KEPT}
    parts = {name: sections.get(name) for name in ("model", "data")} | {"trainer": kept}
    build = FromFile(parts, ())
    build.check()
    methods = methods_of(options.compressor or DEFAULT, methods_in(sections))
    seed = sections.get("seed_everything", 0)
    ground = Ground(
        build,
        place,
        accelerator=device.type,
        backend="nccl" if device.type == "cuda" else "gloo",
        steps=options.steps,
        timeout=timedelta(seconds=options.timeout),
        ddp={"find_unused_parameters": True} if options.find_unused_parameters else {},
        seed=seed if type(seed) is int else 0,
    )
    console = Console(quiet=place.worker > 0)
    if not console.is_terminal:
        console.width = 120  # of a file that torchrun may keep
    hush()
    aside = sorted(set(given) - set(KEPT) - {"accelerator"})
    if aside:
        _say(console, f"Left aside of the file's trainer: {', '.join(aside)}.")
    rows = _measure(ground, methods, options, device, console)
    if place.worker == 0:
        console.print(terminal(COLUMNS, cells(rows)))
        for path in write(options.out, options.config, ground, options.rounds, rows):
            _say(console, str(path))


def _measure(
    ground: Ground,
    methods: Mapping[str, Method],
    options: argparse.Namespace,
    device: torch.device,
    console: Console,
) -> dict[str, dict[str, Any]]:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(ground.backend, timeout=ground.timeout)
    process_shutdown.register()
    same = {name: repr(getattr(options, name)) for name in _SAME}
    same["the file's sections"] = repr(dict(ground.build.sections))
    check_agreement(same, Distributed(), device)
    before = signal.getsignal(signal.SIGTERM)
    try:
        rows = compare(ground, methods, options.rounds, device, lambda text: _say(console, text))
    except BenchError as error:
        if not error.elsewhere:
            traceback.print_exception(error.__cause__)  # the user's code, or ours: all of it
        raise
    # Not after an error: leaving the group would wait for those that are gone.
    signal.signal(signal.SIGTERM, before)
    dist.destroy_process_group()
    return rows


_SAME = ("compressor", "rounds", "steps", "find_unused_parameters")


def _check(options: argparse.Namespace) -> None:
    for name, least in (("rounds", 1), ("steps", 2), ("timeout", 1)):
        value = getattr(options, name)
        if value < least:
            raise ValueError(f"--{name} {value:g}: must be at least {least}.")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
