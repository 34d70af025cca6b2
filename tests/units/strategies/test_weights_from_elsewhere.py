"""Weights and buffers that callbacks or modules put in place of others are those that train."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LearningRateFinder
from torch import nn

from lightning_gc import OuterSGD, TopK
from lightning_gc.lightning.for_pytorch_lightning import (
    SimulatedDDPStrategy,
    SimulatedLocalStepsStrategy,
)
from tests.support.fitting import quiet_trainer, unwarned

LOADED = 0.25


class Module(pl.LightningModule):
    """Learns to be zero; ``ema`` is assigned to, or changed in place."""

    ema: torch.Tensor
    table: torch.Tensor

    def __init__(self, assigns: bool = False, loads: str = "", rows: int = -1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.lr = nn.Linear(40, 40), 0.05
        self.assigns, self.loads, self.rows = assigns, loads, rows
        self.register_buffer("ema", torch.zeros(40))
        if rows > 0:
            self.register_buffer("table", torch.ones(rows, 1), persistent=False)

    def setup(self, stage: str) -> None:
        self._load("setup")

    def on_fit_start(self) -> None:
        self._load("on_fit_start")

    def _load(self, place: str) -> None:
        if place == self.loads:
            with torch.no_grad():
                self.net.weight.fill_(LOADED)

    def _grown(self, rows: int) -> torch.Tensor:
        """Return a table of at least so many rows, as tables of positions grow."""
        if rows > self.rows:
            self.rows = rows
            self.register_buffer("table", torch.ones(rows, 1), persistent=False)
        table: torch.Tensor = self.table
        return table[:rows]

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if self.rows >= 0:
            batch = batch * self._grown(len(batch))
        moved = 0.5 * self.ema + batch.mean(0)
        if self.assigns:
            self.ema = moved
        else:
            self.ema.copy_(moved)
        return self.net(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.validated = self.net.weight.detach().clone()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.5)


class Swaps(pl.Callback):
    """Validates other weights, as callbacks do that keep a moving average of their own."""

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.own = pl_module.net.weight.detach().clone()
        pl_module.net.weight.data.fill_(LOADED)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net.weight.data.copy_(self.own)


class Restores(pl.Callback):
    """Stops after some steps, and sets weights in a hook."""

    def __init__(self, hook: str, stop: int = -1) -> None:
        self.stop = stop
        setattr(self, hook, self._restore)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == self.stop

    def _restore(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net.weight.data.fill_(LOADED)


class Begins(pl.Callback):
    """Notes each simulated worker's weights with which the second epoch begins."""

    seen: torch.Tensor

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        rounds = trainer.strategy._all_rounds
        self.seen = torch.stack([self._weights(each) for each in rounds])

    @staticmethod
    def _weights(rounds: Any) -> torch.Tensor:
        with rounds.present():
            weights: torch.Tensor = rounds.weights.fragments[0].weights()
        return weights


def trained(
    strategy: Any,
    finder: bool = False,
    root: Path | None = None,
    callbacks: Sequence[pl.Callback] = (),
    validates: bool = False,
    **options: Any,
) -> Module:
    torch.manual_seed(0)
    module, draw = Module(**options), torch.Generator().manual_seed(2)
    search = LearningRateFinder(num_training_steps=12, update_attr=False, early_stop_threshold=None)
    rows: Any = torch.randn(48, 40, generator=draw)
    with unwarned():
        called = [search] if finder else [*callbacks]
        settings: Any = {"callbacks": called, "max_epochs": 2, "default_root_dir": root}
        data = torch.utils.data.DataLoader(rows, batch_size=4)
        if module.rows >= 0:  # more in each step, as many for both workers
            growing: Any = [rows[: 2 * (index // 2) + 3] for index in range(12)]
            data = torch.utils.data.DataLoader(growing, batch_size=None)
        trainer: Any = quiet_trainer(strategy, **settings)
        trainer.fit(module, data, data if validates else None)
        assert set(called) >= set(trainer.callbacks), "ours has left"
    return module


def local(**options: Any) -> SimulatedLocalStepsStrategy:
    return SimulatedLocalStepsStrategy(TopK(0.1), workers=2, every=4, **options)


def close(one: Module, other: Module) -> None:
    """Up to the rounding of a mean of equal weights."""
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"state": "mean"}, {"state": "off"}, {"outer": OuterSGD.diloco()}, {"delay": 1}],
    ids=str,
)
def test_a_search_for_a_learning_rate_leaves_no_trace(
    options: dict[str, Any], tmp_path: Path
) -> None:
    searched = trained(local(**options), finder=True, root=tmp_path)
    close(searched, trained(local(**options)))


def test_weights_loaded_when_the_fit_begins_are_those_of_all() -> None:
    close(trained(local(), loads="on_fit_start"), trained(local(), loads="setup"))


@pytest.mark.parametrize("options", [{}, {"show": "local"}, {"delay": 2}], ids=str)
def test_weights_swapped_in_for_a_validation_are_not_trained(options: dict[str, Any]) -> None:
    """An epoch has six steps, so it ends within a round of four."""
    swapped = trained(local(**options), callbacks=[Swaps()], validates=True)
    torch.testing.assert_close(swapped.validated, torch.full((40, 40), LOADED))
    torch.testing.assert_close(
        swapped.state_dict(), trained(local(**options)).state_dict(), rtol=0, atol=0
    )


@pytest.mark.parametrize("options", [{}, {"delay": 2}], ids=str)
def test_weights_loaded_in_a_validation_are_those_of_all(options: dict[str, Any]) -> None:
    begins = Begins()
    callbacks = [begins, Restores("on_validation_end")]
    trained(local(**options), callbacks=callbacks, validates=True)
    assert torch.equal(begins.seen[0], begins.seen[1])
    assert (begins.seen[0] == LOADED).sum() == 1600


@pytest.mark.parametrize("options", [{}, {"outer": OuterSGD.diloco()}, {"delay": 1}], ids=str)
def test_weights_loaded_when_the_fit_ends_are_its_result(options: dict[str, Any]) -> None:
    """A fit that is stopped within a round: the exchange that ends it comes before callbacks."""
    restored = trained(local(**options), callbacks=[Restores("on_train_end", stop=5)])
    assert torch.equal(restored.net.weight, torch.full((40, 40), LOADED))


@pytest.mark.parametrize(
    "strategy", [local, lambda: SimulatedDDPStrategy(TopK(0.1), workers=2)], ids=["local", "ddp"]
)
def test_a_buffer_that_is_assigned_is_each_workers_own(strategy: Any) -> None:
    close(trained(strategy(), assigns=True), trained(strategy()))


class Held(pl.Callback):
    """Notes the memory of each simulated worker's table."""

    seen: set[int]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen = set()
        for worker in range(2):
            with trainer.strategy._entered(worker):
                self.seen.add(pl_module.table.data_ptr())


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize(
    "strategy", [local, lambda: SimulatedDDPStrategy(TopK(0.1), workers=2)], ids=["local", "ddp"]
)
def test_a_buffer_may_be_registered_or_grow_within_the_fit(strategy: Any, rows: int) -> None:
    """And training is as with one that is large enough from the beginning."""
    close(trained(strategy(), rows=rows), trained(strategy(), rows=13))


def test_a_buffer_that_is_new_is_each_workers_own() -> None:
    held = Held()
    trained(local(), rows=0, callbacks=[held])
    assert len(held.seen) == 2
