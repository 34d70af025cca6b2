"""What was saved and what it cost, for any Lightning logger."""

from __future__ import annotations

import logging
import math
import warnings
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from lightning_gc.bucket import Tally
from lightning_gc.controllers import Decision
from lightning_gc.decisions import as_markdown, decision_figures, level_figures
from lightning_gc.engine import Engine
from lightning_gc.transports.recording import COMMUNICATE, COMPRESS, DECODE, Recording
from lightning_gc.transports.transport import all_reduce_bytes

_log = logging.getLogger(__name__)
PREFIX = "compression/"
EPOCH = "compression_epoch/"


@dataclass
class Totals:
    """Sums over steps, as plain numbers; seconds over the steps that were timed."""

    steps: float = 0
    wire_bytes: float = 0
    dense_bytes: float = 0
    elements: float = 0
    sent: float = 0
    payload_bytes: float = 0
    compress_seconds: float = 0
    communicate_seconds: float = 0
    decode_seconds: float = 0
    timed_steps: float = 0
    relative_error: float = 0
    error_norm: float = 0
    observed_steps: float = 0

    def add(self, other: Totals) -> None:
        """Add another sum to this one."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def averages(self) -> dict[str, float]:
        """Return the figures per step and worker; those that were not measured are left out."""
        figures = {
            "wire_bytes": self.wire_bytes / max(self.steps, 1),
            "dense_bytes": self.dense_bytes / max(self.steps, 1),
            "ratio": ratio(self.dense_bytes, self.wire_bytes),
        }
        if self.elements:
            figures["density"] = self.sent / self.elements
            figures["bits_per_element"] = 8 * self.payload_bytes / self.elements
        if self.timed_steps:
            for phase in (COMPRESS, COMMUNICATE, DECODE):
                name = f"{phase}_seconds"
                figures[name] = getattr(self, name) / self.timed_steps
        if self.observed_steps:
            figures["relative_error"] = self.relative_error / self.observed_steps
            figures["error_norm"] = self.error_norm / self.observed_steps
        return figures


def ratio(dense_bytes: float, wire_bytes: float) -> float:
    """Return dense over wire bytes; 1 where nothing is sent either way (one worker)."""
    if wire_bytes:
        return dense_bytes / wire_bytes
    return math.inf if dense_bytes else 1.0


class Monitor:
    """Logs what compression saves and costs, per logging step and per epoch.

    At each logging step, under ``compression/``, for this worker (worker 0 writes): ``wire_bytes``
    and ``dense_bytes`` per step, ``ratio``, ``density`` (share of elements sent, of the tensors
    that are compressed), ``bits_per_element`` (payload bits over all elements of these, sent or
    not), ``level``, ``relative_error`` ``‖x − C(x)‖/‖x‖``, ``error_norm``, and the seconds of
    ``compress``, ``communicate`` and ``decode``. Per epoch, under ``compression_epoch/``, the same
    as means over steps and workers; the two errors over the logging steps among them.
    ``compression/total_wire_bytes``, ``total_dense_bytes`` and ``total_ratio`` of the whole fit,
    and the epoch's figures, end in ``trainer.callback_metrics``, for Optuna and for the parent of
    spawned processes.

    With a controller also ``level_min`` and ``level_max`` (``level`` is the median over
    parameters), ``uncompressed_share``, per epoch what the controller wants shown
    (``critical_share``, ``budget_spent``, ``step``, ``total_error``), and in TensorBoard's text
    page its reason with a table of all levels.

    Norms are measured on logging steps only, on the device, and read when they are logged. On CUDA
    so are the times.

    TensorBoard also gets a custom-scalars layout and the configuration as hparams.

    Raises:
        ValueError: at fit start, when the strategy does not compress.

    Example:
        >>> from lightning_gc import CompressionMonitor
        >>> monitor = CompressionMonitor()
    """

    def __init__(self) -> None:
        super().__init__()
        self._total = Totals()
        self._epoch = Totals()
        self._rounds = 0
        self._tally = Tally()
        self._index = 0
        self._logged = -1
        self._decision: Decision | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the strategy and write what is known beforehand."""
        engine, _ = parts(trainer)
        trainer.strategy.kept["monitor"] = self
        if not trainer.loggers:
            warnings.warn(
                "CompressionMonitor has no logger to write to; its totals are in "
                "trainer.callback_metrics only. Use Trainer(logger=True) to see more.",
                stacklevel=2,
            )
        if trainer.is_global_zero:
            config = {
                "gc/compressor": repr(engine.compressor),
                "gc/memory": repr(engine.memory),
                "gc/scheme": repr(engine.scheme),
                "gc/controller": repr(trainer.strategy.controller),
                "gc/seed": engine.seed,
                "gc/workers": engine.workers,
            }
            for logger in trainer.loggers:
                experiment = getattr(logger, "experiment", None)  # not every logger has one
                if experiment is not None and hasattr(experiment, "add_custom_scalars"):
                    experiment.add_custom_scalars(LAYOUT)
                    logger.log_hyperparams(config, self._grand_totals())
                else:
                    logger.log_hyperparams(config)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count from here; what a checkpoint holds has been restored by now."""
        engine, recording = parts(trainer)
        self._rounds, self._tally = engine.step, replace(engine.tally)
        self._decision = trainer.strategy.turn.decision if trainer.strategy.turn else None
        recording.take()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Have norms measured in the steps that will be logged."""
        engine, recording = parts(trainer)
        # Lightning's x axis for logging: optimizer steps, whatever the number of optimizers.
        self._index = trainer.fit_loop.epoch_loop._batches_that_stepped
        logs = bool(trainer.loggers) and (self._index + 1) % trainer.log_every_n_steps == 0
        engine.observe = recording.timing = logs

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the account of the step, if gradients were synchronised in it."""
        engine, recording = parts(trainer)
        if engine.step == self._rounds:
            return  # an accumulating micro-batch
        self._rounds = engine.step
        step = self._take(engine, recording)
        self._epoch.add(step)
        self._total.add(step)
        self._write_decision(trainer)
        if engine.observe and self._index != self._logged:
            self._logged = self._index
            figures = step.averages() | self._levels(trainer)
            figures = {PREFIX + name: value for name, value in figures.items()}
            self._write(trainer, figures, self._index)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Average the epoch over workers in one message, log it, start anew."""
        engine, _ = parts(trainer)
        packed = torch.tensor([[getattr(t, f.name) for f in fields(t)] for t in self._sums()])
        packed = packed.double().to(trainer.strategy.root_device)
        epoch, total = trainer.strategy.reduce(packed, reduce_op="mean").tolist()
        self._epoch = Totals(*epoch)
        figures = {EPOCH + name: value for name, value in self._epoch.averages().items()}
        figures |= {EPOCH + name: value for name, value in self._levels(trainer).items()}
        figures |= self._grand_totals(Totals(*total))
        if engine.observer is not None and engine.observer.errors:
            own = torch.tensor(engine.observer.total_error, device=trainer.strategy.root_device)
            figures[PREFIX + "total_error"] = float(trainer.strategy.reduce(own, reduce_op="mean"))
        self._write(trainer, figures, self._index)
        trainer.callback_metrics.update(
            {name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()}
        )
        self._epoch = Totals()

    def state_dict(self) -> dict[str, Any]:
        """Return the totals, so that they go on after a resume.

        Worker 0's, as Lightning keeps only these; the strategy keeps ``own_state`` of all.
        """
        return {"total": {f.name: getattr(self._total, f.name) for f in fields(Totals)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's totals."""
        self._total = Totals(**state_dict["total"])

    def own_state(self) -> dict[str, Any]:
        """Return this worker's sums, of the fit and of the epoch that is under way."""
        return {"total": vars(self._total).copy(), "epoch": vars(self._epoch).copy()}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Go on from ``own_state()``, or from the mean of several."""
        self._total, self._epoch = Totals(**state["total"]), Totals(**state["epoch"])

    def _levels(self, trainer: Any) -> dict[str, float]:
        engine, strategy = trainer.strategy.engine, trainer.strategy
        if strategy.turn is not None:
            return level_figures(strategy.levels())
        return {} if engine.compressor.level is None else {"level": engine.compressor.level}

    def _write_decision(self, trainer: Any) -> None:
        """Log a new decision: its figures for all loggers, reason and levels for TensorBoard."""
        turn = trainer.strategy.turn
        if turn is None or turn.decision is self._decision:
            return
        self._decision = turn.decision
        figures = {PREFIX + n: v for n, v in decision_figures(turn.decision).items()}
        if figures:
            self._write(trainer, figures, self._index)
        if trainer.is_global_zero and turn.ended:  # 80 tables of a run are no reading
            _log.info("Epoch %d: %s", trainer.current_epoch, turn.decision.reason)
            text = as_markdown(turn.decision, trainer.strategy.levels())
            for logger in trainer.loggers:
                experiment = getattr(logger, "experiment", None)
                if experiment is not None and hasattr(experiment, "add_text"):
                    experiment.add_text(PREFIX + "decision", text, self._index)

    def _sums(self) -> tuple[Totals, Totals]:
        return self._epoch, self._total

    def _take(self, engine: Engine, recording: Recording) -> Totals:
        account = recording.take()
        now, before = engine.tally, self._tally
        step = Totals(
            steps=1,
            wire_bytes=account.wire_bytes,
            dense_bytes=all_reduce_bytes(now.grad_bytes - before.grad_bytes, engine.workers),
            elements=now.elements - before.elements,
            sent=now.sent - before.sent,
            payload_bytes=now.payload_bytes - before.payload_bytes,
        )
        self._tally = replace(now)
        if any(account.seconds.values()):
            step.timed_steps = 1
            step.compress_seconds = account.seconds[COMPRESS]
            step.communicate_seconds = account.seconds[COMMUNICATE]
            step.decode_seconds = account.seconds[DECODE]
        if engine.observe and engine.norms:
            before, after = torch.tensor(engine.norms).double().norm(dim=0).tolist()
            step.observed_steps = 1
            step.error_norm = after
            step.relative_error = after / before if before else 0.0
        return step

    def _grand_totals(self, total: Totals | None = None) -> dict[str, float]:
        total = total or self._total
        return {
            PREFIX + "total_wire_bytes": total.wire_bytes,
            PREFIX + "total_dense_bytes": total.dense_bytes,
            PREFIX + "total_ratio": ratio(total.dense_bytes, total.wire_bytes),
        }

    def _write(self, trainer: Any, figures: dict[str, float], step: int) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=step)


def parts(trainer: Any) -> tuple[Engine, Recording]:
    """Return the engine and the account of the trainer's strategy.

    Raises:
        ValueError: the strategy does not compress.
    """
    engine = getattr(trainer.strategy, "engine", None)
    recording = getattr(trainer.strategy, "recording", None)
    if not isinstance(engine, Engine) or not isinstance(recording, Recording):
        raise ValueError(
            f"CompressionMonitor watches CompressedDDPStrategy, but the Trainer has "
            f"{type(trainer.strategy).__name__}. Use Trainer(strategy=CompressedDDPStrategy(...)); "
            f"CompressedDDPStrategy(Identity()) equals plain DDP."
        )
    return engine, recording


LAYOUT = {
    "gradient compression": {
        "bytes per step and worker": ["Multiline", [PREFIX + "(wire|dense)_bytes"]],
        "compression ratio": ["Multiline", [PREFIX + "ratio"]],
        "density and level": ["Multiline", [PREFIX + "(density|level|level_min|level_max)"]],
        "relative error": ["Multiline", [PREFIX + "relative_error"]],
        "seconds": ["Multiline", [PREFIX + "(compress|communicate|decode)_seconds"]],
    }
}
