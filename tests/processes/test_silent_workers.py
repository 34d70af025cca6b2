"""When a worker hangs, dies or is told to stop, the others end within the timeout."""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_gc import TopK
from tests.support.fitting import ddp, fit
from tests.support.local_steps import local
from tests.support.models import Books, Doubling, own_batches
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes
TIMEOUT = timedelta(seconds=3)


class Deserts(Books):
    """Worker 1 never comes back from its sixth step."""

    dies = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == 5:
            if self.dies:
                os._exit(1)
            time.sleep(60)
        return super().training_step(batch, batch_idx)


class Dies(Deserts):
    dies = True


def train(worker: int, model: type[Books]) -> None:
    strategy, batches = ddp(TopK(0.1), timeout=TIMEOUT), own_batches(worker, 10)
    fit(strategy, model, batches, devices=2, use_distributed_sampler=False)


def train_late(worker: int) -> bool:
    time.sleep(2 * TIMEOUT.total_seconds() * worker)
    train(worker, Books)
    return True


def train_with(worker: int, model: type[Books]) -> tuple[str, float]:
    started = time.monotonic()
    try:
        train(worker, model)
    except RuntimeError as error:
        return str(error), time.monotonic() - started
    raise AssertionError("the fit ended as if nothing had happened")


@pytest.mark.parametrize("model", [Deserts, Dies])
def test_the_others_end_with_an_error(model: type[Books]) -> None:
    """It names worker 1, which is killed by the test when worker 0 has reported."""
    message, seconds = run_in_processes(train_with, 2, model, timeout=40, wait_for=1)[0]
    assert "Worker 0: all-gather with worker 1 failed" in message
    assert "imed out" in message or "onnection" in message
    assert seconds < 30


@pytest.mark.nightly
def test_a_worker_may_be_late() -> None:
    """Later than the timeout of a collective: nobody counts as lost before the first one."""
    assert run_in_processes(train_late, 2) == [True, True]


class Told(pl.Callback):
    """Sends its own process SIGTERM as a step begins, or when it has ended, at step ``step``."""

    def __init__(self, step: int, ended: bool = False) -> None:
        self.step, self.ended = step, ended

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.tell(trainer.global_step == self.step and not self.ended)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.tell(trainer.global_step == self.step and self.ended)

    def tell(self, now: bool) -> None:
        if now:
            os.kill(os.getpid(), signal.SIGTERM)


class Plain(Doubling):
    training_step = Doubling.loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


Made = Callable[..., Any]
STRATEGIES: dict[str, tuple[Made, dict[str, Any]]] = {
    "DDP": (ddp, {}),
    "local steps": (local, {"every": 4}),
    "local steps, overlapped": (local, {"every": 4, "delay": 2}),
}


def told(worker: int, name: str, told: dict[int, Told]) -> tuple[str, Any]:
    """Return how a worker ends some of which are told to stop, and its exit code."""
    made, options = STRATEGIES[name]
    try:
        fit(
            # Longer than the test may take: nothing here waits for a timeout.
            made(TopK(0.1), timeout=timedelta(minutes=5), **options),
            Plain,
            own_batches(worker, 12),
            devices=2,
            use_distributed_sampler=False,
            callbacks=[told[worker]] if worker in told else [],
        )
    except (RuntimeError, SystemExit) as error:
        return type(error).__name__, getattr(error, "code", 1)
    return "the fit ended as if nothing had happened", 0


STOPS = [("SIGTERMException", code) for code in (None, 143)]  # 143 with Lightning after 2.6
NAMES = ["DDP", "local steps", pytest.param("local steps, overlapped", marks=pytest.mark.nightly)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_sigterm_to_one_worker_is_a_peer_error_of_the_others(name: str, who: int) -> None:
    """The signal finds it within a round, where nothing else is exchanged."""
    ends = run_in_processes(told, 2, name, {who: Told(6)}, timeout=40)
    assert ends[who] in STOPS
    assert ends[1 - who] == ("PeerError", 1)


@pytest.mark.parametrize("name", NAMES)
def test_sigterm_to_all_workers_stops_all_without_an_error(name: str) -> None:
    """Also one that gets it a step later, and waits in an exchange for one that has gone."""
    ends = run_in_processes(told, 2, name, {0: Told(7, ended=True), 1: Told(7)}, timeout=40)
    assert ends[0] == ends[1]
    assert ends[0] in STOPS
