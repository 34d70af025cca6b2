"""Simulated workers refuse communication within a step; what real workers may do there stays."""

import re
import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, ThroughputMonitor, Timer
from pytorch_lightning.plugins.layer_sync import TorchSyncBatchNorm
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_gc import Identity
from lightning_gc.lightning.for_pytorch_lightning import (
    SimulatedDDPStrategy,
    SimulatedLocalStepsStrategy,
)
from tests.support.fitting import quiet_trainer
from tests.support.models import Plain, common_batches

STRATEGIES = [SimulatedDDPStrategy, SimulatedLocalStepsStrategy]


def made(kind: Any, workers: int = 2) -> Any:
    more = {"every": 2} if kind is SimulatedLocalStepsStrategy else {}
    return kind(Identity(), workers=workers, **more)


def fitted(
    module: Any,
    kind: Any = SimulatedDDPStrategy,
    workers: int = 2,
    resume: str | None = None,
    **settings: Any,
) -> Any:
    """Fit four micro-batches per epoch, with validation; return the Trainer."""
    trainer = quiet_trainer(made(kind, workers), **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice
        warnings.filterwarnings("error", ".*simulated workers")
        trainer.fit(module, common_batches(16, 4), common_batches(8, 4), ckpt_path=resume)
    return trainer


class Calls(Plain):
    """Calls ``act`` in the given hooks; ``acted`` has the names of hooks that have run."""

    def __init__(self, hooks: str | list[str], act: Any) -> None:
        super().__init__()
        self.hooks = [hooks] if isinstance(hooks, str) else hooks
        self.act, self.acted = act, set[str]()

    def acts(self, hook: str) -> None:
        if hook in self.hooks:
            self.act(self)
            self.acted.add(hook)

    def setup(self, stage: str) -> None:
        self.acts("setup")

    def on_fit_start(self) -> None:
        self.acts("on_fit_start")

    def on_train_start(self) -> None:
        self.acts("on_train_start")

    def on_train_epoch_start(self) -> None:
        self.acts("on_train_epoch_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.acts("on_train_batch_start")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.acts("on_before_batch_transfer")
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.acts("on_after_batch_transfer")
        return batch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.acts("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.acts("on_before_zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.acts("on_before_backward")

    def on_after_backward(self) -> None:
        self.acts("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.acts("on_before_optimizer_step")

    def configure_optimizers(self) -> Any:
        self.acts("configure_optimizers")
        sgd: Any = super().configure_optimizers()
        steps = torch.optim.lr_scheduler.StepLR(sgd, 1)
        return [sgd], [{"scheduler": steps, "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.acts("lr_scheduler_step")
        scheduler.step()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.acts("on_train_batch_end")

    def on_validation_epoch_start(self) -> None:
        self.acts("on_validation_epoch_start")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.acts("validation_step")

    def on_validation_epoch_end(self) -> None:
        self.acts("on_validation_epoch_end")

    def on_train_epoch_end(self) -> None:
        self.acts("on_train_epoch_end")

    def on_train_end(self) -> None:
        self.acts("on_train_end")


WITHIN = [
    "on_before_batch_transfer",
    "on_after_batch_transfer",
    "on_train_batch_start",
    "training_step",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "lr_scheduler_step",
    "on_train_batch_end",
]
OUTSIDE = [
    "setup",
    "configure_optimizers",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_validation_epoch_start",
    "validation_step",
    "on_validation_epoch_end",
    "on_train_epoch_end",
    "on_train_end",
]


def gathers(module: Any) -> None:
    module.all_gather(torch.ones(2), sync_grads=True)


OPERATIONS: dict[str, Any] = {
    "all_gather": lambda module: module.trainer.strategy.all_gather(torch.ones(2)),
    "reduce": lambda module: module.trainer.strategy.reduce(torch.ones(2), reduce_op="mean"),
    "broadcast": lambda module: module.trainer.strategy.broadcast("text"),
    "barrier": lambda module: module.trainer.strategy.barrier(),
    "reduce_boolean_decision": lambda m: m.trainer.strategy.reduce_boolean_decision(True),
}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_refused_in_each_hook_of_a_step(kind: Any) -> None:
    def is_refused(module: Any) -> None:
        words = rf"{kind.__name__}\.all_gather .* 2 simulated workers .*with processes"
        with pytest.raises(RuntimeError, match=words):
            gathers(module)

    module = Calls(WITHIN, is_refused)
    fitted(module, kind, max_epochs=2)
    assert module.acted == set(WITHIN)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_is_refused(operation: str) -> None:
    words = rf"SimulatedDDPStrategy\.{operation} .*CompressedDDPStrategy"
    with pytest.raises(RuntimeError, match=words):
        fitted(Calls("training_step", OPERATIONS[operation]))


def test_a_callback_is_refused_too() -> None:
    class Shares(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.strategy.broadcast(trainer.should_stop)

    with pytest.raises(RuntimeError, match=r"SimulatedDDPStrategy\.broadcast"):
        fitted(Plain(), callbacks=[Shares()])


@pytest.mark.parametrize("kind", STRATEGIES)
def test_allowed_outside_of_steps(kind: Any) -> None:
    def everything(module: Any) -> None:
        gathers(module)
        for operation in OPERATIONS.values():
            operation(module)

    module = Calls(OUTSIDE, everything)
    fitted(module, kind, max_epochs=2)
    assert module.acted == set(OUTSIDE)


@pytest.mark.filterwarnings("ignore:.*One worker")
def test_one_worker_may_do_all() -> None:
    """It has no other to exchange with, as a Trainer without a strategy."""
    for act in (gathers, *OPERATIONS.values(), lambda module: module.trainer.world_size):
        fitted(Calls("training_step", act), workers=1)
    module = Plain()
    module.body.insert(1, nn.SyncBatchNorm(40))
    fitted(module, workers=1, sync_batchnorm=True)


def test_after_an_exception_all_is_allowed() -> None:
    """A callback may synchronise when the run ends."""

    class Ends(pl.Callback):
        reduced = False

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.reduced = bool(trainer.strategy.reduce(torch.ones(1)))

    def fails(module: Any) -> None:
        raise ZeroDivisionError

    ends = Ends()
    with pytest.raises(ZeroDivisionError):
        fitted(Calls("training_step", fails), callbacks=[ends])
    assert ends.reduced


def test_resumed_within_an_epoch(tmp_path: Any) -> None:
    """The hooks before the first batch are outside of a step, wherever the epoch goes on."""
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    fitted(Plain(), callbacks=[saving])
    module = Calls(OUTSIDE, gathers)
    trainer = fitted(module, max_epochs=2, resume=str(tmp_path / "step=1.ckpt"))
    assert module.acted == set(OUTSIDE)
    assert trainer.global_step == 4


class Logs(Plain):
    """Logs with ``sync_dist``, by metrics, and asks where to write."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric(dist_sync_on_step=True, sync_on_compute=True)
        self.steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("least", loss, sync_dist=True, on_step=True, on_epoch=True, reduce_fx="min")
        assert self.trainer.log_dir  # Lightning broadcasts it
        self.trainer.print("")
        self.steps += 1
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validated", self.loss(batch, batch_idx), sync_dist=True)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_logging_and_lightnings_own_stay(kind: Any, tmp_path: Any) -> None:
    module = Logs()
    callbacks = [
        ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True),
        EarlyStopping("validated", patience=9),
        Timer("00:01:00:00", interval="step"),
        ThroughputMonitor(lambda batch: len(batch)),
    ]
    logger = pl.loggers.CSVLogger(tmp_path)
    trainer = fitted(module, kind, callbacks=callbacks, logger=logger, log_every_n_steps=1)
    assert module.steps == trainer.global_step == 2  # of each worker
    assert {"loss_epoch", "mean_epoch", "least_epoch", "validated"} <= set(trainer.callback_metrics)


def normed(layer: Any) -> Plain:
    module = Plain()
    module.body.insert(1, layer)
    return module


class NaiveSyncBatchNorm(nn.BatchNorm1d):
    """Named as the class of another library."""


@pytest.mark.parametrize(
    ("layer", "settings", "words"),
    [
        (nn.BatchNorm1d, {"sync_batchnorm": True}, r"sync_batchnorm.* of body\.1"),
        (nn.BatchNorm1d, {"plugins": [TorchSyncBatchNorm()]}, r"sync_batchnorm.* of body\.1"),
        (nn.SyncBatchNorm, {}, r"body\.1 is SyncBatchNorm"),
        (NaiveSyncBatchNorm, {}, r"body\.1 is NaiveSyncBatchNorm"),
    ],
)
def test_synchronised_batch_normalisation(layer: Any, settings: Any, words: str) -> None:
    with pytest.raises(ValueError, match=rf"{words}.*CompressedDDPStrategy with processes"):
        fitted(normed(layer(40)), **settings)
    with pytest.raises(ValueError, match=rf"{words}.*BatchNorm.*with each exchange"):
        fitted(normed(layer(40)), SimulatedLocalStepsStrategy, **settings)


def test_a_setting_that_changes_nothing_is_allowed() -> None:
    fitted(Plain(), sync_batchnorm=True)


@pytest.mark.parametrize(
    ("hook", "name", "there", "words"),
    [
        ("training_step", "world_size", "trainer", r"world_size, .* is 1 .*strategy\.workers"),
        ("setup", "world_size", "trainer", r"world_size, .* is 1 .*strategy\.workers"),
        ("configure_optimizers", "world_size", "trainer", r"world_size, .*strategy\.workers"),
        ("on_before_backward", "world_size", "strategy", r"world_size, .*strategy\.workers"),
        ("training_step", "global_rank", "trainer", r"global_rank, .* is 0 .*strategy\.worker"),
        ("on_after_backward", "global_rank", "module", r"global_rank, .*strategy\.worker"),
        ("training_step", "local_rank", "module", r"local_rank, .*strategy\.worker"),
    ],
)
def test_reads_of_a_workers_place_are_warned_of(
    hook: str, name: str, there: str, words: str
) -> None:
    def reads(module: Any) -> None:
        owner = {"trainer": module.trainer, "strategy": module.trainer.strategy, "module": module}
        assert getattr(owner[there], name) == (1 if name == "world_size" else 0)

    trainer = quiet_trainer(made(SimulatedDDPStrategy))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(Calls(hook, reads), common_batches(16, 4))
    ours = [each for each in told if "simulated workers" in str(each.message)]
    assert len(ours) == 1  # for all four batches
    assert ours[0].filename == __file__
    assert re.search(words, str(ours[0].message))


def test_reads_that_are_right() -> None:
    """Validation is not shared out, and a rank of 0 may make folders."""
    settings: dict[str, Any] = {"num_sanity_val_steps": 1, "max_epochs": 2}
    for name, hooks in {
        "world_size": ["validation_step", "on_validation_epoch_end"],
        "global_rank": OUTSIDE,
        "is_global_zero": [*WITHIN, *OUTSIDE],
    }.items():
        module = Calls(hooks, lambda module, name=name: getattr(module.trainer, name))
        fitted(module, **settings)
        assert module.acted == set(hooks)
