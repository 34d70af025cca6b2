"""Local steps go on from a checkpoint bit for bit, within a round and between two."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from lightning_gc import (
    QSGD,
    Cast,
    Identity,
    NoMemory,
    OuterSGD,
    PowerSGD,
    Quantised,
    Residual,
    TopK,
)
from lightning_gc.controllers import Schedule
from lightning_gc.memories import GlobalMomentum
from tests.support.accelerator import needs_two
from tests.support.local_steps import local
from tests.support.processes import run_in_processes
from tests.support.resuming import checkpoint, differences, fit_and_save

pytestmark = [pytest.mark.processes, needs_two]
WORKERS = 2
WITHIN, BETWEEN = 3, 5  # checkpoints are after 5 steps and 10

FEW: list[dict[str, Any]] = [
    {"compressor": TopK(0.1), "every": WITHIN, "outer": OuterSGD.diloco()},
    {"compressor": QSGD(4), "every": WITHIN},
    {"compressor": TopK(0.1), "every": BETWEEN, "scaler": {"init_scale": 2.0**10}, "loud": 2},
    {"compressor": PowerSGD(1), "every": WITHIN, "plugins": (), "accumulate": 2},
    {"compressor": TopK(0.1), "every": WITHIN, "controller": Schedule((0.2, 0.05))},
]
MANY = [
    {"compressor": compressor, "memory": memory, "every": every, "outer": outer}
    for compressor, memory in (
        (TopK(0.1), Residual(decay=0.95)),
        (TopK(0.1), GlobalMomentum(0.9)),
        (QSGD(4), Residual()),
        (QSGD(4), NoMemory()),
        (Quantised(TopK(0.1), QSGD(2)), Residual(decay=0.95)),
        (Identity(), NoMemory()),
        (Cast(), NoMemory()),
    )
    for every, outer in itertools.product(
        (1, WITHIN, BETWEEN, 100), (OuterSGD(), OuterSGD(0.5, 0.5))
    )
    if not (isinstance(memory, GlobalMomentum) and outer.momentum)
]


def runs(worker: int, folder: str, cases: list[dict[str, Any]], workers: int) -> list[Any]:
    """Fit each case twice: in one go, and from its own checkpoint after the first epoch."""
    pairs = []
    for number, case in enumerate(cases):
        where = Path(folder, str(number))
        whole = fit_and_save(worker, workers, str(where), 2, strategy=local, **case)
        from_there = checkpoint(where, 0, 5)
        again = str(where / "again")
        pairs.append(
            (
                whole,
                fit_and_save(worker, workers, again, 2, resume=from_there, strategy=local, **case),
            )
        )
    return pairs


def assert_resumed(folder: Path, cases: list[dict[str, Any]], timeout: float) -> None:
    found = run_in_processes(runs, WORKERS, str(folder), cases, WORKERS, timeout=timeout)
    for number, case in enumerate(cases):
        whole, resumed = ([worker[number][i] for worker in found] for i in range(2))
        assert differences(whole, resumed) == [], case


def test_resumed_runs_are_the_same(tmp_path: Path) -> None:
    assert_resumed(tmp_path, FEW, 200)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_resumed_runs_of_many_kinds_are_the_same(tmp_path: Path) -> None:
    assert_resumed(tmp_path, MANY, 800)
