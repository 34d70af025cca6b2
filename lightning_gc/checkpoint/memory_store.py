"""States in memory: what ``Attached.state_dict`` returns and ``load_state_dict`` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gc.checkpoint.worker_state import (
    CONTROLLER,
    MODULE,
    CheckpointParts,
    SavedDict,
    WorkerState,
)
from lightning_gc.control.control_loop import CONTROL_STATE
from lightning_gc.control.probes import WorkerStatistics
from lightning_gc.core import (
    ANYTHING,
    COUNT,
    TEXT,
    WHOLE,
    Each,
    Leaf,
    Listed,
    Optional,
    Pair,
    Record,
)
from lightning_gc.core.refusal import refuse
from lightning_gc.core.saved_state import LEVEL, Tree, checksum, each_tensor, with_checksum
from lightning_gc.engine.engine import ENGINE_STATE
from lightning_gc.engine.levels import RequestedLevels

_STATE = SavedDict(
    {
        "run": TEXT,
        "worker": WHOLE,
        "workers": COUNT,
        "configuration": Each(TEXT),
        "layout": Listed(Listed(TEXT)),
        "engine": Record(ENGINE_STATE),
        "levels": Optional(Pair(LEVEL, Each(LEVEL))),
        "control": Optional(
            Record({CONTROLLER: TEXT, "loop": CONTROL_STATE, "worker": WorkerStatistics.structure})
        ),
    }
)
_MAYBE = {
    "shard": WHOLE,
    "shards": COUNT,
    "mode": Leaf("'mean'", lambda v: v == "mean"),
    **dict.fromkeys(("exchanged", "common", "own"), ANYTHING),  # with local steps
    "weights": TEXT,  # their compressor, in FSDP
}
_DECIDED = ("state", "levels", "every", "weights", "pause", "epoch")
_SHARED = ", with levels, buckets and decisions of checksum "
_ZERO = "or leave load_state_dict out, and errors begin at zero"


def state_dict(parts: CheckpointParts, mean: Callable[[Tensor], Tensor] | None = None) -> Tree:
    """Return the state of this process's worker, with a checksum.

    Args:
        parts: of the worker.
        mean: a collective that returns a tensor's mean over workers; with it the state is the
            mean over workers.
    """
    workers, state = parts.workers, parts.worker_state(parts.shared_state())
    further: Tree = {}
    if parts.common:
        further = {"common": state.shared["common"], "own": state.own[0]["own"]}
    if mean is not None:
        state = state.over_workers(mean)
        for name, own in further.get("own", {}).items():
            further["own"][name] = parts.own[name][0].over_workers(own, mean)
    shared, kept = state.shared, None
    if parts.control is not None:
        kept = {
            CONTROLLER: shared["configuration"][CONTROLLER],
            "loop": shared[CONTROLLER],
            "worker": state.averaged[CONTROLLER],
        }
    saved: Tree = {
        _STATE.key: _STATE.format,
        "run": shared["run"],
        "layout": shared["layout"],
        "engine": {
            "memory": state.averaged["memory"],
            "compressor": state.own[0]["compressor"],
            "learning_rates": shared["learning_rates"],
            "step": shared["step"],
        },
        "levels": workers.first.levels.requested(),
        "control": kept,
        "worker": workers.first.worker,
        "workers": workers.first.workers,
        **further,
        **parts.settings,
        **_same(parts),
    }
    if mean is None and "own" in state.own[0]:
        saved["own"] = state.own[0]["own"]
    return with_checksum(saved if mean is None else saved | {"mode": "mean"})


def load(
    given: Any,
    parts: CheckpointParts,
    device: torch.device,
    agreed: Callable[[Callable[[], str]], Mapping[int, str]],
) -> None:
    """Resume this process's worker, after all workers have checked what they were given.

    Args:
        given: the worker's state, the mean over workers, or a list of all workers' states.
        parts: of the worker.
        device: the device on which training uses the state.
        agreed: calls an act on all workers and returns their results, or raises on all.
    """
    workers, states = parts.workers, list[WorkerState]()

    def owner() -> str:
        """Return the worker and shard of a state; "" for a list, a mean, other numbers."""
        known = isinstance(given, Mapping) and "mode" not in given
        if not known or given.get("workers") != workers.first.workers:
            return ""
        return f"{given.get('worker')!r} {given.get('shard', '')!r}"

    owners = agreed(owner)
    if len(owners) > 1 and len({*owners.values()}) == 1 and owners[0]:
        refuse(
            f"All {len(owners)} ranks were given the state of worker "
            f"{owners[0].partition(' ')[0]}. "
            "If all saved under one name, the others' errors are lost, or mixed with these. Save "
            "each worker's state under its own name, such as "
            f"f'compression{{dist.get_rank()}}', {_ZERO}"
        )

    def check() -> str:
        saved, state = checked(given, parts)
        states.append(state)
        return saved

    saves = agreed(check)
    first = saves[0].partition(_SHARED)[0]
    for worker, save in saves.items():
        own = save.partition(_SHARED)[0]
        if save != saves[0]:
            different = f"of {own}, but worker 0 of {first}"
            if own == first:
                different = "with other levels, buckets or decisions than worker 0"
            refuse(
                f"Worker {worker} has a state {different}; give all workers states that were saved "
                "together"
            )
    workers.forget_levels()
    parts.apply(states, device, says=workers.first.worker == 0)


def checked(given: Any, parts: CheckpointParts) -> tuple[str, WorkerState]:
    """Return a text that must be equal on all workers, and this worker's state.

    The text has the step and the run in which the state was saved, and a checksum of what workers
    share.

    Raises:
        ValueError: a state is damaged, or of another worker, configuration or model.
    """
    several = isinstance(given, list | tuple)
    every = [_opened(state, parts) for state in (given if several else [given])]
    worker, number = parts.workers.first.worker, parts.workers.first.workers
    if several:
        said = _refuse_other_lists(every, parts)
        if len(every) == number:
            return said, of_worker(every[worker], parts)
        return said, WorkerState.mean([of_worker(each, parts) for each in every])
    (own,) = every
    if "mode" not in own:
        for what, now in {"worker": worker, "workers": number}.items():
            if own[what] != now:
                refuse(
                    f"has a state with {what}={own[what]!r}, but here it is {now!r}. Give every "
                    "worker the state that it has saved. If the number of workers has changed, "
                    "give all workers the list of all saved states, or a state from "
                    f"state_dict(mode='mean'), {_ZERO}"
                )
    return _saved_with(own, parts), of_worker(own, parts)


def of_worker(state: Tree, parts: CheckpointParts) -> WorkerState:
    """Return a checked state of this run's configuration as a ``WorkerState``."""
    engine, kept = state["engine"], state["control"]
    configuration = {**parts.configuration, "weights": state.get("weights", "None")}
    averaged: Tree = {"memory": engine["memory"]}
    if kept is not None:
        averaged[CONTROLLER] = kept["worker"]
        if parts.control is not None:
            configuration[CONTROLLER] = kept[CONTROLLER]
    shared = {
        "step": engine["step"],
        "layout": state["layout"],
        "learning_rates": engine["learning_rates"],
        "levels": state["levels"],
        "configuration": configuration,
        CONTROLLER: kept and kept["loop"],
        "common": state.get("common", {}),
    }
    alone = {name: state[name] for name in ("own",) if name in state}
    return WorkerState(shared, averaged, ({"compressor": engine["compressor"], **alone},))


