"""What a controller is told matches NumPy, and outlives a checkpoint."""

import json
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gc import TopK
from lightning_gc.control.control_loop import ControlLoop, Moment
from lightning_gc.control.probes import WorkerStatistics
from lightning_gc.controllers import Decision, Needs, Observation
from lightning_gc.exchange.peers import Peers
from tests.support.controlled_workers import CPU, NUMEL, Listens, Training, loop


@pytest.mark.parametrize("apart", [0.0, 2.0])  # scale of what workers' gradients differ by
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("steps", [2, 5])
def test_moments_of_gradients(workers: int, steps: int, apart: float) -> None:
    """Noise is the sample variance, with n - 1; what it adds to squared norms is taken off.

    Nothing is cut off at 0, where estimates of an average would be too large.
    """
    training = Training(workers)
    controller = Listens()
    control = ControlLoop(controller, training.workers)
    control.attach()
    peers = Peers(True, CPU, mean=lambda tensor: tensor)
    control.decide(0, [training.sgd], lambda: Moment({}), peers)
    draw = np.random.default_rng(steps)
    own = draw.standard_normal((workers, 1, NUMEL)) * apart
    made = own + draw.standard_normal((workers, steps, NUMEL))
    for step in range(steps):
        training.step(made[:, step])
    control.decide(1, [training.sgd], lambda: Moment({}), peers)

    noise = made.var(axis=1, ddof=1).sum(1).mean()
    means = made.mean(axis=1)  # (W, NUMEL)
    squared = np.square(means).sum(1).mean()
    zeta = squared - np.square(means.mean(axis=0)).sum() - noise / steps * (1 - 1 / workers)
    told = controller.told[-1]
    assert told.gradient_noise == pytest.approx(noise, rel=1e-4)
    assert told.gradient_squared == pytest.approx(squared - noise / steps, rel=1e-4, abs=1e-4)
    assert told.gradient_dissimilarity == pytest.approx(zeta, rel=1e-4, abs=1e-4)


class Scaled(Listens):
    needs = Needs(scale=True)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_scale_of_gradients_since_the_last_decision(workers: int) -> None:
    """The root mean square over steps, workers and elements; and the rates of the rest."""
    training, controller = Training(workers), Scaled()
    control = ControlLoop(controller, training.workers)
    control.attach()
    peers = Peers(True, CPU, mean=lambda tensor: tensor)
    draw, asked = np.random.default_rng(0), []

    def to_come() -> list[float]:
        asked.append(training.workers.first.step)
        return [0.1] * (7 - asked[-1])

    made: list[np.ndarray] = []
    for epoch, steps in enumerate((0, 1, 4)):
        for _ in range(steps):
            made.append(draw.standard_normal((workers, NUMEL)) * (1 + epoch))
            training.step(made[-1])
        control.decide(epoch, [training.sgd], partial(Moment, {}, rates_to_come=to_come), peers)
        told, recent = controller.told[-1], made[len(made) - steps :]
        expected = np.sqrt(np.mean(np.square(recent))) if steps else 0.0
        assert told.gradient_scale == pytest.approx(expected, rel=1e-5)
        assert told.rates_ahead == pytest.approx([0.1] * (7 - len(made)))
    assert asked == [0]  # what has been foretold once comes true


def test_estimates_of_a_mean_are_not_off() -> None:
    """Equal workers, no gradient but noise: squared norm and dissimilarity are 0 on average."""
    draw, controller = np.random.default_rng(0), Listens()
    training = Training(3)
    decide = loop(training, controller)
    for epoch in range(60):
        decide(epoch)
        for _ in range(3):
            training.step(draw.standard_normal((3, NUMEL)))
    for name in ("gradient_squared", "gradient_dissimilarity"):
        figures = np.array([getattr(told, name) for told in controller.told[1:]])
        assert (figures < 0).any()
        assert abs(figures.mean()) < 3 * figures.std() / len(figures) ** 0.5


class FirstBatch(Listens):
    needs = Needs(gradients="first batch")


def test_a_first_batch_is_told_before_the_second() -> None:
    """And at the end of the epoch, with all else that is of whole epochs."""
    training, controller = Training(2), FirstBatch()
    decide = loop(training, controller)
    made = np.random.default_rng(0).standard_normal((2, 3, 2, NUMEL))
    for epoch in range(2):
        for step in range(3):
            decide(epoch)
            training.step(made[epoch, step])
    decide(2)
    norms = [np.linalg.norm(made[epoch, 0, 0]) for epoch in range(2)]  # worker 0's
    told = [(o.epoch, o.ended, o.steps, o.gradient_norms.get("w")) for o in controller.told]
    assert told == [
        (-1, True, 0, None),
        (-1, False, 1, pytest.approx(norms[0])),
        (0, True, 2, pytest.approx(norms[0])),
        (0, False, 1, pytest.approx(norms[1])),
        (1, True, 2, pytest.approx(norms[1])),
    ]


class Warns(Listens):
    """Warns in its second decision."""

    def decide(
        self, observation: Observation, state: dict[str, Any]
    ) -> tuple[Decision, dict[str, Any]]:
        decision, state = super().decide(observation, state)
        return replace(decision, warning="Raise it." if len(self.told) == 2 else ""), state


def test_a_decisions_warning_is_given_by_worker_0_only() -> None:
    training = Training(1)
    decide = loop(training, Warns())
    decide(0)
    with pytest.warns(UserWarning, match=r"^Raise it\.$"):
        decide(1)
    decide(2)
    peers = Peers(False, CPU, mean=lambda tensor: tensor)
    text = json.dumps({"decision": asdict(Decision(0.1, warning="Raise it.")), "pause": 0})
    other = ControlLoop(Warns(), training.workers)
    other._apply_decision(peers, text.replace('"pause"', '"state": {}, "pause"'))


def test_density_is_of_all_elements() -> None:
    """Those of tensors that are sent whole count as sent; without compression all do."""
    training, controller = Training(1, TopK(0.1)), Listens()
    shapes = {"matrix": (64, 64), "vector": (50,)}
    training.workers.names = {torch.nn.Parameter(torch.zeros(s)): n for n, s in shapes.items()}
    decide = loop(training, controller)
    for epoch, level in enumerate((0.1, None)):
        decide(epoch)
        training.workers.set_levels(level)
        for _ in range(3):
            training.step(np.random.default_rng(epoch).standard_normal((1, 4096 + 50)))
    decide(2)
    before, compressed, uncompressed = controller.told
    assert before.density == 0
    assert (before.num_elements, before.num_compressed) == (4146, 4096)
    assert compressed.sent_elements == 3 * (410 + 50)
    assert compressed.density == pytest.approx(460 / 4146)
    assert uncompressed.density == 1


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
    workers.regroup([["w"]])
    workers.start(workers.accounts, revocable=False)  # another fit, before the first round
    assert workers.regrouping is None
