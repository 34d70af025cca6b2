"""All workers follow one controller: the same levels, and the same error where it fails."""

import functools
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_gc import (
    QSGD,
    Cast,
    ErrorFeedback,
    HardThreshold,
    Identity,
    Menu,
    PerParameter,
    PowerSGD,
    TopK,
)
from lightning_gc.controllers import (
    Accordion,
    Chain,
    Controller,
    Decision,
    DynamicBitWidth,
    Fixed,
    Needs,
    Observation,
    Schedule,
    TotalError,
    TotalErrorBudget,
)
from lightning_gc.lightning.for_pytorch_lightning import CompressedDDPStrategy, CompressionMonitor
from tests.support.fitting import ddp, fit
from tests.support.models import Books, own_batches
from tests.support.processes import standing

pytestmark = pytest.mark.processes


class Measured(Books):
    """Validates, lets the learning rate fall once, and notes the levels of every epoch."""

    def __init__(self, milestone: int = 100) -> None:
        super().__init__()
        self.milestone = milestone
        self.seen: list[dict[str, float | None]] = []
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)  # no gradient, no level

    def noted(self) -> dict[str, Any]:
        return super().noted() | {"levels of epochs": self.seen}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.seen.append(self.trainer.strategy.levels())  # type: ignore[attr-defined]
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), lr=0.1)
        return [sgd], [torch.optim.lr_scheduler.MultiStepLR(sgd, [self.milestone], 0.1)]


@dataclass(frozen=True)
class Spy(Controller):
    """Hands everything that it sees to the test."""

    inner: Controller
    moments: bool = True
    per_run: int = 0

    @property
    def needs(self) -> Needs:
        return Needs(gradients="epoch sum", moments=self.moments, errors=True)

    def turns(self, epoch: int) -> int:
        return self.per_run if epoch != 1 else 0

    def init(self) -> dict[str, Any]:
        return {"inner": self.inner.init(), "seen": []}

    def decide(self, observation: Observation, state: Any) -> tuple[Decision, Any]:
        decision, inner = self.inner.decide(observation, state["inner"])
        seen = {k: dict(v) if hasattr(v, "items") else v for k, v in vars(observation).items()}
        seen["density"] = observation.density
        return decision, {"inner": inner, "seen": [*state["seen"], seen]}


@dataclass(frozen=True)
class Raises(Controller):
    def init(self) -> dict[str, Any]:
        return {}

    def decide(self, observation: Observation, state: Any) -> tuple[Decision, Any]:
        if observation.epoch == 1:
            raise KeyError("a bug in a policy")
        return Decision(0.1), state


def train(
    worker: int,
    compressor: Any,
    controller: Any,
    epochs: int = 4,
    milestone: int = 100,
    **settings: Any,
) -> dict[str, Any]:
    return fit(
        ddp(compressor, controller=controller, bucket_cap_mb=0.005),
        functools.partial(Measured, milestone),
        own_batches(worker, 6),
        own_batches(worker + 10, 2),
        devices=2,
        max_epochs=epochs,
        use_distributed_sampler=False,
        callbacks=[CompressionMonitor()],
        **settings,
    )


def both(*args: Any) -> dict[str, Any]:
    first, second = standing.run(train, 2, *args)
    for what in ("digest", "levels of epochs", "controller"):
        assert first[what] == second[what]
    return first  # type: ignore[no-any-return]


EVERYWHERE = PerParameter(TopK(0.5))
WEIGHTS = ["body.0.weight", "body.2.weight", "head.weight"]


def test_schedule_moves_the_level_each_epoch() -> None:
    run = both(EVERYWHERE, Schedule((0.5, 0.2, None, 0.1)))
    assert [set(levels.values()) for levels in run["levels of epochs"]] == [
        {0.5},
        {0.2},
        {None},
        {0.1},
    ]


def test_a_schedule_changes_the_method() -> None:
    """Replicas stay equal over every change; each method sends its own bytes."""
    menu = Menu({"dense": Identity(), "powersgd": PowerSGD(2), "topk": TopK(0.05), "cast": Cast()})
    place = {name: number for number, name in enumerate(menu.names, 1)}
    run = both(menu, Schedule(tuple(map(place.get, ("topk", "powersgd", "dense", "cast")))))
    assert [set(levels.values()) for levels in run["levels of epochs"]] == [
        {place["topk"], None},  # small tensors and biases
        {place["powersgd"], None},
        {None},
        {place["cast"]},
    ]
    last = run["metrics"]
    sent = last["compression_epoch/wire_bytes"] / last["compression_epoch/dense_bytes"]
    assert sent == pytest.approx(0.5, rel=0.02)  # Cast's


