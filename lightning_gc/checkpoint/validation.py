"""Validation: refuse a checkpoint's part or a side file that is damaged, malformed or foreign."""

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
"""Format 1 has no checksums, and nothing of what is called ``_SINCE_2`` here."""

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
"""What checkpoints have of workers in one process, and of those that are shared out."""
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
    """Raise ValueError if a checkpoint's part is not one of ours, whole and unchanged.

    Args:
        main: what lies under ``"lightning_gc"`` in the checkpoint.
        kept: name -> structure of workers' state besides the engine's, as far as it is known here.
        common: the same of what is equal on all workers.
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
    """Raise ValueError if a side file is not, unchanged, the one that a checkpoint has of a worker.

    Args:
        own: the file's content.
        main: the checkpoint's part, checked.
        worker: whose file it must be.
        kept: as for ``check_main``.
        alone: the same of what belongs to a worker alone.
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
    """Raise ValueError for levels, or state of a compressor, that this run's does not declare.

    Another compressor's are not used, nor is the state of parameters whose shape has changed.

    Args:
        own: a side file's content, or the checkpoint's part itself; checked.
        main: the checkpoint's part, checked.
        workers: of this process.
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
    # What is not known here, such as the totals of a monitor that is gone, is not used either.
    averaged = Record(memory, maybe=kept, others=ANYTHING)
    return {"averaged": averaged, "compressor": ENGINE_STATE["compressor"]}


def _check_shapes(own: Tree, main: Tree) -> None:
    """Raise ValueError if errors have not the names and shapes that the checkpoint says.

    There may be none: of a worker that has just resumed without its own.
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
