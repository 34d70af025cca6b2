"""Hparams: the run's configuration for loggers, with the model's own hyperparameters beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

from lightning_gc.compressors import Compressor
from lightning_gc.engine.compatibility import by_default


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