def _opened(given: Any, parts: CheckpointParts) -> Tree:
    """Return a saved state, checked, except for its worker and its number of workers."""
    shapes = parts.workers.shapes
    try:
        maybe = _MAYBE | {"own": Record(maybe=parts.own_structure, others=ANYTHING)}
        state = _STATE.opened(dict(given) if isinstance(given, Mapping) else given, {}, maybe)
        state.setdefault("exchanged", "gradients")
        for what, own in (_same(parts) | {"exchanged": parts.exchanged}).items():
            if state.get(what) != own:
                raise _Other(
                    f"has a state with {what}={state.get(what)!r}, but here it is {own!r}; attach "
                    f"with the same arguments, on as many shards, {_ZERO}."
                )
        if parts.common:
            further = {"common": Record(parts.common_structure), "own": Record(parts.own_structure)}
            Record(further, others=ANYTHING).check(state)
        for name, kept in state["engine"]["memory"].items():
            for tensor in kept.values():
                if tuple(tensor.shape) != shapes.get(name):
                    raise _Other(
                        f"has a state with an error of {name} of shape {tuple(tensor.shape)}, but "
                        f"the model has {shapes.get(name, 'no such parameter')}."
                    )
        parts.check_declared(state["engine"]["compressor"], state["levels"], place="engine/")
        levels = _loop_of(state).get("levels")
        RequestedLevels(parts.workers.configuration.compressor).check(levels, "control/loop/levels")
    except _Other:
        raise
    except ValueError as error:
        raise ValueError(
            f"has a state that cannot be used: {error}. Load an earlier one, or none: then errors "
            f"begin at zero."
        ) from error
    return state


class _Other(ValueError):
    """A state is of another configuration or model; the message is complete."""


def _same(parts: CheckpointParts) -> dict[str, Any]:
    """Return the part of the state that must be equal where it is loaded."""
    return {"configuration": parts.workers.configuration.in_words(), **parts.workers.place()}


def _loop_of(state: Tree) -> Tree:
    return {} if state["control"] is None else dict(state["control"]["loop"])


def _saved_with(state: Tree, parts: CheckpointParts) -> str:
    """Return the text that must be equal on all workers."""
    loop, sharded = _loop_of(state), bool(parts.workers.place())
    # Integer buffers of a module may differ.
    common = {n: part for n, part in state.get("common", {}).items() if n != MODULE}
    if sharded:  # each rank has its own shard of what is common
        common = each_tensor(common, lambda tensor: tensor.reshape(-1)[:0])
    # Ranks of a model in shards may have buckets without any elements, which are not in a layout.
    shared = {
        "levels": state["levels"],
        "layout": [] if sharded else state["layout"],
        "loop": {name: loop.get(name) for name in _DECIDED},
        "common": common,
    }
    return f"step {state['engine']['step']} of run {state['run']}{_SHARED}{checksum(shared)}"


def _refuse_other_lists(states: Sequence[Tree], parts: CheckpointParts) -> str:
    """Return the text of a list of states; raise ValueError unless it has each worker's once."""
    found = [state["worker"] for state in states]
    number = int(states[0]["workers"]) if states else 0
    if not states or found != list(range(number)) or any("mode" in state for state in states):
        refuse(
            f"has a list with the states of workers {found}, saved by {number} workers; give one "
            "state_dict() of each, in the order of the workers"
        )
    said = sorted({_saved_with(state, parts) for state in states})
    if len(said) > 1:
        saves = " and ".join(each.partition(_SHARED)[0] for each in said)
        refuse(f"has a list with states of {saves}; give states that were saved together")
    return said[0]
