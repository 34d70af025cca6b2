"""Callback that records seconds, loss and bytes of every step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_gc.methods.lightning_flavour import pl

WARMUP_STEPS = 4
"""Steps that are not measured: DDP rebuilds its buckets, PowerSGD's hook sends dense gradients."""


class StepTimer(pl.Callback):
    """Records seconds, loss and bytes of every step of the optimizer.

    With accumulated gradients a step has several batches. The time between batches, when data are
    fetched, is left out.

    Args:
        sent_bytes: ``(trainer) -> bytes sent so far``; called when a step begins.
        steps: stop after so many, whatever the Trainer's limits; None obeys these.

    Attributes:
        seconds: of each step.
        losses: of each step, this worker's; empty if the module neither returns nor logs one.
        sent: bytes sent before each step.
    """

    def __init__(self, sent_bytes: Callable[[Any], int], steps: int | None = None) -> None:
        self.sent_bytes, self.steps = sent_bytes, steps
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.sent: list[int] = []
        self._spent: list[float] = []  # seconds of the batches of this step
        self._losses: list[float] = []
        self._step = 0

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Remove what could end the run before its last step."""
        if self.steps is not None:
            # Schedulers have been made by now, and have read the length of the run.
            trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_loop.max_steps = -1
            # These would need a validation, and none is run.
            schedulers = trainer.strategy.lr_scheduler_configs
            schedulers[:] = [each for each in schedulers if not each.reduce_on_plateau]

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Start the clock."""
        if not self._spent:
            self.sent.append(self.sent_bytes(trainer))
        _wait(trainer)
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, _: Any, outputs: Any, *rest: Any) -> None:
        """Stop the clock; at the end of a step, record it."""
        _wait(trainer)
        self._spent.append(time.perf_counter() - self.started)
        loss = _loss(trainer, outputs)
        self._losses += [] if loss is None else [float(loss)]
        if trainer.global_step == self._step:
            return
        self.seconds.append(sum(self._spent))
        # Lightning divides losses by the number of batches whose gradients are accumulated.
        self.losses += [sum(self._losses)] if self._losses else []
        self._step, self._spent, self._losses = trainer.global_step, [], []
        if len(self.seconds) == self.steps:
            trainer.should_stop = True

    def bytes_per_step(self, warmup: int = WARMUP_STEPS) -> float:
        """Return the mean number of bytes of a step after so many."""
        return (self.sent[-1] - self.sent[warmup]) / (len(self.sent) - warmup - 1)


def _loss(trainer: Any, outputs: Any) -> Any:
    """Return the loss that the module has returned, else logged, as in manual optimisation."""
    if isinstance(outputs, dict) and "loss" in outputs:
        return outputs["loss"]
    logged = trainer.callback_metrics
    return next((value for name, value in logged.items() if name.endswith("loss")), None)


def _wait(trainer: Any) -> None:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
