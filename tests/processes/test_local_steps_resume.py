"""Local steps go on from a checkpoint bit for bit, within a round and between two."""

import itertools
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from lightning_gc import (
    QSGD,
    Cast,
    ErrorFeedback,
    GrowingRounds,
    Identity,
    NoMemory,
    OuterSGD,
    PerParameter,
    PowerSGD,
    Quantised,
    TopK,
)
from lightning_gc.controllers import Budget, Decision, Observation, RoundSchedule, Schedule
from lightning_gc.memories import GlobalMomentum
from tests.support.accelerator import needs_two
from tests.support.fitting import Crashed, ddp
from tests.support.local_steps import local
from tests.support.processes import run_in_processes
from tests.support.resuming import checkpoint, differences, fit_and_save

pytestmark = [pytest.mark.processes, needs_two]
WORKERS = 2
WITHIN, BETWEEN = 3, 5  # checkpoints are after 5 steps and 10
GROWS = 0.031  # with the model's rate of 0.01 rounds of 2, 2, and then 9 steps


class Timed(Budget):
    """Takes the seconds for these, so that two runs decide alike."""

    def decide(self, observation: Observation, state: Any) -> tuple[Decision, Any]:
        phases = {"communicate": 0.5, "wait": 0.4}
        seen = replace(observation, step_seconds=1.0, phase_seconds=phases)
        return super().decide(seen, state)


