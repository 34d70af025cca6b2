"""Train one model with a trial's hyper-parameters; test it in a final run."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import optuna

from lightning_gc.flavours import public_class
from lightning_gc.lightning.ddp import CompressedDDP
from lightning_gc.lightning.local_steps_strategy import RealLocalSteps
from lightning_gc.lightning.monitor import Monitor
from lightning_gc.lightning.simulation.ddp import SimulatedDDP
from lightning_gc.lightning.simulation.simulated_local_steps import SimulatedLocalSteps
from lightning_gc.methods.lightning_flavour import pl
from lightning_gc.methods.method import Method
from lightning_gc.tuning.early_stopping import TOTAL, BestTracker, look_up
from lightning_gc.tuning.experiment import Experiment

# Arguments of the Trainer that its tests need as well.
_TEST_ARGUMENTS = ("accelerator", "precision", "plugins", "limit_test_batches")


def fit(
    experiment: Experiment,
    method: Method,
    trial: optuna.trial.BaseTrial,
    ask: Ask,
    seed: int,
    final: bool = False,
) -> float | None:
    """Train one model and return the test metric of a final run.

    Args:
        experiment: the rules.
        method: how gradients are exchanged.
        trial: source of the hyper-parameters.
        ask: decides after each validation whether training continues.
        seed: of weights, order of data, and the compressor's random numbers.
        final: restore the best epoch's weights, and test them.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C.
        MissingMetric: the test metric was not logged.
    """
    pl.seed_everything(seed, verbose=False)
    compressor = method.suggest_compressor(trial)
    model, data, *more = experiment.build(trial)
    arguments = {**experiment.trainer, **(more[0] if more else {})}
    experiment.check_trainer(arguments)
    parts: dict[str, Any] = {
        "memory": method.suggest_memory(trial),
        "scheme": method.scheme,
        "controller": method.controller,
        "seed": seed,
    }
    rounds = method.suggest_rounds(trial)
    real, simulated = public_class(CompressedDDP), public_class(SimulatedDDP)
    if rounds is not None:
        real, simulated = public_class(RealLocalSteps), public_class(SimulatedLocalSteps)
        parts |= rounds.arguments
    if experiment.devices > 1:
        strategy = real(compressor, start_method="spawn", **parts)
    else:
        parts |= {"workers": experiment.workers, "network": experiment.network}
        strategy = simulated(compressor, **parts)
    ours = TrialCallback(ask, experiment if final else None)
    given = arguments.pop("callbacks", None) or []
    callbacks = given if isinstance(given, list) else [given]
    quiet: dict[str, Any] = {
        "logger": _NoLogger(),
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(
        **(quiet | arguments),
        strategy=strategy,
        devices=experiment.devices,
        enable_checkpointing=False,
        callbacks=[*callbacks, public_class(Monitor)(), ours],
    )
    _train(trainer, ours, model, data)
    if not final or experiment.test_metric is None:
        return None
    kept = {name: arguments[name] for name in _TEST_ARGUMENTS if name in arguments}
    tester = pl.Trainer(**(quiet | kept), devices=1, enable_checkpointing=False)
    tester.test(model, data, verbose=False)
    return look_up(experiment.test_metric, tester.callback_metrics, "test metric", "test_step")


def _train(trainer: pl.Trainer, callback: TrialCallback, model: Any, data: Any) -> None:
    # After Ctrl-C Lightning ignores further ones for ever and exits the process.
    handler = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(model, data)
    except SystemExit:
        if not callback.interrupted:
            raise
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)
        raise KeyboardInterrupt from None


class _NoLogger(pl.loggers.logger.DummyLogger):
    """Logs nothing: results go into the study."""


Ask = Callable[[Mapping[str, float]], bool]
"""``(logged metrics) -> whether training continues``."""


class TrialCallback(pl.Callback):
    """Callback that asks after each epoch with a validation whether training continues.

    Worker 0 asks and all obey. It must come after the monitor in the list of callbacks, because it
    passes on the monitor's metrics. If the last epoch has no validation, it passes on the totals.

    Args:
        ask: receives all logged metrics, the epoch's ``seconds`` of training, and its
            ``cpu_seconds``: CPU time of the process over its workers. At the end of training it
            receives the totals alone, and its answer is ignored.
        best_of: restore the weights of the best epoch at the end; None keeps the last weights.

    Attributes:
        interrupted: the user pressed Ctrl-C; Lightning turns it into an exit.
    """

    def __init__(self, ask: Ask, best_of: Experiment | None = None) -> None:
        self.ask = ask
        self.interrupted = False
        self._tracker = BestTracker(best_of) if best_of is not None else None
        self._weights: dict[str, Any] | None = None
        self._starts = self._spent = 0.0, 0.0  # wall clock and CPU time
        self._validated = False

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clocks."""
        self._starts, self._validated = _clocks(), False

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clocks; of several validations the last one counts."""
        (wall, cpu), (wall_start, cpu_start) = _clocks(), self._starts
        self._spent = wall - wall_start, cpu - cpu_start

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record that there are new metrics."""
        self._validated = not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ask, stop, and copy the best weights."""
        if not self._validated:
            return
        go_on, better, tracker = True, True, self._tracker
        strategy: Any = trainer.strategy
        if trainer.is_global_zero:
            logged = _logged(trainer)
            seconds, cpu = self._spent
            times = {"seconds": seconds, "cpu_seconds": cpu / len(strategy.engines)}
            go_on = self.ask(logged | times)
            if tracker is not None:
                value = logged.get(tracker.experiment.metric, math.nan)
                better = math.isfinite(value) and tracker.add(value) == 0
        if tracker is not None and strategy.reduce_boolean_decision(better):
            weights = pl_module.state_dict()
            self._weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
        if not strategy.reduce_boolean_decision(go_on):
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Pass on the totals of epochs without a validation; restore the best weights."""
        if trainer.is_global_zero and not self._validated:
            self.ask({n: v for n, v in _logged(trainer).items() if n.startswith(TOTAL)})
        if self._weights is not None:
            pl_module.load_state_dict(self._weights)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Record whether the exception is Ctrl-C."""
        self.interrupted = isinstance(exception, KeyboardInterrupt)


def _logged(trainer: pl.Trainer) -> dict[str, float]:
    return {n: float(v) for n, v in trainer.callback_metrics.items() if v.numel() == 1}


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
