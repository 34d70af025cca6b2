"""The controller's turn: between two epochs, worker 0 decides and all workers obey."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gc.controllers import Controller, Decision, Observation
from lightning_gc.engine import Engine
from lightning_gc.strategies.training_progress import epochs_of, progress_of, steps_of
from lightning_gc.strategies.worker_statistics import Counts, Watch
from lightning_gc.transports.distributed import broadcast_text


class Turn:
    """Takes a controller's turn before the first step of every epoch, and within if it asks.

    At the beginning of an epoch validation is over and the learning rate is that of the next step,
    so the observation is complete. All workers take part in one packed all-reduce of plain numbers;
    worker 0 decides; one broadcast carries decision, reason and new state, or the error on which
    all workers stop. It also says after how many steps the next turn is due, as workers may have
    different notions of an epoch's length.

    Args:
        controller: the policy.
        engines: whose levels it sets: one per worker of this process.
        shapes: parameter name -> shape, of all parameters.

    Attributes:
        watches: what each of these workers has done since the last turn.
        state: the controller's state, equal on all workers.
        decision: the last decision.
        ended: it was taken between two epochs.
    """

    def __init__(
        self,
        controller: Controller,
        engines: Sequence[Engine],
        shapes: dict[str, tuple[int, ...]],
    ) -> None:
        self.controller = controller
        self.engine = engines[0]
        self.watches = [Watch(engine, controller) for engine in engines]
        self.shapes = shapes
        self.state = controller.init()
        self.decision: Decision | None = None
        self.ended = True
        self._epoch: int | None = None  # the epoch that has been decided on
        self._pause = 0  # steps between two turns within an epoch; 0: none
        self._epoch_step = self.engine.step  # where the epoch began
        self._rate = 0.0
        self._metrics: dict[str, float] = {}  # of a checkpoint
        self._resumed = -1  # the step at which the run went on from it
        self._seen_step = self.engine.step

    def attach(self, accounts: Sequence[Counts]) -> None:
        """Read bytes from the accounts of a new fit, one per worker."""
        for watch, account in zip(self.watches, accounts, strict=True):
            watch.attach(account)

    def take(self, strategy: Any, trainer: Any, batch: int) -> None:
        """Decide, if it is time. Called before every training batch, by all workers."""
        rate = float(max(g["lr"] for opt in strategy.optimizers for g in opt.param_groups))
        begins = self._epoch != trainer.current_epoch
        if begins or self._due():
            observation = self._observe(strategy, trainer, batch, rate, begins)
            said = self._decide(observation, trainer) if strategy.global_rank == 0 else None
            self.ended, self._epoch = begins, trainer.current_epoch
            self._obey(strategy, said)
        self._rate = rate

    def _due(self) -> bool:
        """Whether so many steps have been done since the last turn, or as many as before it."""
        done = self.engine.step - self._seen_step
        return self._pause > 0 and done >= max(min(self._seen_step, self._pause), 1)

    def state_dict(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is equal on all workers, in plain values.

        Args:
            metrics: as they are now: a checkpoint comes before the turn that reads them.
        """
        return {
            "state": self.state,
            "decision": None if self.decision is None else dataclasses.asdict(self.decision),
            "ended": self.ended,
            "epoch": self._epoch,
            "pause": self._pause,
            "rate": self._rate,
            "steps": self.engine.step - self._seen_step,
            "epoch_steps": self.engine.step - self._epoch_step,
            "metrics": {name: float(value) for name, value in metrics.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``; the engine's step has been restored."""
        self.state, self.ended, self._epoch = state["state"], state["ended"], state["epoch"]
        self._pause, self._rate = state["pause"], state["rate"]
        self._seen_step = self.engine.step - state["steps"]
        self._epoch_step = self.engine.step - state["epoch_steps"]
        self._metrics, self._resumed = state["metrics"], self.engine.step
        if state["decision"] is not None:
            self.decision = Decision(**state["decision"])
            self._set_levels(self.decision)

    def _decide(self, observation: Observation, trainer: Any) -> str:
        """Ask the controller; return what is broadcast."""
        try:
            decision, state = self.controller.decide(observation, self.state)
            turns, steps = self.controller.turns(trainer.current_epoch), steps_of(trainer)
            pause = 0 if steps is None or turns < 1 else max(steps // turns, 1)
            said = {"decision": dataclasses.asdict(decision), "state": state, "pause": pause}
            return json.dumps(said)
        except Exception as error:  # whatever it is, the other workers must not wait for ever
            return json.dumps({"error": f"{type(error).__name__}: {error}"})

    def _obey(self, strategy: Any, text: str | None) -> None:
        said = json.loads(broadcast_text(text, strategy.root_device))
        if "error" in said:
            raise RuntimeError(
                f"The controller failed on worker 0, so all workers stop. {said['error']}"
            )
        self.decision, self.state = Decision(**said["decision"]), said["state"]
        self._pause = said["pause"]
        self._set_levels(self.decision)

    def _set_levels(self, decision: Decision) -> None:
        for watch in self.watches:
            watch.engine.set_levels(decision.level, decision.levels)

    def _observe(
        self, strategy: Any, trainer: Any, batch: int, rate: float, ended: bool
    ) -> Observation:
        steps, self._seen_step = self.engine.step - self._seen_step, self.engine.step
        figures = [watch.figures() for watch in self.watches]
        wire, dense, density, total_error = _mean(strategy, figures)
        for watch in self.watches:
            watch.begin()
        return Observation(
            epoch=trainer.current_epoch - 1,
            learning_rate=self._rate if steps else rate,
            next_learning_rate=rate,
            metrics=self._seen_metrics(trainer) if steps else {},
            total_error=total_error,
            wire_bytes=wire,
            dense_bytes=dense,
            steps=steps,
            num_elements=sum(torch.Size(shape).numel() for shape in self.shapes.values()),
            density=density,
            max_epochs=epochs_of(trainer),
            progress=progress_of(trainer, batch),
            ended=ended,
            **(self._close_epoch(strategy) if ended else {}),
        )

    def _seen_metrics(self, trainer: Any) -> dict[str, float]:
        """Return what has been logged; Lightning does not restore it where a run goes on."""
        before = self._metrics if self._resumed == self.engine.step else {}
        return before | {n: float(v) for n, v in trainer.callback_metrics.items()}

    def _close_epoch(self, strategy: Any) -> dict[str, Any]:
        """Return what is known of whole epochs only, and begin the next one."""
        steps, self._epoch_step = self.engine.step - self._epoch_step, self.engine.step
        moments = self._moments(strategy, steps)
        gradients = self.controller.gradients != "none" and steps
        norms = self.watches[0].observer.norms() if gradients else {}
        for watch in self.watches:
            watch.observer.end_epoch()
        return {
            "gradient_norms": self._compressed(norms),
            "error_norms": self._compressed(_norms(self.engine.errors())),
            **moments,
        }

    def _compressed(self, norms: dict[str, float]) -> dict[str, float]:
        return {n: v for n, v in norms.items() if self.engine.compressor.compresses(self.shapes[n])}

    def _moments(self, strategy: Any, steps: int) -> dict[str, float]:
        """Tell gradient, noise and dissimilarity apart, each without the bias of a finite epoch."""
        observers = [watch.observer for watch in self.watches]
        if not observers[0].moments or steps < 2:
            return {}
        means = [observer.sum() / steps for observer in observers]
        owns = [float(mean.double().square().sum()) for mean in means]
        spread = [
            (observer.squares() / steps - own) * steps / (steps - 1)
            for observer, own in zip(observers, owns, strict=True)
        ]
        mean = strategy.reduce(sum(means[1:], means[0]) / len(means), reduce_op="mean")
        together = float(mean.double().square().sum())
        noise, own = _mean(strategy, zip(spread, owns, strict=True))
        apart = own - together - noise / steps * (1 - 1 / self.engine.workers)
        return {
            "gradient_noise": max(noise, 0.0),
            "gradient_squared": max(own - noise / steps, 0.0),
            "gradient_dissimilarity": max(apart, 0.0),
        }


def _norms(named: dict[str, Tensor]) -> dict[str, float]:
    if not named:
        return {}
    norms = torch.stack([torch.linalg.vector_norm(tensor) for tensor in named.values()])
    return dict(zip(named, norms.tolist(), strict=True))


def _mean(strategy: Any, rows: Iterable[Sequence[float]]) -> list[float]:
    """Return the mean over workers, in one message; a row for each worker of this process."""
    packed = torch.tensor(list(rows), dtype=torch.float64, device=strategy.root_device).mean(0)
    mean: list[float] = strategy.reduce(packed, reduce_op="mean").tolist()
    return mean
