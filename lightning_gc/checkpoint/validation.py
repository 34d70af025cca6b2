"""Refuse damaged, malformed or foreign error state in checkpoints and side files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning_gc.control.control_loop import CONTROL_STATE
from lightning_gc.core.checksum import NAME as CHECKSUM
from lightning_gc.core.checksum import check_checksum
from lightning_gc.core.pytree import Tree
from lightning_gc.core.state_structure import (
    ANYTHING,
    COUNT,
    FLAG,
    TEXT,
    WHOLE,
    Each,
    Leaf,
    Listed,
    Optional,
    Record,
    Structure,
)
from lightning_gc.engine.engine import ENGINE_STATE
from lightning_gc.exchange.workers import Workers

FORMAT = 2
"""Format 1 has no checksums and none of the entries in ``_MAIN_SINCE_2`` and ``_SIDE_SINCE_2``."""

_MODE = Leaf("'full' or 'mean'", lambda v: v in ("full", "mean"))
FILE_NAME = Leaf(
    "the beginning of a file's name", lambda v: isinstance(v, str) and v == os.path.basename(v)
)
SHARED: dict[str, Structure] = {
    "mode": _MODE,
    "step": WHOLE,
    "torn": FLAG,
    "layout": Listed(Listed(TEXT)),
    "configuration": Record(
        dict.fromkeys(("compressor", "memory", "controller"), TEXT), {"exchanged": TEXT}
    ),
    "learning_rates": ENGINE_STATE["learning_rates"],
    "turn": Optional(CONTROL_STATE),
}
"""Entries that checkpoints of unsharded and of sharded models have in common."""
_MAIN = {"format": WHOLE, "workers": COUNT, "stem": FILE_NAME} | SHARED
_MAIN_SINCE_2: dict[str, Structure] = {
    "run": TEXT,
    "shapes": Each(Each(Listed(WHOLE))),  # of errors, by parameter and buffer
    "files": Listed(Optional(TEXT)),
    CHECKSUM: TEXT,
}
_SIDE: dict[str, Structure] = {"format": WHOLE, "worker": WHOLE}
_SIDE_SINCE_2: dict[str, Structure] = {
    "workers": WHOLE,
    "run": TEXT,
    "stem": TEXT,
    CHECKSUM: TEXT,
}


def check_main(
    main: Any, kept: Mapping[str, Structure], common: Mapping[str, Structure] | None = None
) -> None:
    """Raise ValueError if our part of a checkpoint is incomplete, changed or malformed.

    Args:
        main: value of ``"lightning_gc"`` in the checkpoint.
        kept: name -> structure of each worker's state besides the engine's, as known in this run.
        common: name -> structure of the state that is equal on all workers.
    """
    format_ = _format_of(main)
    if format_ > FORMAT:
        raise ValueError(
            f"it has format {format_}, but this version of lightning_gc knows formats up to "
            f"{FORMAT}; upgrade it"
        )
    since = _MAIN_SINCE_2 if format_ > 1 else {}
    if since:
        check_checksum(main)
    mean = main.get("mode") == "mean" and not main.get("torn")
    maybe = {"common": Record(maybe=common or {}, others=ANYTHING)}
    Record({**_MAIN, **since, **(_own(kept) if mean else {})}, maybe).check(main)
    if since and len(main["files"]) != main["workers"]:
        raise ValueError(f"it has {len(main['files'])} files of {main['workers']} workers")
    if mean:
        _check_shapes(main, main)


def check_side_file(
    own: Any,
    main: Tree,
    worker: int,
    kept: Mapping[str, Structure],
    alone: Mapping[str, Structure] | None = None,
) -> None:
    """Raise ValueError if a side file is changed, or belongs to another checkpoint or worker.

    Args:
        own: the file's content.
        main: our part of the checkpoint, checked.
        worker: index of the worker that the file must belong to.
        kept: as for ``check_main``.
        alone: name -> structure of the state that is not averaged over workers.
    """
    if _format_of(own) != main["format"]:
        raise ValueError(f"it has format {own['format']}, but its checkpoint {main['format']}")
    since = _SIDE_SINCE_2 if main["format"] > 1 else {}
    if since:
        check_checksum(own)
    maybe = {"own": Record(maybe=alone or {}, others=ANYTHING)}
    Record({**_SIDE, **since, **_own(kept)}, maybe).check(own)
    same = ("workers", "run", "stem") if since else ()
    expected = {"worker": worker} | {name: main[name] for name in same}
    for name, value in expected.items():
        if own[name] != value:
            raise ValueError(f"it has {name}={own[name]!r}, but its checkpoint {name}={value!r}")
    recorded = main["files"][worker] if since else None
    if recorded not in (None, own.get(CHECKSUM)):
        raise ValueError("it is not the file that was saved with its checkpoint")
    _check_shapes(own, main)


def check_declared(own: Tree, main: Tree, workers: Workers) -> None:
    """Raise ValueError for levels or compressor state that this run's compressor does not declare.

    Ignore the state of another compressor and of parameters that have another shape now.

    Args:
        own: a side file's content, or our part of the checkpoint; checked.
        main: our part of the checkpoint, checked.
        workers: the workers of this process.
    """
    if main["configuration"]["compressor"] != repr(workers.configuration.compressor):
        return
    saved = main.get("shapes", {})
    same = {
        name: shape
        for name, shape in workers.shapes.items()
        if all(each == list(shape) for each in saved.get(name, {}).values())
    }
    kept = own.get("compressor", {})
    turn = main["turn"] or {}
    workers.check_declared({n: kept[n] for n in kept if n in same}, turn.get("levels"), same)


def _format_of(state: Any) -> int:
    found = state.get("format") if isinstance(state, dict) else None
    COUNT.check(found, "its format")
    return int(found)  # type: ignore[arg-type]


def _own(kept: Mapping[str, Structure]) -> dict[str, Structure]:
    """Return the structure of one worker's state, or of the workers' mean."""
    memory = {"memory": ENGINE_STATE["memory"]}
    # Unknown entries, such as the totals of a monitor that this run lacks, are ignored.
    averaged = Record(memory, maybe=kept, others=ANYTHING)
    return {"averaged": averaged, "compressor": ENGINE_STATE["compressor"]}


def _check_shapes(own: Tree, main: Tree) -> None:
    """Raise ValueError if errors differ in names or shapes from the checkpoint's record.

    A worker that has just resumed without its side file has no errors, which is allowed.
    """
    memory = own["averaged"]["memory"]
    if not memory or "shapes" not in main:
        return
    found = {n: {b: list(t.shape) for b, t in kept.items()} for n, kept in memory.items()}
    for name in found.keys() | main["shapes"].keys():
        expected = main["shapes"].get(name)
        if found.get(name) != expected:
            raise ValueError(
                f"averaged/memory/{name} has shapes {found.get(name)}, but its checkpoint says "
                f"{expected}"
            )
