"""Monitor: Lightning callback that logs bytes, ratios, levels, errors and seconds."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_gc.compressors import Compressor
from lightning_gc.control.probes import StepClock
from lightning_gc.controllers import Decision
from lightning_gc.engine import Engine
from lightning_gc.engine.compatibility import by_default
from lightning_gc.flavours import EitherLightning, package_of
from lightning_gc.lightning.monitor.totals import Sums, Totals, more_than_plain, ratio, summary
from lightning_gc.transports.accounting import Recorder

_log = logging.getLogger(__name__)
PREFIX = "compression/"
EPOCH = "compression_epoch/"


class Monitor(EitherLightning):
    """Logs bytes, errors, levels and seconds of compression, per logging step and per epoch.

    At each logging step, under ``compression/``, of worker 0: ``wire_bytes`` and ``dense_bytes``
    per step, ``ratio``, ``density`` (sent share of all elements, those of tensors that are sent
    whole included), ``compressed_density`` (the same of compressed tensors only),
    ``encoded_bytes`` (what the worker has to say: its gradient's payloads, and what is sent whole,
    each once, whether or not anybody listens) and ``encoding_ratio`` (the gradient's bytes over
    these; one worker has it too, whose ``wire_bytes`` are 0 and whose ``ratio`` is 1),
    ``bits_per_element`` (payload bits over all elements of these, sent or not), ``level``,
    ``relative_error`` ``‖x − C(x)‖/‖x‖``, ``error_norm``, the seconds of ``compress``,
    ``communicate`` (waiting for the other workers included) and ``decode``, which run beside the
    backward pass, and ``step_seconds``, of whole training steps from one batch to the next, as a
    mean since the last logging step, without validation. Per epoch, under ``compression_epoch/``,
    the same as means over steps and workers (errors: over logging steps).
    ``compression/total_wire_bytes``, ``total_dense_bytes``, ``total_ratio``,
    ``total_encoded_bytes`` and ``total_encoding_ratio`` of the whole fit, and the epoch's figures,
    are also in ``trainer.callback_metrics``, for Optuna and for the parent of spawned processes.

    With simulated workers, ``communication_seconds_estimated``, by the strategy's ``NetworkModel``,
    replaces ``communicate_seconds``, and ``compute_seconds`` is added: the time of all workers'
    forward and backward passes divided by their number.

    With a controller also ``level_min`` and ``level_max`` (``level`` is the median over
    parameters), ``uncompressed_share``, per epoch the controller's own figures
    (``critical_share``, ``budget_spent``, ``step``), ``total_error`` (``Σ‖e_t‖²`` so far, in units
    of the gradient) and ``total_error_update`` (``Σ γ_t²·‖e_t‖²``, in units of the update) if it
    needs them, and on TensorBoard's text page its reason with a table of all levels. TensorBoard
    also gets a custom-scalars layout, and the configuration in the hparams of the run, beside the
    model's own.

    With local steps bytes and ``ratio`` count all steps, those without an exchange too, and an
    exchange is logged at the end of the first round that contains a logging step; ``rounds`` is
    their number, ``drift`` worker 0's distance ``‖θ − θ_i‖`` from the common weights before the
    exchange, and ``outer_step`` the norm of what the outer step has changed them by.

    With FSDP over all ranks ``dense_bytes`` count a reduce-scatter, half of DDP's bytes, and every
    exchanged micro-batch counts as a step.

    Norms, and times on CUDA, are measured on the device in logging steps only.

    At the end of ``fit`` worker 0 writes one line into Lightning's log, as Lightning does: the
    method, its bytes compared with plain DDP's, its shares of a step, and where the figures are.

    Raises:
        ValueError: at fit start, when the strategy does not compress.

    Warns:
        UserWarning: on worker 0, no logger; after the first epoch, a method that sends more than
            plain DDP.

    Example:
        >>> from lightning_gc import CompressionMonitor
        >>> monitor = CompressionMonitor()
    """

    def __init__(self) -> None:
        super().__init__()
        self._sums = [Sums()]  # one per worker of this process
        self._rounds = 0
        self._index = 0
        self._logged = -1
        self._decision: Decision | None = None
        self._judged = False  # whether an epoch sends too much
        self._clock = StepClock()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Start at zero with a new trainer; what a checkpoint holds is loaded after this."""
        if stage == "fit" and trainer.global_step == 0:
            self._sums, self._judged = [Sums()], False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the strategy; log the configuration."""
        engines, _ = parts(trainer)
        first = self._sums[0]
        # Lightning loads a checkpoint's totals before the number of workers is known.
        self._sums += [Sums(replace(first.total)) for _ in engines[len(self._sums) :]]
        trainer.strategy.local_workers.kept["monitor"] = self._sums
        if not trainer.loggers and trainer.is_global_zero:
            warnings.warn(
                "CompressionMonitor has no logger to write to, so its totals are in "
                "trainer.callback_metrics only; use Trainer(logger=True).",
                stacklevel=2,
            )
        if trainer.is_global_zero:
            config = configuration(trainer)
            for logger in trainer.loggers:
                experiment: Any = getattr(logger, "experiment", None)  # some loggers have none
                if hasattr(experiment, "add_custom_scalars"):
                    experiment.add_custom_scalars(LAYOUT)
                    both = hparams_of(trainer) | config
                    logger.log_hyperparams(both, grand_totals(first.total))
                else:
                    logger.log_hyperparams(config)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start counting; a checkpoint is restored already."""
        engines, recordings = parts(trainer)
        self._rounds = engines[0].step
        control = trainer.strategy.control_loop
        self._decision = None if control is None else control.decision
        for sums, engine, recording in zip(self._sums, engines, recordings, strict=True):
            sums.begin(engine, recording, trainer.strategy.parts)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Start the epoch's sums; measure norms in the steps that will be logged."""
        # Not at the epoch's end: Lightning leaves that out after a resume from its last batch.
        if batch_idx == 0:
            for sums in self._sums:
                sums.epoch = Totals()
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
        self._clock.pause(trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add and log the step's account, if gradients were synchronised."""
        engine = parts(trainer)[0][0]
        if engine.step == self._rounds:
            return  # an accumulating micro-batch
        self._rounds = engine.step
        logs = engine.statistics.norms_wanted and self._index != self._logged
        if logs:
            self._take_time()
        step, *_ = [sums.take() for sums in self._sums]  # worker 0's is shown
        self._write_decision(trainer)
        if logs:
            self._logged = self._index
            figures = step.averages(engine.workers, trainer.strategy.network)
            figures |= self._levels(trainer) | trainer.strategy.figures()
            figures = {PREFIX + name: value for name, value in figures.items()}
            self._write(trainer, figures, self._index)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Average the epoch over workers in one message and log it."""
        engines, _ = parts(trainer)
        self._take_time()
        numbers = torch.tensor(
            [s.packed() for s in self._sums], dtype=torch.float64, device="cpu"
        ).mean(0)
        epoch, total = self._mean(trainer, numbers).tolist()
        averages = Totals(*epoch).averages(engines[0].workers, trainer.strategy.network)
        averages |= self._levels(trainer)
        self._warn_of_bytes(trainer, Totals(*epoch))
        figures = {EPOCH + name: value for name, value in averages.items()}
        figures |= grand_totals(Totals(*total))
        collected = [e.statistics.epoch for e in engines]
        watched = [epoch for epoch in collected if epoch is not None and epoch.errors]
        if watched:
            own = [[each.total_error, each.total_error_update] for each in watched]
            # In float32: beyond that, they depend on the order in which buckets were added.
            both = self._mean(
                trainer, torch.tensor(own, dtype=torch.float32, device="cpu").mean(0)
            ).tolist()
            figures[PREFIX + "total_error"], figures[PREFIX + "total_error_update"] = both
        self._write(trainer, figures, self._index)
        trainer.callback_metrics.update(
            {
                name: torch.tensor(value, dtype=torch.float64, device="cpu")
                for name, value in figures.items()
            }
        )

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Summarise bytes and seconds of the fit in one line, on worker 0."""
        total, strategy = self._sums[0].total, trainer.strategy
        if not trainer.is_global_zero or not total.steps:
            return
        engine, method = strategy.engine, short(strategy.compressor)
        if strategy.control_loop is not None:
            method += f" with {type(strategy.controller).__name__}"
        if engine.tally.local_steps:
            method += f" in {engine.step} exchanges"
        line = summary(method, total, total.averages(engine.workers, strategy.network))
        # Lightning's own logger: it has a handler, and who silences Lightning silences this.
        logging.getLogger(package_of(type(self))).info(f"{line} {where(trainer.loggers)}")

    def _warn_of_bytes(self, trainer: Any, epoch: Totals) -> None:
        """Warn, after the first epoch only, if plain DDP would send less."""
        if self._judged:
            return
        self._judged, strategy = True, trainer.strategy
        controlled = strategy.control_loop is not None
        said = more_than_plain(epoch, strategy.engine, controlled=controlled)
        if said and trainer.is_global_zero:
            warnings.warn(said, stacklevel=2)

    def state_dict(self) -> dict[str, Any]:
        """Return worker 0's totals: Lightning saves only these, the strategy all workers'."""
        return {"total": self._sums[0].own_state()["total"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint's totals."""
        for sums in self._sums:
            sums.total = Totals(**state_dict["total"])

    def _take_time(self) -> None:
        spent, steps = self._clock.take()
        for sums in self._sums:
            sums.clock(spent, steps)

    def _levels(self, trainer: Any) -> dict[str, float]:
        engine, strategy = trainer.strategy.engine, trainer.strategy
        if strategy.control_loop is not None:
            return level_figures(strategy.levels())
        return {} if engine.compressor.level is None else {"level": engine.compressor.level}

    def _write_decision(self, trainer: Any) -> None:
        """Log a new decision: its figures for all loggers, reason and levels for TensorBoard."""
        control = trainer.strategy.control_loop
        if control is None or control.decision is self._decision:
            return
        self._decision = control.decision
        said = control.decision.figures
        figures = {PREFIX + name: value for name, value in said.items() if math.isfinite(value)}
        if figures:
            self._write(trainer, figures, self._index)
        if trainer.is_global_zero and control.ended:  # 80 tables per run would be unreadable
            _log.info("Epoch %d: %s", trainer.current_epoch, control.decision.reason)
            text = as_markdown(control.decision, trainer.strategy.levels())
            for logger in trainer.loggers:
                experiment: Any = getattr(logger, "experiment", None)
                if hasattr(experiment, "add_text"):
                    experiment.add_text(PREFIX + "decision", text, self._index)

    @staticmethod
    def _mean(trainer: Any, numbers: torch.Tensor) -> torch.Tensor:
        there = numbers.to(trainer.strategy.root_device)
        mean: torch.Tensor = trainer.strategy.reduce(there, reduce_op="mean")
        return mean

    def _write(self, trainer: Any, figures: dict[str, float], step: int) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=step)


def grand_totals(total: Totals) -> dict[str, float]:
    """Return the totals of the whole fit by metric name."""
    return {
        PREFIX + "total_wire_bytes": total.wire_bytes,
        PREFIX + "total_dense_bytes": total.dense_bytes,
        PREFIX + "total_ratio": ratio(total.dense_bytes, total.wire_bytes),
        PREFIX + "total_encoded_bytes": total.encoded_bytes,
        PREFIX + "total_encoding_ratio": ratio(total.gradient_bytes, total.encoded_bytes),
    }


def parts(trainer: Any) -> tuple[Sequence[Engine], Sequence[Recorder]]:
    """Return this process's engines and accounts; ValueError if the strategy does not compress."""
    engines = getattr(trainer.strategy, "engines", ())
    recordings = getattr(trainer.strategy, "recordings", ())
    if not engines or not recordings:
        raise ValueError(
            f"CompressionMonitor watches CompressedDDPStrategy, CompressedFSDPStrategy, "
            f"CompressedHSDPStrategy, LocalStepsStrategy and SimulatedDDPStrategy, but the Trainer "
            f"has {type(trainer.strategy).__name__}. Use one of these; "
            f"CompressedDDPStrategy(Identity()) equals plain DDP."
        )
    return engines, recordings


_CHARTS = {
    "bytes per step and worker": ["(wire|dense)_bytes"],
    "compression ratio": ["(ratio|encoding_ratio)"],
    "density and level": ["(density|compressed_density|level|level_min|level_max)"],
    "relative error": ["relative_error"],
    "local steps": ["(drift|outer_step)"],
    "total error": ["(total_error|total_error_update)"],
    "seconds": [
        "(step|compute|compress|communicate|decode)_seconds",
        "communication_seconds_estimated",
    ],
}
LAYOUT = {
    "gradient compression": {
        title: ["Multiline", [PREFIX + tag for tag in tags]] for title, tags in _CHARTS.items()
    }
}


def level_figures(levels: Mapping[str, float | None]) -> dict[str, float]:
    """Return median, minimum and maximum level, and the share of those that are uncompressed."""
    numbers = [level for level in levels.values() if level is not None]
    figures = {"uncompressed_share": 1 - len(numbers) / len(levels)} if levels else {}
    if numbers:
        figures["level"] = statistics.median(numbers)
        figures["level_min"], figures["level_max"] = min(numbers), max(numbers)
    return figures


def as_markdown(decision: Decision, levels: Mapping[str, float | None]) -> str:
    """Return the reason and a table of levels for TensorBoard's text page."""
    rows = [
        f"| {name} | {'uncompressed' if level is None else f'{level:g}'} |"
        for name, level in levels.items()
    ]
    return "\n".join([decision.reason, "", "| parameter | level |", "|---|---|", *rows])


def configuration(trainer: Any) -> dict[str, Any]:
    """Return compressor, memory, scheme, controller, seed and workers, by ``gc/`` names."""
    strategy, engine = trainer.strategy, trainer.strategy.engine
    config = {
        "gc/compressor": short(engine.compressor),
        "gc/memory": short(engine.memory),
        "gc/scheme": short(engine.scheme),
        "gc/controller": short(strategy.controller),
        "gc/seed": engine.seed,
        "gc/workers": engine.workers,
    }
    if strategy.network is not None:
        config["gc/network"] = short(strategy.network)
    return config


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


def hparams_of(trainer: Any) -> dict[str, Any]:
    """Return what Lightning is about to log: what module and datamodule have saved of themselves.

    TensorBoard shows the first record of a run only.
    """
    found: dict[str, Any] = {}
    if getattr(trainer, "enable_autolog_hparams", True):  # Lightning before 2.6 always does
        for owner in (trainer.lightning_module, trainer.datamodule):
            if owner is not None and owner._log_hyperparams:
                found |= owner.hparams_initial
    found.pop("_class_path", None)  # LightningCLI's own
    return found


def short(value: Any) -> str:
    """Return an instance as one would write it: without wrappers and settings that are default.

    Example:
        >>> from lightning_gc import QSGD, PerParameter, Quantised, SizeSwitch, TopK
        >>> short(PerParameter(SizeSwitch(TopK(0.05)))), short(PerParameter(TopK(0.05)))
        ('TopK(0.05)', 'PerParameter(TopK(0.05))')
        >>> short(Quantised(TopK(0.05, selection="sampled"), QSGD(4)))
        "Quantised(TopK(0.05, selection='sampled'), QSGD(4))"
    """
    knob = None
    if isinstance(value, Compressor):
        value, knob = _bare(value), value.knob and value.knob.field
    if not dataclasses.is_dataclass(value):
        return repr(value)
    fields = [field for field in dataclasses.fields(value) if field.init]
    words, in_order = [], True
    for field in fields:
        own = getattr(value, field.name)
        parts = dataclasses.is_dataclass(own)
        if not parts and field.name != knob and own == _default(field):
            in_order = False
            continue
        in_order = in_order and (parts or field.name == knob or len(fields) == 1)
        words.append(short(own) if in_order else f"{field.name}={short(own)}")
    return f"{type(value).__name__}({', '.join(words)})"


def _bare(compressor: Compressor) -> Compressor:
    """Return what a user would have given for this, without the wrappers that are added to it."""
    bare = inner = compressor
    while hasattr(inner, "inner"):
        inner = inner.inner
        if by_default(inner) == compressor:
            bare = inner
    return bare


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
