"""Any damaged file of a model in shards is refused by name, or every bit is restored.

Errors of HSDP, and what torch's distributed checkpoint writes for HSDP and FSDP.
"""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.accelerator import needs_two
from tests.support.processes import run_in_processes
from tests.support.shard_damage import (
    RANKS,
    Damage,
    copy,
    counted,
    damages,
    files_of,
    of_fsdp,
    of_hsdp,
    save,
    tried,
    within,
)

pytestmark = [pytest.mark.processes, needs_two]

SETTINGS: dict[str, Any] = {
    "HSDP": (of_hsdp, of_hsdp),
    "HSDP, one file": (partial(of_hsdp, save_distributed_checkpoint=False),) * 2,
    "HSDP, mean errors": (partial(of_hsdp, state="mean"),) * 2,
    "HSDP, another mesh": (of_hsdp, partial(of_hsdp, 1)),
    "FSDP": (of_fsdp, of_fsdp),
}
"""Strategies that save and that restore."""

Swept = tuple[Counter[str], list[str]]


def sweep(rank: int, folder: str, name: str, each: int, some: int | None) -> Swept:
    """Save, damage and restore; ``some``: every n-th damage only."""
    saving, restoring = SETTINGS[name]
    here = Path(folder)
    save(rank, saving, here / "one")
    save(rank, saving, here / "two", seed=3)
    saves = {"a": here / "one/a.ckpt", "b": here / "one/b.ckpt", "c": here / "two/a.ckpt"}
    done = damages(saves["a"], each, seed=1)[::some]
    path = here / "damaged" / "a.ckpt"
    prepare = [partial(copy, saves["a"], path), *(partial(d.do, path, saves) for d in done)]
    whole, *outcomes = tried(rank, restoring, path, prepare, weights_only=True)
    assert whole[0] == "restored", whole
    return counted(outcomes, done, whole[1])


def check(found: list[Swept]) -> Counter[str]:
    for counts, wrong in found:
        assert not wrong, "\n".join([str(dict(counts)), *wrong])
    assert found[0][0] == found[1][0]
    return found[0][0]


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    counts = check(run_in_processes(sweep, RANKS, str(tmp_path), "HSDP", 1, 4))
    assert counts.total() >= 20
    assert counts["refused"] >= 15


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_damage_is_refused_by_name(tmp_path: Path, name: str, capsys: Any) -> None:
    counts = check(run_in_processes(sweep, RANKS, str(tmp_path), name, 3, None, timeout=800))
    with capsys.disabled():
        print(f"{name}: {counts.total()} damages, {dict(counts)}")  # noqa: T201
    assert counts.total() >= 40


OLD: dict[str, Any] = {
    "the same mesh": (of_hsdp, of_hsdp),
    "another mesh": (of_hsdp, partial(of_hsdp, 1)),
    "from another mesh": (partial(of_hsdp, 1), of_hsdp),
    "mean errors": (partial(of_hsdp, state="mean"),) * 2,
    "narrow errors": (partial(of_hsdp, state_dtype="bfloat16"),) * 2,
    "FSDP": (of_fsdp, of_fsdp),
}


def old_and_new(rank: int, folder: str, name: str, flips: int) -> tuple[bool, Swept]:
    """Restore what both formats have saved of the same run; flip bits of the old one's errors."""
    saving, restoring = OLD[name]
    here = Path(folder) / name
    outcomes = []
    done = []
    for old in (False, True):
        saves = {"a": here / str(old) / "a.ckpt"}
        save(rank, saving, here / str(old), old=old)
        path = here / "restored" / "a.ckpt"
        prepare = [partial(copy, saves["a"], path)]
        if old:
            names = [n for n in files_of(saves["a"]) if "state/" in n and ".metadata" not in n]
            names = [n for n in names if within(saves["a"], n).stat().st_size]
            done = [Damage("flip", (n,), i) for n in names for i in range(flips)]
            prepare += [partial(damage.do, path, saves) for damage in done]
        outcomes.append(tried(rank, restoring, path, prepare, weights_only=True))
    (new,), (before, *others) = outcomes
    return new == before and new[0] == "restored", counted(others, done, new[1])


@pytest.mark.parametrize(
    "name", [n if n == "another mesh" else pytest.param(n, marks=pytest.mark.nightly) for n in OLD]
)
def test_checkpoints_of_format_1_are_restored_bit_for_bit(tmp_path: Path, name: str) -> None:
    """As those of today; and their tensors are checked by the sums that torch's format has."""
    found = run_in_processes(old_and_new, RANKS, str(tmp_path), name, 4)
    assert all(same for same, _ in found)
    check([swept for _, swept in found])
