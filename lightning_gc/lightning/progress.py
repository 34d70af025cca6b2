"""Training progress: length, progress and learning rates to come of a Lightning run."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_gc.control.control_loop import Moment
from lightning_gc.together import Together


def moment_of(trainer: Any, batch: int) -> Moment:
    """Return metrics and progress before batch ``batch``, for a controller."""
    return Moment(
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        max_epochs=epochs_of(trainer),
        total_steps=steps_of(trainer),
        progress=progress_of(trainer, batch),
        step_metrics=step_metrics_of(trainer),
        rates_to_come=partial(rates_to_come, trainer, batch) if steps_of(trainer) else None,
    )


def show(trainer: Any, name: str, value: str) -> None:
    """Show a text beside the metrics of the progress bar, until Lightning resets them."""
    trainer._logger_connector._progress_bar_metrics[name] = value  # ``log`` takes numbers only


def rates_to_come(trainer: Any, batch: int) -> list[float]:
    """Return the learning rate of every optimizer step from the next to the run's last."""
    total, per_epoch = steps_of(trainer), _steps_per_epoch(trainer)
    assert total is not None
    done = round((progress_of(trainer, batch) or 0.0) * total)
    scheduled = []
    for each in trainer.strategy.lr_scheduler_configs:
        every = each.frequency if each.interval == "step" else each.frequency * (per_epoch or 0)
        scheduled.append(Scheduled(each.scheduler, every))
    return forecast(trainer.strategy.optimizers, scheduled, done, total)


def step_metrics_of(trainer: Any) -> tuple[str, ...]:
    """Return the training metrics that have the last batch's value: logged per step only."""
    logged = trainer.fit_loop.epoch_loop._results.result_metrics
    metas = (each.meta for each in logged)
    return tuple(sorted({meta.name for meta in metas if meta.on_step and not meta.on_epoch}))


def metrics_due(trainer: Any) -> set[str]:
    """Return the metrics that are yet to get their values of the epoch under way.

    Lightning keeps their values of the epoch before: of training, until the epoch's end; of
    validation, until it has run after the batch that has just ended.
    """
    fit, current = trainer.fit_loop, trainer.fit_loop.epoch_progress.current
    if current.processed >= current.ready:
        return set()  # the epoch has ended
    collections = [fit.epoch_loop._results]
    if trainer.training and fit.epoch_loop._should_check_val_fx(fit._data_fetcher):
        collections.append(fit.epoch_loop.val_loop._results)
    return {
        name
        for logged in collections
        for each in logged.result_metrics
        if each.meta.on_epoch
        for name in logged._forked_name(each, on_step=False)
    }


def steps_of(trainer: Any) -> int | None:
    """Return the run's number of optimizer steps; None if unknown or without end."""
    epochs, per_epoch = trainer.max_epochs, _steps_per_epoch(trainer)
    ends = [] if trainer.max_steps == -1 else [int(trainer.max_steps)]
    if epochs not in (None, -1) and per_epoch is not None:
        ends.append(int(epochs) * per_epoch)
    return min(ends, default=None)


def epochs_of(trainer: Any) -> int | None:
    """Return the run's number of epochs; None if it has no end."""
    steps, per_epoch = steps_of(trainer), _steps_per_epoch(trainer)
    if steps is not None and per_epoch is not None:
        return math.ceil(steps / per_epoch)
    return None if trainer.max_epochs in (None, -1) else int(trainer.max_epochs)


def progress_of(trainer: Any, batch: int) -> float | None:
    """Return the finished share of the run before batch ``batch``; None if it has no end.

    If an epoch's length is unknown, as with an iterable dataset, steps are counted if they end the
    run, else whole epochs.
    """
    steps, epochs, per_epoch = steps_of(trainer), epochs_of(trainer), _steps_per_epoch(trainer)
    if steps is not None and per_epoch is not None:
        within = batch // int(trainer.accumulate_grad_batches)
        return min((int(trainer.current_epoch) * per_epoch + within) / max(steps, 1), 1.0)
    if steps is not None:
        return min(int(trainer.global_step) / max(steps, 1), 1.0)
    return None if epochs is None else min(int(trainer.current_epoch) / max(epochs, 1), 1.0)


def _steps_per_epoch(trainer: Any) -> int | None:
    batches = trainer.num_training_batches
    if batches == float("inf"):
        return None
    return max(math.ceil(int(batches) / int(trainer.accumulate_grad_batches)), 1)


class Scheduled(NamedTuple):
    """A scheduler, and the optimizer steps between two of its steps."""

    scheduler: LRScheduler
    every: int


def forecast(
    optimizers: Iterable[Optimizer], scheduled: Sequence[Scheduled], done: int, total: int
) -> list[float]:
    """Return the largest learning rate of each step from ``done`` to ``total - 1``.

    Schedulers and optimizers are not changed: copies with empty parameters are stepped. What
    depends on the training, such as ``ReduceLROnPlateau``, is taken to stay as it is.

    Args:
        optimizers: of the run.
        scheduled: its schedulers.
        done: finished steps.
        total: steps of the whole run.
    """
    copies = {optimizer: _without_state(optimizer) for optimizer in optimizers}
    memo: dict[int, object] = {id(optimizer): copied for optimizer, copied in copies.items()}
    for optimizer, copied in copies.items():
        if isinstance(optimizer, Together) and isinstance(copied, Together):
            memo |= zip(map(id, optimizer.optimizers), copied.optimizers, strict=True)
    memo |= {id(owner): owner for each in scheduled for owner in _owners(each.scheduler)}
    stepped = [
        Scheduled(copy.deepcopy(scheduler, dict(memo)), every)
        for scheduler, every in scheduled
        if every and not isinstance(scheduler, ReduceLROnPlateau)
    ]
    groups = [group for stand_in in copies.values() for group in stand_in.param_groups]
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer has made no step
        for step in range(done, total):
            rates.append(float(max(group["lr"] for group in groups)))
            for scheduler, every in stepped:
                if (step + 1) % every == 0:
                    scheduler.step()
    return rates


def _owners(scheduler: Any) -> Iterator[object]:
    """Yield the objects of methods that are schedules, such as the module: they are not copied."""
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _owners(inner)
    for schedule in getattr(scheduler, "lr_lambdas", ()):
        if inspect.ismethod(schedule):
            yield schedule.__self__


def _without_state(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the same settings of its groups, and an empty parameter in each."""
    if isinstance(optimizer, Together):
        return Together(map(_without_state, optimizer.optimizers))
    groups = [
        {name: _number(value) for name, value in group.items() if name != "params"}
        | {"params": [torch.zeros(0, dtype=torch.float32, device="cpu")]}
        for group in optimizer.param_groups
    ]
    return torch.optim.SGD(groups, lr=0.0) if groups else optimizer


def _number(value: object) -> object:
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value
