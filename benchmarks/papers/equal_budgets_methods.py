"""Which methods are compared at equal tuning budgets, and the random draws of their settings.

A method's settings are its own, none is taken over from another method: the learning rate, the
search space that compressor and memory declare (as ``lightning-gc tune`` reads it), the level of
what a wrapper holds, and, unless it is a quantiser, whether small tensors are compressed too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Mapping
from typing import Any

import tasks
from catalogue import is_direction
from equal_budgets_models import MODELS, refuses
from optuna.trial import FixedTrial

from lightning_gc import COMPRESSORS, PerParameter, SizeSwitch
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.base import LEVEL
from lightning_gc.compressors.wrappers.per_parameter import by_default
from lightning_gc.core.search_space import Choice, Range, Space
from lightning_gc.methods.method import MEMORY_PREFIX, PREFIX
from lightning_gc.tuning import Method

DENSE = "identity"  # bit-equal to plain DDP
MEMORY_MOMENTUM = f"{MEMORY_PREFIX}momentum"
# Of memories that no compressor has by default; all but one with the same compressor.
MEMORIES = {
    "topk_cser": Method("topk_cser", "topk", memory="cser"),
    "topk_ef21": Method("topk_ef21", "topk", memory="ef21"),
    "topk_error_reset": Method("topk_error_reset", "topk", memory="error_reset"),
    "topk_global_momentum": Method("topk_global_momentum", "topk", memory="global_momentum"),
    "topk_narrow_residual": Method("topk_narrow_residual", "topk", memory="narrow_residual"),
    "topk_saef": Method("topk_saef", "topk", memory="saef"),
    "topk_step_ahead": Method("topk_step_ahead", "topk", memory="step_ahead"),
    "qsgd_diana": Method("qsgd_diana", "qsgd", memory="diana"),
    "qsgd_loco": Method("qsgd_loco", "qsgd", memory="loco"),
}
SCALED = (Range("density", 0.01, 0.5, "log"),)
# Compressors with other rounds or another expectation, by one field.
VARIANTS = {
    "independent_random_mask": Method("independent_random_mask", "random_mask", {"shared": False}),
    "independent_randomk": Method("independent_randomk", "randomk", {"shared": False}),
    "independent_terngrad": Method("independent_terngrad", "terngrad", {"shared": False}),
    "independent_unbiased_randomk": Method(
        "independent_unbiased_randomk", "randomk", {"unbiased": True, "shared": False}, SCALED
    ),
    "unbiased_randomk": Method("unbiased_randomk", "randomk", {"unbiased": True}, SCALED),
}
METHODS = {
    name: VARIANTS.get(name) or Method(name)
    for name in sorted({*COMPRESSORS, *VARIANTS}, key=lambda name: (name != DENSE, name))
} | MEMORIES
"""Name -> method, the dense baseline first."""


@functools.cache
def space(name: str, model: str) -> Space:
    """Return the settings that a method's study draws for a model, with their ranges."""
    method, task = METHODS[name], MODELS[model]
    compressor = method.compressor_class()
    memory = method.memory_and_scheme()[0]
    low, high = task.directions if sends_directions(name) else task.rates
    found: list[Range | Choice] = [Range("rate", low, high, "log")]
    if task.momenta:
        # A memory with momentum has it in the optimizer's place.
        found.append(Choice("momentum", (0.0,) if refuses(memory, momentum=0.9) else task.momenta))
    # Of what quantisers send, small tensors are little, dense or not.
    small_are_dense = by_default(compressor) == PerParameter(SizeSwitch(compressor))
    if small_are_dense and compressor.traits.kind != "quantiser":
        found.append(Choice("every_tensor", (False, True)))
    for prefix, entries in ((PREFIX, method.tuned), (MEMORY_PREFIX, method.tuned_memory)):
        found += [dataclasses.replace(entry, field=_drawn_as(entry, prefix)) for entry in entries]
    return tuple(found)


def sends_directions(name: str) -> bool:
    """Return whether a method's result is a direction, of another length than a gradient."""
    return is_direction(METHODS[name].compressor_class())


def _drawn_as(entry: Range | Choice, prefix: str) -> str:
    return LEVEL if prefix + entry.field == PREFIX + LEVEL else prefix + entry.field


def drawn(name: str, model: str, draw: int, draws: int) -> dict[str, Any]:
    """Return one of a study's random draws.

    The draws cover each setting's range evenly: every one of ``draws`` equal parts of it is drawn
    from once, in an order of its own (a Latin hypercube). A memory's momentum β makes steps
    1/(1 − β) times as long; its rate is drawn in proportion to 1 − β, so that steps are as long as
    other methods' are.
    """
    found = {}
    for entry in space(name, model):
        source = random.Random(f"{name} {model} {entry.field}")
        order = source.sample(range(draws), draws)
        within = [source.random() for _ in range(draws)]
        found[entry.field] = value(entry, (order[draw] + within[draw]) / draws)
    suited = MODELS[model].rates_for
    if suited is not None and MEMORY_MOMENTUM in found and not sends_directions(name):
        found["rate"] *= (1 - found[MEMORY_MOMENTUM]) / (1 - suited)
    return found


def value(entry: Range | Choice, share: float) -> Any:
    """Return the value that lies at a share of a range, from 0 to below 1."""
    if isinstance(entry, Choice):
        return entry.values[int(share * len(entry.values))]
    log = entry.scale == "log"
    low, high = (math.log(x) if log else x for x in (entry.low, entry.high))
    if entry.integer and not log:
        return int(low + share * (high - low + 1))
    found = low + share * (high - low)
    found = math.exp(found) if log else found
    return round(found) if entry.integer else min(max(found, entry.low), entry.high)


def build(name: str, settings: Mapping[str, Any]) -> tasks.Method:
    """Return the compressor, memory and scheme of a method with these settings."""
    method = dataclasses.replace(
        METHODS[name], min_numel=0 if settings.get("every_tensor") else 1024
    )
    prefixed = {PREFIX + LEVEL if field == LEVEL else field: x for field, x in settings.items()}
    trial = FixedTrial(prefixed)
    compressor: Compressor = method.suggest_compressor(trial)
    scheme = method.memory_and_scheme()[1]
    return tasks.Method(compressor, method.suggest_memory(trial), scheme=scheme)