FEW: list[dict[str, Any]] = [
    {"compressor": TopK(0.1), "every": WITHIN, "outer": OuterSGD.diloco()},
    {"compressor": TopK(0.1), "every": BETWEEN, "scaler": {"init_scale": 2.0**10}, "loud": 2},
    # These checkpoints are between an exchange and the step that takes its result over.
    {"compressor": QSGD(4), "every": 4, "delay": 3, "outer": OuterSGD.diloco()},
    {"compressor": TopK(0.1), "every": 6, "fragments": 3, "delay": 1, "merge": "mix"},
    {"compressor": TopK(0.1), "every": GrowingRounds(GROWS, 2)},
    {"compressor": TopK(0.1), "every": 4, "controller": RoundSchedule((3, 4))},
    {"compressor": TopK(0.1), "every": Timed(0.1, shortest=2, longest=4, rounds=1)},
]
MANY: list[dict[str, Any]] = [
    {"compressor": compressor, "memory": memory, "every": every, "outer": outer}
    for compressor, memory in (
        (TopK(0.1), ErrorFeedback(decay=0.95)),
        (TopK(0.1), GlobalMomentum(0.9)),
        (QSGD(4), ErrorFeedback()),
        (QSGD(4), NoMemory()),
        (Quantised(TopK(0.1), QSGD(2)), ErrorFeedback(decay=0.95)),
        (Identity(), NoMemory()),
        (Cast(), NoMemory()),
    )
    for every, outer in itertools.product(
        (1, WITHIN, BETWEEN, 100), (OuterSGD(), OuterSGD(0.5, 0.5))
    )
    if not (isinstance(memory, GlobalMomentum) and outer.momentum)
]
MANY += [
    {"compressor": PowerSGD(1), "every": WITHIN, "accumulate": 2},
    {"compressor": TopK(0.1), "every": WITHIN, "controller": Schedule((0.2, 0.05))},
]
MANY += [
    {
        "compressor": compressor,
        "memory": ErrorFeedback(),
        "every": 12,
        "delay": delay,
        "fragments": fragments,
        "merge": merge,
        "outer": outer,
    }
    for compressor in (TopK(0.1), QSGD(4))
    for delay in (0, 2, 3)
    for fragments in (1, 3)
    for merge in ("rebase", "mix")
    for outer in (OuterSGD(), OuterSGD.diloco())
    if delay or merge == "rebase"
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


class Noted(pl.Callback):
    """Notes common weights, this worker's distance from them and its errors, as arrays.

    Ends the run, as a crash would, when a second epoch begins.
    """

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if "saved" in self.seen:
            raise Crashed

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.note("started", trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.note("saved", trainer)
        self.seen["state_dict"] = torch.cat([t.view(-1) for t in checkpoint["state_dict"].values()])

    def note(self, when: str, trainer: Any) -> None:
        rounds, engine = trainer.strategy._rounds, trainer.strategy.engine
        (weights,) = rounds.weights.fragments
        self.seen[when] = {
            "anchor": weights.anchor.clone(),
            "drift": torch.cat([t.view(-1) for t in rounds.weights.drift().values()]),
            "error": torch.cat(
                [torch.zeros(0), *(t.reshape(-1).cpu() for _, t in sorted(engine.errors().items()))]
            ),
            "velocity": weights.velocity.clone(),
            "position": rounds.position,
        }


def stage(
    worker: int, workers: int, folder: str, epochs: int, resume: str | None, state: str
) -> dict[str, Any]:
    noted = Noted()
    fit_and_save(
        worker,
        workers,
        folder,
        epochs,
        PerParameter(TopK(0.1)),
        resume,
        callbacks=[noted],
        strategy=local,
        every=4,
        outer=OuterSGD(0.9, 0.5),
        state=state,
    )
    return {
        when: {n: v.cpu().numpy() if isinstance(v, torch.Tensor) else v for n, v in seen.items()}
        for when, seen in noted.seen.items()
        if when != "state_dict"
    } | {"state_dict": noted.seen["state_dict"].cpu().numpy()}


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("state", "numbers"), [("full", (4, 2, 3)), ("mean", (2, 2)), ("mean", (3, 2))], ids=str
)
def test_other_numbers_of_workers_keep_what_is_common_and_the_means(
    tmp_path: Path, state: str, numbers: tuple[int, ...]
) -> None:
    """Common weights, momentum and place in the round; mean drift and mean error to 1e-6."""
    before: list[dict[str, Any]] = []
    resume = None
    for epoch, workers in enumerate(numbers):
        args = (workers, str(tmp_path), epoch + 2, resume, state)
        now = run_in_processes(stage, workers, *args, timeout=120)
        for each in now:
            np.testing.assert_array_equal(each["saved"]["anchor"], each["state_dict"])
            np.testing.assert_array_equal(each["saved"]["anchor"], now[0]["saved"]["anchor"])
        if before:
            for each in now:
                for common in ("anchor", "velocity", "position"):
                    np.testing.assert_array_equal(
                        each["started"][common], before[0]["saved"][common], common
                    )
            for own, unit in (("drift", "anchor"), ("error", "error")):
                kept, had = (
                    np.mean([each[when][own] for each in those], 0)
                    for when, those in (("started", now), ("saved", before))
                )
                assert np.abs(had).max() > 1e-3
                size = np.abs(before[0]["saved"][unit]).max()  # weights are float32 of that size
                np.testing.assert_allclose(kept, had, rtol=0, atol=1e-6 * size)
        before, resume = now, checkpoint(tmp_path, epoch, 5 * (epoch + 1))


def other_strategies(worker: int, folder: str) -> list[str]:
    """Go on with local steps where DDP has stopped, and the other way round; return warnings."""
    said = []
    pairs: Any = ((ddp, local, {"every": 3}), (local, ddp, {}))
    for number, (first, second, options) in enumerate(pairs):
        where = str(Path(folder, str(number)))
        fit_and_save(worker, WORKERS, where, 1, TopK(0.1), strategy=first)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            resume = checkpoint(Path(where), 0, 5)
            fit_and_save(worker, WORKERS, where, 2, TopK(0.1), resume, strategy=second, **options)
        said += [str(each.message) for each in caught if "Resumed with" in str(each.message)]
    return said


@pytest.mark.nightly
def test_errors_of_gradients_are_not_errors_of_weights(tmp_path: Path) -> None:
    said, _ = run_in_processes(other_strategies, WORKERS, str(tmp_path))
    assert len(said) == 2
    assert "they belong to gradients, but this run exchanges weights" in said[0]
    assert "they belong to weights, but this run exchanges gradients" in said[1]