def test_levels_leave_what_is_dense_alone() -> None:
    """SizeSwitch by default: only the 40 x 40 matrix is compressed, and only it has a level."""
    run = both(TopK(0.5), Fixed(0.25), 2)
    assert run["levels of epochs"] == [{"body.2.weight": 0.25}] * 2
    assert run["metrics"]["compression_epoch/compressed_density"] == 0.25
    others = 8 * 40 + 40 + 40 + 40 * 4 + 4
    density = (400 + others) / (1600 + others)
    assert run["metrics"]["compression_epoch/density"] == pytest.approx(density)


def test_accordion_decides_per_parameter_from_worker_0() -> None:
    run = both(EVERYWHERE, Accordion(low=0.5, high=0.1, interval=1, threshold=0.3), 6)
    assert set(run["levels of epochs"][0].values()) == {0.5}
    assert set(run["levels of epochs"][1].values()) == {0.5}
    later = [level for levels in run["levels of epochs"][2:] for level in levels.values()]
    assert set(later) == {0.5, 0.1}
    assert "critical regime" in run["reason"]


def test_accordion_follows_a_falling_learning_rate() -> None:
    """Never critical by its norms; the rate falls after epoch 2."""
    run = both(EVERYWHERE, Accordion(low=0.5, high=0.1, interval=1, threshold=1e9), 5, 3)
    chosen = [set(levels.values()) for levels in run["levels of epochs"]]
    assert chosen == [{0.5}, {0.5}, {0.1}, {0.5}, {0.1}]


def test_a_first_batch_decides_for_its_own_epoch() -> None:
    """Levels are noted in the second step. Never critical by its norms; the rate falls before 3."""
    accordion = Accordion(low=0.5, high=0.1, interval=1, threshold=1e9, detector="minibatch")
    run = both(EVERYWHERE, accordion, 5, 3)
    chosen = [set(levels.values()) for levels in run["levels of epochs"]]
    assert chosen == [{0.5}, {0.1}, {0.1}, {0.5}, {0.1}]


def test_bit_width_rises_with_a_metric_to_be_minimised() -> None:
    controller = DynamicBitWidth(
        ((float("inf"), 3), (4.5, 6), (0.0, 16)), monitor="val_loss", mode="min", loss_delta=None
    )
    run = both(PerParameter(QSGD(4)), controller, 6)
    chosen = [set(levels.values()) for levels in run["levels of epochs"]]
    assert chosen[0] == {3}
    assert chosen[-1] == {6}


def test_total_error_keeps_to_its_budget() -> None:
    controller = TotalErrorBudget(0.1)
    run = both(PerParameter(HardThreshold(0.1)), controller, 20)
    metrics = run["metrics"]
    assert run["controller"]["over"] == pytest.approx(
        1 - 1 / 120
    )  # one step of the last turn is ahead
    assert 0.08 < run["controller"]["spent"] < 0.102  # of few and small tensors
    sent = metrics["compression/total_wire_bytes"] / metrics["compression/total_dense_bytes"]
    assert sent < 1
    assert "of the budget is spent" in run["reason"]


def test_turns_within_epochs() -> None:
    """4 epochs of 6 steps, 12 turns a run: after 1 and 2 steps, then every 2nd; epoch 1 has none.

    What belongs to whole epochs is told at their ends, of whole epochs; the rest since a turn ago.
    """
    seen = both(EVERYWHERE, Spy(Fixed(0.2), per_run=12))["controller"]["seen"]
    steps = [round(24 * o["progress"]) for o in seen]
    assert steps == [0, 1, 2, 4, 6, 12, 14, 16, 18, 20, 22]
    assert [o["steps"] for o in seen[1:]] == [b - a for a, b in itertools.pairwise(steps)]
    assert [o["ended"] for o in seen] == [step % 6 == 0 for step in steps]
    assert [o["epoch"] for o in seen] == [-1, -1, -1, -1, 0, 1, 1, 1, 2, 2, 2]
    assert all(bool(o["gradient_norms"]) == (o["ended"] and o["epoch"] >= 0) for o in seen)
    assert all(o["density"] == pytest.approx(0.2, rel=0.05) for o in seen[1:])
    whole = both(EVERYWHERE, Spy(Fixed(0.2)))["controller"]["seen"]
    ends = [o for o in seen if o["ended"]]
    for name in ("gradient_norms", "gradient_noise", "gradient_squared", "error_norms"):
        assert [o[name] for o in ends] == [o[name] for o in whole]


def test_chain_hands_over() -> None:
    chain = Chain(Schedule((0.5, 0.4)), Fixed(0.1), at_epoch=2)
    run = both(EVERYWHERE, chain, 4)
    assert [set(levels.values()) for levels in run["levels of epochs"]] == [
        {0.5},
        {0.4},
        {0.1},
        {0.1},
    ]


