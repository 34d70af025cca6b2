"""Files of models in shards that somebody has prepared run no code: SECURITY.md.

An attacker makes checksums fit or leaves them out, so nothing here has a record of its files.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.accelerator import needs_two
from tests.support.prepared import harmed, pickled, saved, with_object, with_tensor
from tests.support.processes import run_in_processes
from tests.support.shard_damage import RANKS, copy, of_fsdp, of_hsdp, save, tried, within

pytestmark = [pytest.mark.processes, needs_two]

Prepare = Callable[[Path, Path], None]
STATE = "lightning_gc_state/*/"


def _in(name: str, prepare: Callable[[Path, Path], None]) -> Prepare:
    """Prepare a file within a checkpoint."""
    return lambda path, harm: prepare(within(path, name), harm)


PREPARED: dict[str, Prepare] = {
    "torch's metadata": _in(".metadata", pickled),
    "an object in torch's files": with_object,
    "a tensor in torch's files": with_tensor,
    "Lightning's counters": _in("meta.pt", saved),
    "a rank's file": _in(STATE + "rank1of2.pt", saved),
}


def _prepared(saved_: Path, path: Path, harm: Path, prepare: Prepare) -> None:
    copy(saved_, path)
    for record in path.rglob("files.json"):
        record.unlink()
    prepare(path, harm)


def everything(rank: int, folder: str) -> dict[str, tuple[str, str]]:
    here, found = Path(folder), dict[str, tuple[str, str]]()
    settings: dict[str, Any] = {"HSDP": of_hsdp, "FSDP": of_fsdp}
    for name, make in settings.items():
        save(rank, make, here / name)
        path, a = here / "restored" / "a.ckpt", here / name / "a.ckpt"
        prepare = [partial(_prepared, a, path, here, each) for each in PREPARED.values()]
        for safely in (True, None):
            outcomes = tried(rank, make, path, prepare, weights_only=safely)
            words = [f"{name}, {what}, weights_only={safely}" for what in PREPARED]
            found |= dict(zip(words, outcomes, strict=True))
    return found


def test_prepared_files_run_nothing_and_are_refused_by_name(tmp_path: Path) -> None:
    found = run_in_processes(everything, RANKS, str(tmp_path))
    assert not harmed(tmp_path)
    assert len(found[0]) == 4 * len(PREPARED)
    for rank in found:
        assert {what: said for what, (how, said) in rank.items() if how != "refused"} == {}
    for what, (_, said) in found[0].items():
        if "torch's metadata" in what:
            assert re.search(r"\.metadata names pathlib\S*, which is not a class of", said), said
            assert "give Trainer.fit(..., weights_only=False)" in said
