"""Real workers of given speeds train as simulated ones, and measured ones end rounds together."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gc import QSGD, NoMemory, PerParameter, Unequal
from tests.processes.test_simulated_local_steps import Adam, run, whole
from tests.support.processes import run_in_processes
from tests.support.resuming import checkpoint
from tests.support.simulation import real, simulated

pytestmark = pytest.mark.processes
HALF = Unequal(pace=(1.0, 0.4), weigh="tokens")


class Counting(Adam):
    """Counts only some numbers of a batch; it never sees a batch that its worker skips."""

    def tokens(self, batch: torch.Tensor) -> int:
        return int((batch > 0).sum())


CASES: dict[str, dict[str, Any]] = {
    "tokens": {"module": Counting, "options": {"every": 5, "unequal": HALF}},
    "clipped, accumulated, delayed": {
        "module": Counting,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.1,
        "options": {
            "every": 4,
            "delay": 1,
            "fragments": 2,
            "unequal": Unequal(pace=(0.5, 1), median_clip=True),
        },
    },
    "without errors": {
        "compressor": PerParameter(QSGD(4)),
        "options": {"every": 4, "memory": NoMemory(), "unequal": Unequal(pace=(1, 0.5))},
    },
}


def test_equal_to_simulated_workers() -> None:
    cases = [whole(case) for case in CASES.values()]
    runs = zip(*run_in_processes(real, 2, 2, cases), strict=True)
    for name, case, them in zip(CASES, cases, runs, strict=True):
        accumulated = case.get("accumulate_grad_batches", 1)
        us = simulated(2, case | {"accumulate_grad_batches": 2 * accumulated})
        assert us["steps"] == them[0]["steps"] >= 12
        made = [len(run["seen"]) for run in them]
        assert len(us["seen"]) == sum(made)
        assert min(made) < 0.7 * max(made), name
        assert us["digest"] == them[0]["digest"] == them[1]["digest"], name
        assert us["memory"] == [run["memory"][0] for run in them], name


def test_resumes_bit_for_bit(tmp_path: Path) -> None:
    case = {"module": Adam, "options": {"every": 4, "unequal": HALF}}
    undisturbed = run("simulated", tmp_path / "whole", case)
    run("real", tmp_path / "crashed", case, crash=5)
    resumed = run(
        "simulated", tmp_path / "on", case, resume=checkpoint(tmp_path / "crashed", 0, 15)
    )
    for what in ("digest", "memory", "steps"):
        assert undisturbed[what] == resumed[what]


class Slow(Counting):
    """Worker 1 pretends that its steps take twice as long, by a clock that the test moves."""

    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        share = strategy._rounds.share
        share.clock.now = lambda worker: float(len(self.seen)) * (1 + self.global_rank)
        share.restart()


def measured(worker: int) -> int:
    case = whole({"module": Slow, "options": {"every": 5, "unequal": Unequal()}})
    return len(real(worker, 2, [case])[0]["seen"])


def test_a_worker_that_is_measured_as_slow_makes_fewer_steps() -> None:
    first, second = run_in_processes(measured, 2)
    assert first == 30
    assert second == 5 + 5 * 2, "all of the first round, then two or three of five"
