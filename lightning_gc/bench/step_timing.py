"""A callback with a clock: seconds, loss and bytes of every step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_gc.tuning.lightning_flavour import pl

SKIPPED = 4
"""Steps at the beginning of a turn that do not count: DDP lays out its buckets, PowerSGD warms
up."""


class Watch(pl.Callback):
    """Takes the time, loss and bytes of every step.

    A step is what ends with the optimizer's: with accumulated gradients, several batches. The time
    between batches, when data are fetched, is left out.

    Args:
        counter: what this worker has sent so far, in bytes; read where a step begins.
        steps: the run is over after so many, whatever its Trainer says; None leaves it to that.

    Attributes:
        seconds: of each step.
        losses: of each step, this worker's own; none where the module neither returns nor logs one.
        sent: the counter at the beginning of each step.
    """

    def __init__(self, counter: Callable[[Any], int], steps: int | None = None) -> None:
        self.counter, self.steps = counter, steps
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.sent: list[int] = []
        self._spent: list[float] = []  # by the batches of this step, so far
        self._losses: list[float] = []
        self._step = 0

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Let nothing end the run before its steps are done."""
        if self.steps is None:
            return
        # Optimizers and schedulers have been made by now, and know how long a run would be.
        trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_loop.max_steps = -1
        # Such a scheduler would ask for a validation, and none is run.
        schedulers = trainer.strategy.lr_scheduler_configs
        schedulers[:] = [each for each in schedulers if not each.reduce_on_plateau]

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Start the clock."""
        if not self._spent:
            self.sent.append(self.counter(trainer))
        _wait(trainer)
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, _: Any, outputs: Any, *rest: Any) -> None:
        """Stop it."""
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

    def bytes_per_step(self) -> float:
        """Return what the counter has gained in a measured step, on average."""
        return (self.sent[-1] - self.sent[SKIPPED]) / (len(self.sent) - SKIPPED - 1)


def _loss(trainer: Any, outputs: Any) -> Any:
    """Return what the module has returned; in manual optimisation often nothing, but logged."""
    if isinstance(outputs, dict) and "loss" in outputs:
        return outputs["loss"]
    logged = trainer.callback_metrics
    return next((value for name, value in logged.items() if name.endswith("loss")), None)


def _wait(trainer: Any) -> None:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
