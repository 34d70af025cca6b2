"""Forecast of learning rates: run copies of the schedulers to the end of the training."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

PARTS = 100
"""Of the rest of a run, for which a controller gets learning rates."""


class Forecast:
    """Keeps the learning rates to come, for as long as the run keeps to them."""

    def __init__(self) -> None:
        self._rates: Sequence[float] = ()
        self._first = 0  # step of the first

    def ahead(
        self, step: int, rate: float, rates_to_come: Callable[[], Sequence[float]]
    ) -> tuple[float, ...]:
        """Return the mean rate of each of up to ``PARTS`` equal parts of the rest of the run.

        Args:
            step: the next one.
            rate: its learning rate.
            rates_to_come: returns that of every step from this one on; asked if it is not known, or
                has turned out otherwise.
        """
        left = self._rates[step - self._first :]
        if not left or not math.isclose(left[0], rate, rel_tol=1e-6):
            self._rates, self._first = rates_to_come(), step
            left = self._rates
        size = max(-(-len(left) // PARTS), 1)
        parts = [left[i : i + size] for i in range(0, len(left), size)]
        return tuple(sum(part) / len(part) for part in parts)


class Scheduled(NamedTuple):
    """A scheduler, and how many optimizer steps there are between two of its own."""

    scheduler: LRScheduler
    every: int


def forecast(
    optimizers: Iterable[Optimizer], scheduled: Sequence[Scheduled], done: int, total: int
) -> list[float]:
    """Return the largest learning rate of each step from ``done`` to ``total - 1``.

    Schedulers and optimizers are not changed: copies are stepped whose parameters are empty. What
    depends on the training, such as ``ReduceLROnPlateau``, is taken to stay as it is.

    Args:
        optimizers: of the run.
        scheduled: its schedulers.
        done: finished steps.
        total: steps of the whole run.
    """
    copies = {optimizer: _without_state(optimizer) for optimizer in optimizers}
    memo: dict[int, object] = {id(optimizer): copied for optimizer, copied in copies.items()}
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
    """Yield the objects whose methods are schedules, such as the module: they are not copied."""
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _owners(inner)
    for schedule in getattr(scheduler, "lr_lambdas", ()):
        if inspect.ismethod(schedule):
            yield schedule.__self__


def _without_state(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the same settings of its groups, and an empty parameter in each."""
    groups = [
        {name: _number(value) for name, value in group.items() if name != "params"}
        | {"params": [torch.zeros(0, dtype=torch.float32, device="cpu")]}
        for group in optimizer.param_groups
    ]
    return torch.optim.SGD(groups, lr=0.0) if groups else optimizer


def _number(value: object) -> object:
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value
