"""Runs in shards resume: bit for bit on the same mesh, with the mean errors on any other.

Checkpoints are a folder or one file. Errors are read from the strategy when training goes on, so
what is not restored is seen at once.
"""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gc import Identity, Menu, PerParameter, PowerSGD, TopK
from lightning_gc.controllers import Accordion, Schedule
from lightning_gc.lightning.for_pytorch_lightning import CompressionMonitor
from tests.support.accelerator import needs_four
from tests.support.auto import Scripted
from tests.support.hsdp import RANKS, Resumed, Sharded, fit_sharded, hsdp
from tests.support.instances import ALL_MEMORIES
from tests.support.processes import run_in_processes

pytestmark = [pytest.mark.processes, needs_four]
Found = list[dict[str, Any]]
STEPS = 3


def train(
    rank: int,
    compressor: Any,
    epochs: int,
    save: str = "",
    resume: str | None = None,
    mesh: tuple[int, int] = (2, 2),
    callbacks: Any = (),
    module: Any = Sharded,
    **options: Any,
) -> dict[str, Any]:
    """Return what a fit has left, and what it has begun with."""
    resumed = Resumed(save)
    strategy = hsdp(compressor, mesh[0], **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fit_sharded(
            rank,
            strategy,
            STEPS,
            module,
            resume=resume,
            ranks=mesh[0] * mesh[1],
            max_epochs=epochs,
            callbacks=[resumed, *(make() for make in callbacks)],
        )
    warned = [str(w.message) for w in caught if "esumed" in str(w.message)]
    return found | {"at start": resumed.memory, "began": resumed.step, "warned": warned}


def interrupted(
    rank: int, folder: str, compressor: Any, epochs: tuple[int, int] = (1, 2), **options: Any
) -> dict[str, Any]:
    """Train some epochs at once, and in two parts."""
    path, (half, every) = str(Path(folder, "half.ckpt")), epochs
    whole = train(rank, compressor, every, **options)
    first = train(rank, compressor, half, save=path, **options)
    second = train(rank, compressor, every, resume=path, **options)
    return {"whole": whole, "first": first, "second": second}


def everything(rank: int, folder: str) -> dict[str, Any]:
    topk = PerParameter(TopK(0.05))
    found: dict[str, Any] = interrupted(rank, folder, topk)
    half = str(Path(folder, "half.ckpt"))
    found[str((4, 1))] = train(rank, topk, 2, resume=half, mesh=(4, 1))
    return found


def more(rank: int, folder: str) -> dict[str, Any]:
    """What is shown at night."""
    topk, half = PerParameter(TopK(0.05)), str(Path(folder, "half.ckpt"))
    found = {"first": train(rank, topk, 1, save=half)}
    found[str((1, 4))] = train(rank, topk, 2, resume=half, mesh=(1, 4))
    found["off"] = train(rank, topk, 2, resume=half, state="off")
    one = Path(folder, "one")
    one.mkdir(exist_ok=True)
    menu = Menu({"topk": TopK(0.05), "powersgd": PowerSGD(1), "dense": Identity()})
    other = Path(folder, "menu")
    other.mkdir(exist_ok=True)
    found["menu"] = interrupted(rank, str(other), menu, controller=Schedule((2, 1)))
    chooses = Path(folder, "auto")
    chooses.mkdir(exist_ok=True)
    auto = Scripted(allow=menu)
    found["auto"] = interrupted(rank, str(chooses), "auto", epochs=(4, 8), controller=auto)
    found["one file"] = interrupted(
        rank,
        str(one),
        PowerSGD(1),
        controller=Accordion(low=2, high=1, interval=1),
        callbacks=[CompressionMonitor],
        save_distributed_checkpoint=False,
    )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hsdp")


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    results: Found = run_in_processes(everything, RANKS, str(folder), timeout=200)
    return results


@pytest.fixture(scope="module")
def at_night(folder: Path) -> Found:
    here = folder / "night"
    here.mkdir()
    results: Found = run_in_processes(more, RANKS, str(here), timeout=200)
    return results


def check_resumed(found: Found) -> None:
    """The second half begins with what the first has left, and ends as the whole."""
    for rank in found:
        first, second, whole = rank["first"], rank["second"], rank["whole"]
        assert second["began"] == first["rounds"] >= STEPS
        assert second["at start"].keys() >= {n for n, kept in first["memory"].items() if kept.size}
        for name, kept in second["at start"].items():
            if kept.size:
                np.testing.assert_array_equal(kept, first["memory"][name])
        for part in ("whole", "memory"):
            assert second[part].keys() == whole[part].keys()
            for name, expected in whole[part].items():
                np.testing.assert_array_equal(second[part][name], expected)
        assert second["levels"] == whole["levels"]
        assert not second["warned"]


def mean_errors(ranks: list[dict[str, Any]], mesh: tuple[int, int]) -> dict[str, Any]:
    """Return the mean over replicas of whole parameters' errors, from each rank's part."""
    replicas, shards = mesh
    means = {}
    for name in ranks[0]:
        every = [
            np.concatenate(
                [
                    ranks[r * shards + s][name]
                    for s in range(shards)
                    if name in ranks[r * shards + s]
                ]
            )
            for r in range(replicas)
        ]
        means[name] = np.mean(every, axis=0)
    return means


def test_a_run_resumes_bit_for_bit(found: Found) -> None:
    check_resumed(found)
    assert sum(np.abs(kept).sum() for kept in found[0]["second"]["at start"].values()) > 0.01


@pytest.mark.nightly
def test_one_file_resumes_bit_for_bit(at_night: Found, folder: Path) -> None:
    """With a low-rank method's own state, a controller and the monitor's totals."""
    check_resumed([rank["one file"] for rank in at_night])
    assert (folder / "night" / "one" / "half.ckpt").is_file()
    assert (folder / "night" / "half.ckpt").is_dir()


@pytest.mark.nightly
def test_auto_chooses_between_replicas_and_resumes(at_night: Found) -> None:
    check_resumed([rank["auto"] for rank in at_night])
    menu = Menu({"topk": TopK(0.05), "powersgd": PowerSGD(1), "dense": Identity()})
    place = menu.names.index("powersgd") + 1
    for rank in at_night:
        chosen = {level for level in rank["auto"]["whole"]["levels"].values() if level is not None}
        assert chosen == {place}
        assert rank["auto"]["first"]["levels"] != {}


@pytest.mark.nightly
def test_a_menu_resumes_bit_for_bit(at_night: Found) -> None:
    check_resumed([rank["menu"] for rank in at_night])


def test_another_mesh_has_the_mean_errors(found: Found) -> None:
    check_mean_errors(found, (4, 1))


@pytest.mark.nightly
def test_one_replica_has_the_mean_errors(at_night: Found) -> None:
    check_mean_errors(at_night, (1, 4))


def check_mean_errors(found: Found, mesh: tuple[int, int]) -> None:
    before = mean_errors([rank["first"]["memory"] for rank in found], (2, 2))
    after = mean_errors([rank[str(mesh)]["at start"] for rank in found], mesh)
    assert before.keys() == after.keys()
    for name, expected in before.items():
        np.testing.assert_allclose(after[name], expected, rtol=0, atol=1e-6)
    assert {rank[str(mesh)]["began"] for rank in found} == {STEPS}


@pytest.mark.nightly
def test_off_begins_at_zero(at_night: Found) -> None:
    assert at_night[0]["off"]["at start"] == {}
    assert at_night[0]["off"]["began"] == STEPS


def resume_elsewhere(rank: int, path: str, mesh: tuple[int, int]) -> dict[str, Any]:
    return train(rank, PerParameter(TopK(0.05)), 2, resume=path, mesh=mesh)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", [(2, 1), (1, 2), (3, 1), (1, 3)], ids=str)
def test_fewer_ranks_have_the_mean_errors(
    found: Found, folder: Path, mesh: tuple[int, int]
) -> None:
    path, ranks = str(folder / "half.ckpt"), mesh[0] * mesh[1]
    results = run_in_processes(resume_elsewhere, ranks, path, mesh)
    before = mean_errors([rank["first"]["memory"] for rank in found], (2, 2))
    after = mean_errors([rank["at start"] for rank in results], mesh)
    for name, expected in before.items():
        np.testing.assert_allclose(after[name], expected, rtol=0, atol=1e-6)


def each_memory(rank: int, folder: str) -> list[dict[str, Any]]:
    found, plain = [], partial(Sharded, momentum=0.0)  # some memories have the momentum
    for index, memory in enumerate(ALL_MEMORIES):
        here = Path(folder, str(index))
        here.mkdir(exist_ok=True)
        found.append(
            interrupted(rank, str(here), PerParameter(TopK(0.05)), memory=memory, module=plain)
        )
    return found


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_every_memory_resumes_bit_for_bit(tmp_path: Path) -> None:
    results = run_in_processes(each_memory, RANKS, str(tmp_path), timeout=500)
    for index, memory in enumerate(ALL_MEMORIES):
        try:
            check_resumed([rank[index] for rank in results])
        except AssertionError as error:
            raise AssertionError(repr(memory)) from error


def mean_and_narrow(rank: int, folder: str) -> dict[str, Any]:
    topk, found = PerParameter(TopK(0.05)), {}
    modes: dict[str, Any] = {"mean": {"state": "mean"}, "narrow": {"state_dtype": "bfloat16"}}
    for name, options in modes.items():
        path = str(Path(folder, name))
        found[name] = train(rank, topk, 1, save=path, **options)
        found[f"{name} again"] = train(rank, topk, 2, resume=path, **options)
    return found


@pytest.mark.nightly
def test_means_and_narrow_errors(tmp_path: Path) -> None:
    found = run_in_processes(mean_and_narrow, RANKS, str(tmp_path))
    for rank, twin in ((0, 2), (1, 3)):
        for name, kept in found[rank]["mean again"]["at start"].items():
            both = [found[each]["mean"]["memory"][name] for each in (rank, twin)]
            np.testing.assert_allclose(kept, np.mean(both, axis=0), rtol=0, atol=1e-6)
        for name, kept in found[rank]["narrow again"]["at start"].items():
            rounded = torch.from_numpy(found[rank]["narrow"]["memory"][name]).bfloat16().float()
            np.testing.assert_array_equal(kept, rounded.numpy())
