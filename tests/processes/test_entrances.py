"""Each entrance of a Trainer works without a fit: validate, test and predict, before and after one.

With each strategy, with and without the monitor, with and without a logger, and each twice.
"""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lightning_gc import QSGD, CompressionMonitor, TopK
from lightning_gc.lightning.for_pytorch_lightning import (
    CompressedHSDPStrategy,
    LocalStepsStrategy,
    SimulatedDDPStrategy,
    SimulatedLocalStepsStrategy,
)
from tests.support.accelerator import BACKEND
from tests.support.fitting import ddp, quiet_trainer, unwarned
from tests.support.fsdp import fsdp
from tests.support.hsdp import Sharded, batches
from tests.support.models import Plain
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes

STRATEGIES: dict[str, Any] = {
    "DDP": partial(ddp, TopK(0.1)),
    "local steps": partial(LocalStepsStrategy, QSGD(4), every=2, process_group_backend=BACKEND),
    "HSDP": partial(CompressedHSDPStrategy, TopK(0.1), process_group_backend=BACKEND),
    "FSDP": partial(fsdp, QSGD(8)),
    "simulated DDP": partial(SimulatedDDPStrategy, TopK(0.1), workers=2),
    "simulated local steps": partial(
        SimulatedLocalStepsStrategy, QSGD(4), workers=2, every=2, state="off"
    ),
}


class Entered:
    """Mixin of a module with a step for each entrance."""

    def validation_step(self: Any, batch: Tensor, batch_idx: int) -> None:
        self.log("held_out_loss", self(batch).square().mean(), sync_dist=True)

    def test_step(self: Any, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self(batch).square().mean(), sync_dist=True)

    def predict_step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        output: Tensor = self(batch).sum().detach()
        return output


class PlainEntered(Entered, Plain):
    def forward(self, batch: Tensor) -> Tensor:
        return self.loss(batch, 0)


class ShardedEntered(Entered, Sharded):
    pass


def enter(trainer: Any, model: Any, rank: int) -> list[Any]:
    """Return what each entrance returns, twice each."""
    found: list[Any] = []
    for _ in range(2):
        data = batches(rank, 2)
        found += trainer.validate(model, data, verbose=False)
        found += trainer.test(model, data, verbose=False)
        found.append([float(each) for each in trainer.predict(model, data)])
    return found


def all_ways(rank: int, ranks: int, kinds: list[str], folder: str) -> dict[str, list[Any]]:
    """Return what the entrances return with each strategy, without and with monitor and logger."""
    left: dict[str, list[Any]] = {}
    for kind, watched, logs in itertools.product(kinds, (False, True), (False, True)):
        torch.manual_seed(0)
        model: Any = ShardedEntered() if kind in ("HSDP", "FSDP") else PlainEntered()
        monitor = CompressionMonitor()
        logger = TensorBoardLogger(folder, name="", version=f"{kind} {watched}")
        settings: dict[str, Any] = {"callbacks": [monitor]} if watched else {}
        settings |= {"logger": logger if logs else False, "log_every_n_steps": 1}
        alone = kind.startswith("simulated")
        with unwarned():
            trainer = quiet_trainer(
                STRATEGIES[kind](),
                devices=1 if alone else ranks,
                use_distributed_sampler=False,
                **settings,
            )
            before = enter(trainer, model, rank)
            trainer.fit(model, batches(rank, 8), batches(rank, 2))
            state, scalars = monitor.state_dict(), scores(logger) if watched and logs else {}
            after = enter(trainer, model, rank)
        assert before[:3] == before[3:]
        assert after[:3] == after[3:]
        assert monitor.state_dict() == state
        if watched and logs:
            assert scores(logger) == scalars
        left.setdefault(kind, []).append((before, after, state["total"]["wire_bytes"]))
    return left


def scores(logger: Any) -> dict[str, list[Any]]:
    """Return the losses by which TensorBoard sorts runs, as written so far."""
    events = EventAccumulator(logger.log_dir).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("~compression")]
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}


def check(left: dict[str, list[Any]]) -> None:
    for kind, ways in left.items():
        (before, after, unwatched), *others = ways
        assert unwatched == 0
        assert all(way[:2] == (before, after) for way in others), kind
        assert before != after


@pytest.mark.parametrize("kinds", [list(STRATEGIES)[:2], list(STRATEGIES)[2:4]], ids=str)
def test_one_worker(kinds: list[str], tmp_path: Path) -> None:
    (left,) = run_in_processes(all_ways, 1, 1, kinds, str(tmp_path))
    check(left)


def test_simulated_workers(tmp_path: Path) -> None:
    check(all_ways(0, 1, list(STRATEGIES)[4:], str(tmp_path)))


@pytest.mark.parametrize("kind", ["DDP", "local steps", "FSDP"])
def test_two_workers(kind: str, tmp_path: Path) -> None:
    for left in run_in_processes(all_ways, 2, 2, [kind], str(tmp_path)):
        check(left)
