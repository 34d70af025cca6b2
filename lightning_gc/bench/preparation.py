"""Preparation of a measurement: the setup from a YAML file's sections, and the process group."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_gc.bench.method_run import TRAINER_ARGUMENTS, BenchError, BenchSetup
from lightning_gc.bench.worker_device import WorkerRank
from lightning_gc.exchange.validation import check_agreement
from lightning_gc.methods.yaml_config import YAMLBuild
from lightning_gc.transports.distributed import Distributed


def prepare(
    sections: Mapping[str, Any],
    worker: WorkerRank,
    steps: int,
    timeout: float,
    *,
    find_unused_parameters: bool,
    say: Callable[[str], None],
) -> tuple[BenchSetup, torch.device]:
    """Return the setup that a file describes, and this worker's device.

    Args:
        sections: the file's.
        worker: ranks of this worker.
        steps: measured ones per round.
        timeout: of every collective, in seconds.
        find_unused_parameters: as for DDP.
        say: called with a line about what is left aside.

    Raises:
        ValueError: an invalid file, or a device that DDP does not run on.
    """
    given = dict(sections.get("trainer") or {})
    device = worker.device(given.get("accelerator", "auto"))
    kept = {name: value for name, value in given.items() if name in TRAINER_ARGUMENTS}
    parts = {name: sections.get(name) for name in ("model", "data")} | {"trainer": kept}
    build = YAMLBuild(parts, ())
    build.check()
    seed = sections.get("seed_everything", 0)
    setup = BenchSetup(
        build,
        worker,
        accelerator=device.type,
        backend="nccl" if device.type == "cuda" else "gloo",
        steps=steps,
        timeout=timedelta(seconds=timeout),
        ddp={"find_unused_parameters": True} if find_unused_parameters else {},
        seed=seed if type(seed) is int else 0,
    )
    ignored = sorted(given.keys() - kept.keys() - {"accelerator"})
    if ignored:
        say(f"Left aside of the file's trainer: {', '.join(ignored)}.")
    return setup, device


@contextmanager
def process_group(
    setup: BenchSetup, device: torch.device, agreed: Mapping[str, str]
) -> Iterator[None]:
    """Make the default process group, see that workers agree, and leave it in the end.

    Args:
        setup: with backend and timeout.
        device: this worker's.
        agreed: name -> text of what must be equal on all workers, besides the file's sections.

    Raises:
        ValueError: on all workers, if they differ.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(setup.backend, timeout=setup.timeout)
    same = {**agreed, "the file's sections": repr(dict(setup.build.sections))}
    check_agreement(same, Distributed(), device)
    before = signal.getsignal(signal.SIGTERM)
    yield
    # Not after an error: leaving the group would wait for workers that are dead.
    signal.signal(signal.SIGTERM, before)
    dist.destroy_process_group()


@contextmanager
def explained() -> Iterator[None]:
    """Print the traceback of a method's failure, which is of the user's code or ours, and raise it.

    A failure of another worker is explained there.
    """
    try:
        yield
    except BenchError as error:
        if not error.other_worker:
            traceback.print_exception(error.__cause__)
        raise


def print_line(text: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