def test_what_a_controller_is_told() -> None:
    run = both(EVERYWHERE, Spy(Fixed(0.2)), 3, 1)
    first, second, third = run["controller"]["seen"]
    assert (first["epoch"], second["epoch"], third["epoch"]) == (-1, 0, 1)
    assert first["steps"] == 0
    assert first["metrics"] == {}
    assert first["num_elements"] == 8 * 40 + 40 + 40 * 40 + 40 + 40 * 4 + 4
    assert (second["steps"], second["max_epochs"]) == (6, 3)
    assert (second["learning_rate"], second["next_learning_rate"]) == (0.1, pytest.approx(0.01))
    assert third["learning_rate"] == pytest.approx(0.01)
    assert {"val_loss", "train_loss", "train_loss_epoch"} <= set(second["metrics"])
    assert set(second["gradient_norms"]) == set(run["levels of epochs"][0])
    assert second["density"] == pytest.approx(0.2, rel=0.05)
    assert second["dense_bytes"] == 6 * second["num_elements"] * 4
    assert 0 < second["wire_bytes"] < second["dense_bytes"]
    assert second["num_compressed"] == second["num_elements"]
    assert second["step_metrics"] == []  # train_loss is logged per epoch as well
    assert 0 < second["total_error"] < third["total_error"]
    assert second["total_error_update"] == pytest.approx(0.1**2 * second["total_error"])
    later = 0.01**2 * (third["total_error"] - second["total_error"])
    assert third["total_error_update"] - second["total_error_update"] == pytest.approx(later)
    assert run["metrics"]["compression/total_error_update"] > third["total_error_update"]
    assert second["gradient_noise"] > 0
    assert second["gradient_squared"] > 0
    assert second["error_norms"]["body.2.weight"] > 0


def logged(worker: int, folder: str) -> None:
    logger = TensorBoardLogger(folder, name="", version="")
    accordion = Accordion(low=0.5, high=0.1, interval=1, threshold=0.3)
    train(worker, EVERYWHERE, accordion, logger=logger, log_every_n_steps=2)


def test_the_run_shows_why(tmp_path: Path) -> None:
    """Reason and table of levels as text, level spread and critical share as curves."""
    standing.run(logged, 2, str(tmp_path))
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = events.Tags()
    expected = {"level", "level_min", "level_max", "critical_share", "uncompressed_share"}
    assert {f"~compression/{name}" for name in expected} <= set(tags["scalars"])
    assert len(events.Scalars("~compression/critical_share")) == 4
    texts = [
        e.tensor_proto.string_val[0].decode()
        for e in events.Tensors("compression/decision/text_summary")
    ]
    assert len(texts) == 4
    assert "critical regime" in texts[1]
    assert re.search(r"\| all \d+ \| 0\.", texts[1]), texts[1]


def failing(worker: int, controller: Any) -> str:
    with pytest.raises(RuntimeError, match="failed on worker 0, so all workers stop") as caught:
        train(worker, EVERYWHERE, controller)
    return str(caught.value)


def test_a_controller_that_raises_stops_all_workers() -> None:
    first, second = standing.run(failing, 2, Raises(), timeout=60)
    assert first == second
    assert "a bug in a policy" in first


def test_a_metric_that_is_never_logged() -> None:
    first, _ = standing.run(failing, 2, DynamicBitWidth(((0, 0.1),), monitor="val_acc"), timeout=60)
    assert "'val_acc'" in first
    assert "logged were: " in first
    assert "val_loss" in first


@pytest.mark.parametrize(
    ("compressor", "controller", "words"),
    [
        (TopK(), Accordion(low=0.01, high=0.1), ["low=0.01", "swap"]),
        (HardThreshold(), Accordion(low=0.1, high=0.01), ["low=0.1", "threshold", "swap"]),
        (TopK(), TotalError(k_min=0.001), ["a density", "HardThreshold"]),
        (Cast(), Fixed(0.1), ["has no level", "TopK(0.01)"]),
        (QSGD(), DynamicBitWidth(((0, 8), (0.5, 4))), ["8", "4", "less compression"]),
    ],
)
def test_controllers_that_cannot_turn_the_knob(
    compressor: Any, controller: Any, words: list[str]
) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        CompressedDDPStrategy(compressor, controller=controller)
    assert all(word in str(caught.value) for word in words)


def test_total_error_needs_a_memory() -> None:
    with pytest.raises(ValueError, match=r"memory=ErrorFeedback\(\)"):
        CompressedDDPStrategy(HardThreshold(), memory="none", controller=TotalError(k_min=0.01))
    CompressedDDPStrategy(
        HardThreshold(), memory=ErrorFeedback(), controller=TotalError(k_min=0.01)
    )
