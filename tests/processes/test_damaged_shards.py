"""Any damaged file of a model in shards is refused by name, or every bit is restored.

Errors of HSDP, and what torch's distributed checkpoint writes for HSDP and FSDP.
"""

import contextlib
from collections import Counter
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist

from tests.support.accelerator import needs_two
from tests.support.hsdp import Sharded, fit_sharded
from tests.support.processes import run_in_processes
from tests.support.shard_damage import (
    RANKS,
    Damage,
    copy,
    counted,
    damages,
    of_fsdp,
    of_hsdp,
    save,
    tried,
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

Swept = tuple[Counter[tuple[str, str]], list[str]]


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


def check(found: list[Swept]) -> Counter[tuple[str, str]]:
    for counts, wrong in found:
        assert not wrong, "\n".join([str(dict(counts)), *wrong])
    assert found[0][0] == found[1][0]
    return found[0][0]


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    counts = check(run_in_processes(sweep, RANKS, str(tmp_path), "HSDP", 1, 4))
    assert counts.total() >= 20
    assert sum(number for (_, how), number in counts.items() if how == "refused") >= 15


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_damage_is_refused_by_name(tmp_path: Path, name: str, capsys: Any) -> None:
    counts = check(run_in_processes(sweep, RANKS, str(tmp_path), name, 5, None, timeout=800))
    with capsys.disabled():
        kinds = ", ".join(f"{kind} {how} {n}" for (kind, how), n in sorted(counts.items()))
        print(f"{name}: {counts.total()} damages: {kinds}")  # noqa: T201
    assert counts.total() >= 40


def without_record(saved: Path, path: Path) -> None:
    copy(saved, path)
    without_record_of(path)


def with_a_fraction(saved: Path, path: Path) -> None:
    """Keep an object of a class that torch does not know, as a user's callback may."""
    copy(saved, path)
    content = torch.load(path / "meta.pt", weights_only=True)
    torch.save(content | {"callbacks": {"mine": Fraction(1, 3)}}, path / "meta.pt")
    without_record_of(path)


def without_record_of(path: Path) -> None:
    for record in path.rglob("files.json"):
        record.unlink()


class Overwrites(pl.Callback):
    """Saves under a name that there is, and fails; then saves weights only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.left: list[list[str]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)
        checkpoint = trainer._checkpoint_connector.dump_checkpoint()

        def fail(_: Any) -> None:
            raise ConnectionError("killed")

        with pytest.raises(ConnectionError):
            trainer.strategy._store.save(checkpoint, self.path, None, fail)
        dist.barrier()
        self._look()
        trainer.save_checkpoint(self.path, weights_only=True)
        dist.barrier()
        self._look()

    def _look(self) -> None:
        names = [p.name for p in (*self.path.iterdir(), *self.path.glob("*/*/*"))]
        self.left.append(sorted(set(names) & {"meta.pt", "files.json", "rank0of2.pt"}))
        dist.barrier()


def other_ways(rank: int, folder: str) -> dict[str, Any]:
    here = Path(folder)
    save(rank, of_hsdp, here / "one")
    a, path = here / "one/a.ckpt", here / "restored/a.ckpt"
    saves = {"a": a}
    flipped = Damage("flip", ("__0_0.distcp",), 1)
    found: dict[str, Any] = {}
    plain, unrecorded = (partial(each, a, path) for each in (copy, without_record))
    fraction = partial(with_a_fraction, a, path)
    both = [plain, unrecorded, fraction]
    found["safely"] = tried(rank, of_hsdp, path, both)
    found["trusted"] = tried(rank, of_hsdp, path, both, weights_only=False)
    off = partial(of_hsdp, state="off")
    found["off"] = tried(rank, off, path, [partial(flipped.do, path, saves)])
    with (
        pytest.warns(UserWarning, match="has no checksums of its weights")
        if rank == 0
        else (contextlib.nullcontext())
    ):
        fit_sharded(
            rank, of_hsdp(), 1, _adam, ranks=RANKS, resume=_prepared(rank, unrecorded, path)
        )
    overwrites = Overwrites(here / "again.ckpt")
    fit_sharded(rank, of_hsdp(), 1, _adam, ranks=RANKS, callbacks=[overwrites])
    return found | {"left": overwrites.left}


def _adam() -> Sharded:
    return Sharded(adam=True)


def _prepared(rank: int, prepare: Any, path: Path) -> Path:
    if rank == 0:
        prepare()
    dist.barrier()
    return path


def test_other_ways_to_load(tmp_path: Path) -> None:
    """Without a record, with a file that the user trusts, without errors; and to overwrite."""
    for found in run_in_processes(other_ways, RANKS, str(tmp_path)):
        whole, unrecorded, fraction = found["safely"]
        assert whole[0] == "restored"
        assert unrecorded == whole
        assert fraction[0] == "refused"
        assert "meta.pt cannot be read with weights_only=True: it names fractions." in fraction[1]
        assert "weights_only=False" in fraction[1]
        how, digest = zip(*found["trusted"], strict=True)
        assert how == ("restored",) * 3
        assert digest[:2] == (whole[1],) * 2
        assert found["off"][0][0] == "restored"
        assert found["left"] == [["files.json", "rank0of2.pt"], ["meta.pt"]]
