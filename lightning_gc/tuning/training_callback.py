"""The callback of a run that is judged: tells what was logged, obeys, keeps the best weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from lightning_gc.tuning.early_stopping import Streak
from lightning_gc.tuning.experiment import Experiment
from lightning_gc.tuning.lightning_flavour import pl

Ask = Callable[[Mapping[str, float]], bool]


class Watch(pl.Callback):
    """Asks after each training epoch with a validation in it whether the run goes on.

    Worker 0 asks; all workers obey. Stands after the monitor in the list of callbacks, for it
    hands on the monitor's figures.

    Args:
        ask: given all figures that were logged, and the epoch's ``seconds`` of training; returns
            whether to go on.
        best_of: keep the best epoch's weights and end with them; None to end with the last ones.

    Attributes:
        interrupted: the user has pressed Ctrl-C, which Lightning turns into an exit.
    """

    def __init__(self, ask: Ask, best_of: Experiment | None = None) -> None:
        self.ask = ask
        self.interrupted = False
        self._experiment = best_of
        self._streak = Streak(best_of) if best_of is not None else None
        self._weights: dict[str, Any] | None = None
        self._began = 0.0
        self._seconds: float | None = None
        self._validated = False

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._began, self._seconds, self._validated = time.perf_counter(), None, False

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock; of several validations the last one counts."""
        self._seconds = time.perf_counter() - self._began

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note that there is something new to judge."""
        self._validated = not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ask, and obey."""
        if not self._validated:
            return
        go_on, better = True, True
        if trainer.is_global_zero:
            figures = {n: float(v) for n, v in trainer.callback_metrics.items() if v.numel() == 1}
            seconds = self._seconds or 0.0
            go_on = self.ask({**figures, "seconds": seconds})
            better = self._improves(figures)
        strategy: Any = trainer.strategy
        if self._streak is not None and strategy.reduce_boolean_decision(better):
            weights = pl_module.state_dict()
            self._weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
        if not strategy.reduce_boolean_decision(go_on):
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go back to the best weights."""
        if self._weights is not None:
            pl_module.load_state_dict(self._weights)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Tell Ctrl-C from a failure."""
        self.interrupted = isinstance(exception, KeyboardInterrupt)

    def _improves(self, figures: Mapping[str, float]) -> bool:
        if self._streak is None or self._experiment is None:
            return False
        value = figures.get(self._experiment.metric, math.nan)
        return math.isfinite(value) and self._streak.add(value) == 0
