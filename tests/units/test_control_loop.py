"""What a controller is told matches NumPy, and outlives a checkpoint."""

from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from lightning_gc import PerParameter, TopK
from lightning_gc.controllers import Controller, Decision, Observation
from lightning_gc.synchronizer import Workers
from lightning_gc.synchronizer.configuration import configure
from lightning_gc.synchronizer.control_loop import ControlLoop, Moment, Peers
from lightning_gc.synchronizer.worker_statistics import WorkerStatistics
from lightning_gc.transports.simulated_accounting import Ledger

CPU = torch.device("cpu")
NUMEL = 40


class Listens(Controller):
    """Remembers its observations and changes nothing."""

    gradients = "epoch sum"
    moments = True

    def __init__(self) -> None:
        self.told: list[Observation] = []

    def init(self) -> dict[str, Any]:
        return {}

    def decide(
        self, observation: Observation, state: dict[str, Any]
    ) -> tuple[Decision, dict[str, Any]]:
        self.told.append(observation)
        return Decision(0.1), state


class Training:
    """W workers of one parameter in one process, without Lightning."""

    sgd: ClassVar = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

    def __init__(self, workers: int) -> None:
        self.workers = Workers(configure("test", PerParameter(TopK(0.1)), None, None, 0))
        self.workers.names = {torch.nn.Parameter(torch.zeros(NUMEL)): "w"}
        self.ledger = Ledger(workers)
        self.workers.start(self.ledger.pages, revocable=False)

    def step(self, gradients: np.ndarray) -> None:
        """Exchange one gradient per worker, ``(W, NUMEL)``."""
        rows = torch.tensor(gradients, dtype=torch.float32)
        flows = [
            self.workers.flow(engine, row.clone(), self.workers.shapes)
            for engine, row in zip(self.workers.engines, rows, strict=True)
        ]
        self.workers.end_round([self.workers.shapes])
        self.ledger.run(flows, CPU)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("steps", [2, 5])
def test_moments_of_gradients(workers: int, steps: int) -> None:
    """Noise is the sample variance, with n - 1; what it adds to squared norms is taken off."""
    training = Training(workers)
    controller = Listens()
    control = ControlLoop(controller, training.workers)
    control.attach()
    peers = Peers(True, CPU, mean=lambda tensor: tensor)
    control.decide(0, [training.sgd], lambda: Moment({}), peers)
    draw = np.random.default_rng(steps)
    own = draw.standard_normal((workers, 1, NUMEL)) * 2
    made = own + draw.standard_normal((workers, steps, NUMEL))
    for step in range(steps):
        training.step(made[:, step])
    control.decide(1, [training.sgd], lambda: Moment({}), peers)

    noise = made.var(axis=1, ddof=1).sum(1).mean()
    means = made.mean(axis=1)  # (W, NUMEL)
    squared = np.square(means).sum(1).mean()
    apart = squared - np.square(means.mean(axis=0)).sum() - noise / steps * (1 - 1 / workers)
    told = controller.told[-1]
    assert told.gradient_noise == pytest.approx(noise, rel=1e-4)
    assert told.gradient_squared == pytest.approx(squared - noise / steps, rel=1e-4)
    assert told.gradient_dissimilarity == pytest.approx(max(apart, 0), rel=1e-4, abs=1e-4)


def test_a_resume_keeps_the_figures_since_the_last_decision() -> None:
    """Bytes, dense bytes and density: the second half is counted by another process."""
    draw = np.random.default_rng(0)
    whole, first, second = Training(2), Training(2), Training(2)
    counts = {
        each: [WorkerStatistics(engine, Listens()) for engine in each.workers.engines]
        for each in (whole, first, second)
    }
    for training, statistics in counts.items():
        for each, account in zip(statistics, training.workers.accounts, strict=True):
            each.attach(account)
    for step in range(6):
        made = draw.standard_normal((2, NUMEL))
        whole.step(made)
        (first if step < 4 else second).step(made)
        if step == 1:
            for each in (*counts[whole], *counts[first]):
                each.begin()
        if step == 3:
            for old, new in zip(counts[first], counts[second], strict=True):
                new.load_own_state(old.own_state())
    for one, other in zip(counts[whole], counts[second], strict=True):
        assert all(figure > 0 for figure in one.figures()[:3])
        assert other.figures() == one.figures()


def test_the_layout_of_a_checkpoint_is_used_if_it_has_the_same_parameters() -> None:
    workers = Training(1).workers
    workers.regroup([["w"]])
    assert workers.regrouping is not None
    assert workers.regrouping.layout == [("w",)]
    for other in ([["w"], ["new"]], [], [["w", "w"]]):
        workers.regroup(other)
        assert workers.regrouping is None
