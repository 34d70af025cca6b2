"""Attached state: what ``Attached.state_dict`` returns, and what is refused before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_gc.engine.engine import ENGINE_STATE
from lightning_gc.engine.levels import RequestedLevels
from lightning_gc.state_structure import (
    COUNT,
    LEVEL,
    TEXT,
    WHOLE,
    Each,
    Listed,
    Optional,
    Pair,
    Record,
    Structure,
)
from lightning_gc.synchronizer.checksum import NAME as CHECKSUM
from lightning_gc.synchronizer.checksum import check_checksum, checksum, with_checksum
from lightning_gc.synchronizer.control_state import CONTROL_STATE
from lightning_gc.synchronizer.pytree import Tree
from lightning_gc.synchronizer.worker_statistics import WorkerStatistics
from lightning_gc.synchronizer.workers import Workers

FORMAT = 2
"""Format 1 has nothing of what is in ``_SINCE_2``."""

_STATE: dict[str, Structure] = {
    "format": COUNT,
    "worker": WHOLE,
    "workers": COUNT,
    "configuration": Each(TEXT),
    "layout": Listed(Listed(TEXT)),
    "engine": Record(ENGINE_STATE),
    "levels": Optional(Pair(LEVEL, Each(LEVEL))),
    "control": Optional(
        Record(
            {"loop": CONTROL_STATE, "worker": WorkerStatistics.structure},
            {"controller": TEXT},  # not in states of before
        )
    ),
}
_OF_SHARDS: dict[str, Structure] = {"shard": WHOLE, "shards": COUNT}
_SINCE_2: dict[str, Structure] = {"run": TEXT, CHECKSUM: TEXT}


def attached_state(workers: Workers, control: Tree | None) -> Tree:
    """Return the state of this process's worker, with a checksum."""
    state = {
        "format": FORMAT,
        "run": workers.run,
        "layout": [list(names) for names in workers.layout],
        "engine": workers.first.state_dict(),
        "levels": workers.first.levels.requested(),
        "control": control,
    }
    return with_checksum(state | _identity(workers))


def check_attached_state(state: Any, workers: Workers) -> str:
    """Return the step and the run in which a state was saved, and a checksum of what all share.

    Raises:
        ValueError: it is damaged, or that of another worker, configuration or model.
    """
    known = state.get("format") if isinstance(state, Mapping) else None
    if known not in range(1, FORMAT + 1):
        raise ValueError(
            f"has a state of format={known!r}, but this version of lightning_gc knows formats up "
            f"to {FORMAT}; give what Attached.state_dict() has returned, or upgrade."
        )
    try:
        if known != 1:
            check_checksum(state)
        always = _STATE if known == 1 else {**_STATE, **_SINCE_2}
        Record(always, _OF_SHARDS).check(dict(state))
    except ValueError as error:
        raise _unusable(error) from error
    for what, own in _identity(workers).items():
        if state.get(what) != own:
            raise ValueError(
                f"has a state with {what}={state.get(what)!r}, but here it is {own!r}; give every "
                f"worker the state that it has saved, and attach with the same arguments, or leave "
                f"load_state_dict out, and errors begin at zero."
            )
    for name, kept in state["engine"]["memory"].items():
        for tensor in kept.values():
            if tuple(tensor.shape) != workers.shapes.get(name):
                raise ValueError(
                    f"has a state with an error of {name} of shape {tuple(tensor.shape)}, but the "
                    f"model has {workers.shapes.get(name, 'no such parameter')}."
                )
    try:
        workers.check_declared(state["engine"]["compressor"], state["levels"], place="engine/")
        loop = {} if state["control"] is None else state["control"]["loop"]
        RequestedLevels(workers.configuration.compressor).check(
            loop.get("levels"), "control/loop/levels"
        )
    except ValueError as error:
        raise _unusable(error) from error
    # Ranks of a model in shards may have buckets without any elements, which are not in a layout.
    shared = {
        "levels": state["levels"],
        "layout": [] if workers.place() else state["layout"],
        "loop": {name: loop.get(name) for name in ("state", "levels", "every", "pause", "epoch")},
    }
    saved = f"step {state['engine']['step']}" + (f" of run {state['run']}" if known != 1 else "")
    return f"{saved}{_SHARED}{checksum(shared)}"


def refuse_other_saves(saves: Mapping[int, str]) -> None:
    """Raise ValueError if workers' states, by ``check_attached_state``, were not saved together."""
    first = saves[0].partition(_SHARED)[0]
    for worker, save in saves.items():
        own = save.partition(_SHARED)[0]
        if save == saves[0]:
            continue
        different = f"of {own}, but worker 0 of {first}"
        if own == first:
            different = "with other levels, buckets or decisions than worker 0"
        raise ValueError(
            f"Worker {worker} has a state {different}; give all workers states that were saved "
            f"together."
        )


_SHARED = ", with levels, buckets and decisions of checksum "


def _unusable(error: ValueError) -> ValueError:
    return ValueError(
        f"has a state that cannot be used: {error}. Load an earlier one, or none: then errors "
        f"begin at zero."
    )


def _identity(workers: Workers) -> dict[str, Any]:
    """Return the part of the state that must be equal where it is loaded."""
    return {
        "worker": workers.first.worker,
        "workers": workers.first.workers,
        "configuration": workers.configuration.in_words(),
        **workers.place(),
    }
