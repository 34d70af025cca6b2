"""Monitor: Lightning callback that logs bytes, ratios, levels, errors and seconds."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import statistics
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from lightning_gc.control.probes import StepClock
from lightning_gc.controllers import Decision
from lightning_gc.core.refusal import refuse
from lightning_gc.core.settings import CheckedCalls
from lightning_gc.engine import Engine
from lightning_gc.flavours import EitherLightning, package_of
from lightning_gc.lightning.monitor import totals
from lightning_gc.lightning.monitor.dashboard import (
    EPOCH,
    PREFIX,
    Dashboard,
    configuration,
    is_tensorboard,
)
from lightning_gc.transports.accounting import KEPT, Recorder

_log = logging.getLogger(__name__)


class _OfMonitors(CheckedCalls):
    """Metaclass of the monitor."""

    @property
    def state_key(cls) -> str:  # noqa: N805 - of a metaclass
        """Refuse the class where a Trainer asks a callback for its key, as it does when made."""
        raise ClassGivenError(
            f"Trainer(callbacks=[{cls.__name__}]): that is a class; give an instance of it, "
            f"{cls.__name__}()."
        )


class ClassGivenError(ValueError, AttributeError):
    """A class was given instead of an instance. Tools that list attributes pass over this error."""


class Monitor(EitherLightning, metaclass=_OfMonitors):
    """Logs bytes, errors, levels and seconds of compression, per logging step and per epoch.

    At each logging step it logs figures of worker 0 and that step, under ``compression/``:

    | tag | unit | meaning |
    |---|---|---|
    | ``wire_bytes`` | bytes | what the worker sent |
    | ``dense_bytes`` | bytes | what it would have sent uncompressed |
    | ``ratio`` | 1 | ``dense_bytes / wire_bytes``; 1 for one worker, which sends nothing |
    | ``encoded_bytes`` | bytes | the gradient's payloads and uncompressed tensors, once each |
    | ``encoding_ratio`` | 1 | the gradient's bytes over ``encoded_bytes``, for one worker too |
    | ``density`` | 1 | sent share of all elements; uncompressed ones count as sent |
    | ``compressed_density`` | 1 | the same, of compressed tensors only |
    | ``bits_per_element`` | bits | payload bits over the elements of compressed tensors |
    | ``level`` | the knob's | of the compressor; the median over parameters |
    | ``relative_error`` | 1 | ``‖x − C(x)‖ / ‖x‖``; x is the gradient plus the old error |
    | ``error_norm`` | gradient | ``‖x − C(x)‖`` |
    | ``compress_seconds`` | s | adding the error, selecting, packing |
    | ``communicate_seconds`` | s | messages, and waiting for other workers |
    | ``decode_seconds`` | s | unpacking and adding up |
    | ``step_seconds`` | s | a whole step: mean since the last logging step, no validation |
    | ``compress_share``, ... | 1 | of a step: mean since the last logging step, for each phase |
    | ``total_wire_bytes``, ``total_dense_bytes``, ``total_encoded_bytes`` | bytes | so far |
    | ``total_ratio``, ``total_encoding_ratio`` | 1 | so far |

    Phases overlap with the backward pass, so their seconds and shares do not add up to a step, but
    never to more. The first exchanges of a fit are not timed: they set up kernels and buffers.
    Norms, and seconds on CUDA, are measured in logging steps only.

    At the end of each epoch it logs the same under ``compression_epoch/``, as means over steps and
    workers (errors over logging steps), and the totals as means over workers. These are also in
    ``trainer.callback_metrics``, for Optuna and for the parent of spawned processes.

    | with | also | meaning |
    |---|---|---|
    | a controller | ``level_min``, ``level_max`` | over parameters |
    | a controller | ``uncompressed_share`` | share of parameters that are sent uncompressed |
    | a controller | its own figures | such as ``critical_share`` or ``budget_spent`` |
    | a controller | ``total_error`` | ``Σ‖e_t‖²`` so far, if it needs it; in gradients |
    | a controller | ``total_error_update`` | ``Σ γ_t²·‖e_t‖²``; in updates |
    | local steps | ``rounds`` | number of exchanges |
    | local steps | ``drift`` | ``‖θ − θ_i‖`` of worker 0 before the exchange |
    | elastic local steps | ``workers`` | number of members of the last round |
    | local steps | ``outer_step`` | norm of the outer step's change of the common weights |
    | FSDP with ``weights`` | ``weight_bytes`` | the part of ``wire_bytes`` for gathers of weights |
    | FSDP with ``weights`` | ``weight_level``, ... | of their compressor, named as above |
    | simulated workers | ``communication_seconds_estimated`` | by the ``NetworkModel`` |
    | simulated workers | ``compute_seconds``, ``compute_share`` | forward and backward passes |

    Local steps: bytes, ``ratio`` and seconds count all steps. An exchange is logged at the end of
    the first round that contains a logging step. FSDP over all ranks: ``dense_bytes`` count a
    reduce-scatter, half of DDP's bytes, and every exchanged micro-batch counts as a step. With
    ``weights`` both
    ``wire_bytes`` and ``dense_bytes`` count all-gathers too, also during validation.

    TensorBoard gets three pages, each without touching what the user writes there:

    - *Text*: ``compression/summary`` has the method, its bytes, its cost and the last losses. It is
      written whenever the number of steps has doubled, at the end of ``fit`` and at an exception.
      ``compression/decision`` has a controller's reasons and levels.
    - *Custom Scalars*: losses first, then what was saved and what it cost. Losses are the metrics
      with "loss" in their name. If there are none, they are what a checkpoint or early stopping
      monitors, or else the only metric. A chart is there once the run has data for it.
    - *HPARAMS*: the configuration beside the model's own hyperparameters. Its metrics begin with
      ``compression/validation_loss`` (the value of the first loss of validation; without
      validation ``training_loss``), the ratio and the seconds per step.

    At the end of ``fit`` worker 0 writes one line into Lightning's log: the method, its bytes
    compared with plain DDP's, its shares of a step, and where the figures are.

    Raises:
        ValueError: two monitors in one Trainer; at fit start, when the strategy does not compress.

    Warns:
        UserWarning: on worker 0, no logger; after the first epoch, a method that sends more than
            plain DDP.

    Example:
        >>> from lightning_gc import CompressionMonitor
        >>> monitor = CompressionMonitor()
    """

    elsewhere: ClassVar[Mapping[str, str]] = {
        "every": "; Trainer(log_every_n_steps=...) says how often it logs"
    }

    def __init__(self) -> None:
        super().__init__()
        self._joined = False
        self._sums = [totals.Sums()]  # one per worker of this process
        self._rounds = 0
        self._index = 0
        self._logged = -1
        self._decision: Decision | None = None
        self._judged = False  # whether an epoch sends too much
        self._clock = StepClock()
        self._dashboard = Dashboard()

    @property
    def state_key(self) -> str:
        """The name in checkpoints; until ``setup`` has refused a second monitor, a unique one."""
        # Trainers refuse callbacks with equal keys when they are made, in words of their own.
        name = type(self).__qualname__
        return name if self._joined else f"{name} {id(self)}"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Start at zero with a new trainer; what a checkpoint holds is loaded after this."""
        self._joined = True
        if sum(isinstance(each, Monitor) for each in trainer.callbacks) > 1:
            refuse(
                "Trainer(callbacks=...) has two CompressionMonitors, but one watches all workers "
                "and writes to every logger; give one"
            )
        if stage == "fit" and trainer.global_step == 0:
            self._sums, self._judged = [totals.Sums()], False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the strategy; log the configuration."""
        engines, _ = parts(trainer)
        first = self._sums[0]
        # Lightning loads a checkpoint's totals before the number of workers is known.
        self._sums += [totals.Sums(replace(first.total)) for _ in engines[len(self._sums) :]]
        trainer.strategy.checkpoint_parts.kept["monitor"] = self._sums
        if not trainer.loggers and trainer.is_global_zero:
            warnings.warn(
                "CompressionMonitor has no logger to write to, so its totals are in "
                "trainer.callback_metrics only; use Trainer(logger=True).",
                stacklevel=2,
            )
        self._dashboard = Dashboard()
        self._dashboard.begin(trainer)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                if not is_tensorboard(logger):
                    logger.log_hyperparams(configuration(trainer))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start counting; a checkpoint is restored already."""
        engines, recordings = parts(trainer)
        self._rounds = engines[0].step
        control = trainer.strategy.control_loop
        self._decision = None if control is None else control.decision
        for sums, engine, recording in zip(self._sums, engines, recordings, strict=True):
            sums.begin(engine, recording, trainer.strategy.parts)
        if recordings[0].exchanges is None:  # no controller needs them
            recordings[0].exchanges = deque(maxlen=KEPT)
        self._before = replace(self._sums[0].total)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Start the epoch's sums; measure norms in the steps that will be logged."""
        # Not at the epoch's end: Lightning leaves that out after a resume from its last batch.
        if batch_idx == 0:
            for sums in self._sums:
                sums.epoch = totals.Totals()
        # Lightning's x axis for logging: optimizer steps, with one or several optimizers.
        self._index = trainer.fit_loop.epoch_loop._batches_that_stepped
        self._clock.see(self._index, trainer.current_epoch)
        # Few local steps have an exchange; log it if its round holds a step to be logged.
        last = self._index - trainer.strategy.steps_since_exchange
        every = trainer.log_every_n_steps  # 0: never
        logs = bool(trainer.loggers and every) and (self._index + 1) // every > last // every
        for engine, recording in zip(*parts(trainer), strict=True):
            engine.statistics.norms_wanted = recording.timing = logs

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop the clock: validation does not count as part of a step."""
        if not fitting(trainer):
            return
        self._clock.pause(trainer.fit_loop.epoch_loop._batches_that_stepped)
        self._dashboard.see(trainer.logged_metrics)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Show the losses of the validation."""
        if fitting(trainer) and not trainer.sanity_checking:
            self._dashboard.see(trainer.logged_metrics, validating=True)
            self._dashboard.score("validation", self._index)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add and log the step's account, if gradients were synchronised."""
        engine = parts(trainer)[0][0]
        if engine.step == self._rounds:
            return  # an accumulating micro-batch
        self._rounds = engine.step
        logs = engine.statistics.norms_wanted and self._index != self._logged
        if self._sums[0].starting:
            self._clock.forget()
        if logs:
            self._take_time()
        step, *_ = [sums.take() for sums in self._sums]  # worker 0's is shown
        self._dashboard.settle()
        self._write_decision(trainer)
        if logs:
            self._logged = self._index
            total, network = self._sums[0].total, trainer.strategy.network
            figures = step.averages(engine.workers, network)
            # One step's seconds vary too much for a share.
            figures |= totals.shares(total.since(self._before).averages(engine.workers, network))
            self._before = replace(total)
            figures |= levels_of(trainer.strategy) | trainer.strategy.figures()
            figures = {PREFIX + name: value for name, value in figures.items()}
            self._write(trainer, figures | grand_totals(total), self._index)
            self._show(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Average the epoch over workers in one message and log it."""
        engines, _ = parts(trainer)
        self._take_time()
        packed = [sums.packed() for sums in self._sums]
        epoch, total = mean_of(trainer.strategy, packed, torch.float64)
        averages = totals.Totals(*epoch).averages(engines[0].workers, trainer.strategy.network)
        averages |= levels_of(trainer.strategy)
        if not self._judged:
            self._judged = True
            controlled = trainer.strategy.control_loop is not None
            first, engine = totals.Totals(*epoch), trainer.strategy.engine
            said = totals.more_than_plain(first, engine, controlled=controlled)
            if said and trainer.is_global_zero:
                warnings.warn(said, stacklevel=2)
        figures = {EPOCH + name: value for name, value in averages.items()}
        figures |= grand_totals(totals.Totals(*total)) | total_errors(trainer.strategy)
        self._write(trainer, figures, self._index)
        self._show(trainer)
        self._dashboard.score("training", self._index)
        trainer.callback_metrics.update(
            {
                name: torch.tensor(value, dtype=torch.float64, device="cpu")
                for name, value in figures.items()
            }
        )

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Summarise bytes and seconds of the fit in one line, on worker 0."""
        if trainer.is_global_zero and self._sums[0].total.steps:
            self._describe(trainer, "finished")
            self._dashboard.draw(last=True)
            # Lightning's own logger: it has a handler, and who silences Lightning silences this.
            logger = logging.getLogger(package_of(type(self)))
            line = line_of(trainer.strategy, self._sums[0].total)
            logger.info(f"{line} {where(trainer.loggers)}")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave a summary of the run so far."""
        if not fitting(trainer):
            return
        # A full disk or a lost GPU may be the exception. Failing here would hide it.
        with contextlib.suppress(OSError, RuntimeError):
            self._describe(trainer, f"stopped by {type(exception).__name__}")

    def _show(self, trainer: Any) -> None:
        """Bring TensorBoard's pages up to date. All ranks come here: Lightning may reduce."""
        self._dashboard.see(trainer.logged_metrics)
        self._dashboard.draw()
        if self._dashboard.due(self._sums[0].total.steps):
            self._describe(trainer, "in training")

    def _describe(self, trainer: Any, state: str) -> None:
        total = self._sums[0].total
        if total.steps and self._dashboard.used:
            state = f"{state} after {total.steps:,.0f} steps"
            line = line_of(trainer.strategy, total)
            self._dashboard.describe(line, total.steps, state, self._index)

    def state_dict(self) -> dict[str, Any]:
        """Return worker 0's totals: Lightning saves only these, the strategy all workers'."""
        return {"total": self._sums[0].own_state()["total"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint's totals."""
        for sums in self._sums:
            sums.total = totals.Totals(**state_dict["total"])

    def _take_time(self) -> None:
        spent, steps = self._clock.take()
        for sums in self._sums:
            sums.clock(spent, steps)

    def _write_decision(self, trainer: Any) -> None:
        """Log a new decision: its figures for all loggers, reason and levels for TensorBoard."""
        control = trainer.strategy.control_loop
        if control is None or control.decision is self._decision:
            return
        self._decision = control.decision
        found = control.decision.figures
        figures = {PREFIX + name: value for name, value in found.items() if math.isfinite(value)}
        if figures:
            self._write(trainer, figures, self._index)
        said = control.decision.says
        if trainer.is_global_zero and (control.ended or said):  # 80 tables would be unreadable
            if not said:  # else worker 0 has said it
                _log.info("Epoch %d: %s", trainer.current_epoch, control.decision.reason)
            levels, weights = trainer.strategy.levels(), trainer.strategy.weight_levels()
            levels |= {f"{name}, gathered": level for name, level in weights.items()}
            self._dashboard.decide(control.decision, levels, self._index)

    def _write(self, trainer: Any, figures: dict[str, float], step: int) -> None:
        self._dashboard.wrote(figures)
        for logger in trainer.loggers:
            last = {f"~{name}": value for name, value in figures.items()}  # of all charts, see OURS
            logger.log_metrics(last if is_tensorboard(logger) else figures, step=step)


def fitting(trainer: Any) -> bool:
    """Return whether ``fit`` is running: validation is also an entrance of its own."""
    return bool(trainer.state.fn == "fit")


def grand_totals(total: totals.Totals) -> dict[str, float]:
    """Return the totals of the whole fit by metric name."""
    return {
        PREFIX + "total_wire_bytes": total.wire_bytes,
        PREFIX + "total_dense_bytes": total.dense_bytes,
        PREFIX + "total_ratio": totals.ratio(total.dense_bytes, total.wire_bytes),
        PREFIX + "total_encoded_bytes": total.encoded_bytes,
        PREFIX + "total_encoding_ratio": totals.ratio(total.gradient_bytes, total.encoded_bytes),
    }


def parts(trainer: Any) -> tuple[Sequence[Engine], Sequence[Recorder]]:
    """Return this process's engines and accounts; ValueError if the strategy does not compress."""
    engines = getattr(trainer.strategy, "engines", ())
    recordings = getattr(trainer.strategy, "recordings", ())
    if not engines or not recordings:
        refuse(
            f"CompressionMonitor watches CompressedDDPStrategy, CompressedFSDPStrategy, "
            f"CompressedHSDPStrategy, LocalStepsStrategy and SimulatedDDPStrategy, but the Trainer "
            f"has {type(trainer.strategy).__name__}. Use one of these; "
            f"CompressedDDPStrategy(Identity()) equals plain DDP"
        )
    return engines, recordings


def mean_of(strategy: Any, rows: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """Return the mean over workers, in one message; one row per worker of this process."""
    own = torch.tensor(rows, dtype=dtype, device="cpu").mean(0)
    mean: list[Any] = strategy.reduce(own.to(strategy.root_device), reduce_op="mean").tolist()
    return mean


def total_errors(strategy: Any) -> dict[str, float]:
    """Return the total errors so far by metric name, where a controller needs them."""
    collected = [engine.statistics.epoch for engine in strategy.engines]
    watched = [epoch for epoch in collected if epoch is not None and epoch.errors]
    if not watched:
        return {}
    own = [[each.total_error, each.total_error_update] for each in watched]
    # In float32: beyond that, they depend on the order in which buckets were added.
    names = PREFIX + "total_error", PREFIX + "total_error_update"
    return dict(zip(names, mean_of(strategy, own, torch.float32), strict=True))


def line_of(strategy: Any, total: totals.Totals) -> str:
    """Return what a worker has sent so far and what it cost."""
    engine, method, network = strategy.engine, str(strategy.compressor), strategy.network
    if strategy.control_loop is not None:
        method += f" with {type(strategy.controller).__name__}"
    if engine.tally.local_steps:
        method += f" in {engine.step} exchanges"
    averages = total.averages(engine.workers, network)
    requests = tuple(strategy.recordings[0].exchanges or ())
    return totals.summary(method, total, averages, network, engine.workers, requests)


def levels_of(strategy: Any) -> dict[str, float]:
    """Return the levels in force by metric name."""
    weights = level_figures(strategy.weight_levels())
    if strategy.control_loop is not None:
        named = {f"weight_{name}": value for name, value in weights.items()}
        return level_figures(strategy.levels()) | named
    levels = {"level": strategy.engine.compressor.level, "weight_level": weights.get("level")}
    return {name: level for name, level in levels.items() if level is not None}


def level_figures(levels: Mapping[str, float | None]) -> dict[str, float]:
    """Return median, minimum and maximum level, and the share of those that are uncompressed."""
    numbers = [level for level in levels.values() if level is not None]
    figures = {"uncompressed_share": 1 - len(numbers) / len(levels)} if levels else {}
    if numbers:
        figures["level"] = statistics.median(numbers)
        figures["level_min"], figures["level_max"] = min(numbers), max(numbers)
    return figures


def where(loggers: Sequence[Any]) -> str:
    """Return a sentence that says where the logged figures are.

    Args:
        loggers: the Trainer's. TensorBoard's come first; of the others the first one is named.
    """
    found = sorted(loggers, key=lambda each: type(each).__name__ != "TensorBoardLogger")
    if not found:
        return "Totals: trainer.callback_metrics."
    first = found[0]
    charts = type(first).__name__ == "TensorBoardLogger"
    folder = str((first.root_dir if charts else getattr(first, "log_dir", None)) or "")
    here = os.getcwd()
    folder = "." if folder == here else folder.removeprefix(here + os.sep).rstrip(os.sep)
    if charts:
        return f"Charts: tensorboard --logdir {folder}"
    return f"Figures: {folder or type(first).__name__}"
