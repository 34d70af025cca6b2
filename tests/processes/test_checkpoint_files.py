"""Checkpoint files can be moved, linked, lost, or loaded by another number of workers."""

import functools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning.plugins.io import AsyncCheckpointIO

from lightning_gc import DIANA, EF21, QSGD, ErrorFeedback, GradiVeQ, NoMemory, PerParameter, TopK
from lightning_gc.checkpoint.side_files import FOLDER
from lightning_gc.controllers import Fixed, Schedule
from lightning_gc.lightning.for_pytorch_lightning import CompressedDDPStrategy
from lightning_gc.memories import Memory
from tests.support.processes import standing
from tests.support.resuming import (
    checkpoint,
    differences,
    fit_and_save,
    in_processes,
    side_files,
)

pytestmark = pytest.mark.processes
TOPK = PerParameter(TopK(0.1))


def run(workers: int, folder: Path, epochs: int, compressor: Any = TOPK, **options: Any) -> Any:
    return in_processes(
        workers, folder=str(folder), epochs=epochs, compressor=compressor, **options
    )


def owed(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean gradient less what was applied, summed over the run's steps."""
    return {
        name: np.mean([r["local"][name] for r in runs], axis=0) - runs[0]["applied"][name]
        for name in runs[0]["applied"]
    }


def mean_error(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: np.mean([r["errors"][0][name] for r in runs], axis=0) for name in runs[0]["errors"][0]
    }


late = pytest.mark.nightly


@pytest.mark.parametrize(
    ("before", "now", "state"),
    [
        (4, 2, "full"),
        (2, 3, "full"),
        (2, 1, "mean"),
        (1, 2, "mean"),
        *(pytest.param(*c, "mean", marks=late) for c in [(4, 2), (2, 3)]),
        *(pytest.param(*c, "full", marks=late) for c in [(2, 1), (1, 2)]),
    ],
)
def test_other_numbers_of_workers_owe_the_same(
    tmp_path: Path, before: int, now: int, state: str
) -> None:
    first = run(before, tmp_path / "a", 1, state=state)
    resume = checkpoint(tmp_path / "a", 0, 5)
    second = run(now, tmp_path / "b", 2, resume=resume, state=state, controller=Fixed(0.1))
    left, due = mean_error(second), owed(second)
    for name, earlier in owed(first).items():
        assert np.abs(mean_error(first)[name] - earlier).max() < 1e-6
        assert np.abs(earlier + due[name] - left[name]).max() < 1e-6
        assert np.abs(earlier).max() > 1e-3


def test_half_precision_files_are_half_the_size(tmp_path: Path) -> None:
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        folder = tmp_path / dtype
        run(2, folder, 1, state_dtype=dtype)
        sizes[dtype] = sum(file.stat().st_size for file in (folder / FOLDER).iterdir())
        runs = run(2, tmp_path / f"{dtype} on", 2, resume=checkpoint(folder, 0, 5))
        assert all(np.isfinite(e).all() for e in runs[0]["errors"][0].values())
    elements = 8 * 40 + 40 + 40 * 40 + 40 + 40 * 4 + 4
    assert sizes["float32"] - sizes["bfloat16"] == pytest.approx(2 * 2 * elements, rel=0.05)


def test_off_saves_nothing_and_begins_at_zero(tmp_path: Path) -> None:
    run(2, tmp_path / "a", 1, state="off")
    assert not (tmp_path / "a" / FOLDER).exists()
    run(2, tmp_path / "full", 1)
    for folder in ("a", "full"):
        resume = checkpoint(tmp_path / folder, 0, 5)
        second = run(2, tmp_path / f"{folder} on", 2, resume=resume, state="off")
        left, due = mean_error(second), owed(second)
        assert all(np.abs(left[name] - due[name]).max() < 1e-6 for name in left)


def test_files_are_plain_data(tmp_path: Path) -> None:
    """Tensors by parameter name, in every worker's file; nothing that has to be unpickled."""
    run(2, tmp_path, 1, controller=Schedule((0.1, 0.2)))
    main = torch.load(checkpoint(tmp_path, 0, 5), weights_only=True)["lightning_gc"]
    assert (main["format"], main["mode"], main["workers"], main["step"]) == (3, "full", 2, 5)
    assert main["controller"]["decision"]["level"] == 0.1
    files = side_files(tmp_path)
    assert list(files) == [f"epoch=0-step=5.ckpt-step5-worker{worker}of2.pt" for worker in range(2)]
    for worker, file in enumerate(files.values()):
        own = torch.load(file, weights_only=True)
        assert (own["format"], own["worker"], own["workers"]) == (3, worker, 2)
        assert (own["run"], own["stem"]) == (main["run"], main["stem"])
        assert own["sha256"] == main["files"][worker]
        memory = own["averaged"]["memory"]
        assert memory["body.2.weight"]["error"].shape == (40, 40)
        assert memory["body.2.weight"]["error"].dtype == torch.float32


@functools.cache
def undisturbed() -> list[dict[str, Any]]:
    """Return what a run of three epochs ends with, however it saves."""
    with tempfile.TemporaryDirectory() as folder:
        return run(2, Path(folder), 3)  # type: ignore[no-any-return]


def test_checkpoints_are_found_elsewhere(tmp_path: Path) -> None:
    """By a link; renamed; moved with their folder."""
    saving: dict[str, Any] = {"save_top_k": 1, "save_on_train_epoch_end": True}
    first, elsewhere = tmp_path / "first", tmp_path / "elsewhere"
    run(2, first, 2, saving=saving | {"save_last": "link"})
    saved, renamed = first / "epoch=1-step=10.ckpt", first / "mine.ckpt"
    assert (first / "last.ckpt").is_symlink()
    assert_goes_on(first / "last.ckpt", tmp_path / "linked", saving)
    saved.rename(renamed)
    assert_goes_on(renamed, tmp_path / "renamed", saving)
    renamed.rename(saved)
    first.rename(elsewhere)
    assert_goes_on(elsewhere / saved.name, tmp_path / "moved", saving)


def assert_goes_on(resume: Path, folder: Path, saving: dict[str, Any]) -> None:
    resumed = run(2, folder, 3, resume=str(resume), saving=saving)
    assert differences(undisturbed(), resumed) == []


def test_last_is_the_checkpoint_and_not_a_side_file(tmp_path: Path) -> None:
    """Lightning takes for the last checkpoint whatever beside it has "last" in its name."""
    saving = {"save_last": True, "save_top_k": 1, "save_on_train_epoch_end": True}
    run(2, tmp_path / "first", 3, crash=10, saving=saving)
    side = [name for name in side_files(tmp_path / "first") if name.startswith("last")]
    assert side == [f"last.ckpt-step10-worker{worker}of2.pt" for worker in range(2)]
    resumed = run(2, tmp_path / "first", 3, resume="last", saving=saving)
    assert differences(undisturbed(), resumed) == []


def test_side_files_go_with_their_checkpoint(tmp_path: Path) -> None:
    run(2, tmp_path, 4, saving={"save_top_k": 2, "monitor": "step", "mode": "max"})
    kept = sorted(file.name for file in tmp_path.glob("*.ckpt"))
    assert kept == ["epoch=2-step=15.ckpt", "epoch=3-step=20.ckpt"]
    side = {name.rpartition("-step")[0] for name in side_files(tmp_path)}
    assert sorted(side) == kept


def test_weights_only_saves_have_none(tmp_path: Path) -> None:
    run(2, tmp_path, 1, saving={"save_weights_only": True})
    assert not (tmp_path / FOLDER).exists()
    assert "lightning_gc" not in torch.load(checkpoint(tmp_path, 0, 5), weights_only=True)


def asynchronous(worker: int, options: dict[str, Any]) -> dict[str, Any]:
    return fit_and_save(worker, 2, plugins=[AsyncCheckpointIO()], **options)


def test_saved_in_a_thread(tmp_path: Path) -> None:
    options = {"folder": str(tmp_path / "first"), "epochs": 3, "compressor": TOPK, "crash": 10}
    standing.run(asynchronous, 2, options)
    resumed = run(2, tmp_path / "second", 3, resume=checkpoint(tmp_path / "first", 1, 10))
    assert differences(undisturbed(), resumed) == []


def warned(worker: int, workers: int, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit_and_save(worker, workers, **options)
    words = ("Resumed with", "Error state")
    return result, [str(w.message) for w in caught if str(w.message).startswith(words)]


def changed(tmp_path: Path, compressor: Any, **options: Any) -> tuple[Any, list[str]]:
    run(2, tmp_path / "a", 1, controller=Fixed(0.1))
    resume = checkpoint(tmp_path / "a", 0, 5)
    options |= {"folder": str(tmp_path / "b"), "epochs": 2, "resume": resume}
    results = standing.run(
        warned, 2, 2, {"compressor": compressor, "controller": Fixed(0.1), **options}
    )
    assert results[1][1] == []  # worker 0 speaks for all
    return results, results[0][1]


def test_another_compressor_keeps_the_errors(tmp_path: Path) -> None:
    results, (sentence,) = changed(
        tmp_path, PerParameter(QSGD(4)), controller=None, memory="error_feedback"
    )
    assert "QSGD(bits=4" in sentence
    assert "errors are kept" in sentence
    assert "Controller Fixed(level=0.1) is now None: its state is reset." in sentence
    assert results[0][0]["controller"] is None


def test_another_memory_says_so(tmp_path: Path) -> None:
    _, (sentence,) = changed(tmp_path, TOPK, memory=NoMemory())
    assert "Memory ErrorFeedback(decay=1.0, lr_aware=False, gain=1.0) is now NoMemory()" in sentence
    assert "error is dropped" in sentence
    shutil.rmtree(tmp_path / "a")
    _, (sentence,) = changed(tmp_path, TOPK, memory=ErrorFeedback(decay=0.5))
    assert "error is kept." in sentence


def test_a_lost_side_file_of_what_must_be_equal_on_all_workers(tmp_path: Path) -> None:
    """A basis that one worker has lost is learnt anew by all, who would ask for other messages."""
    learns = PerParameter(GradiVeQ(2, 16, every=50, dense_steps=2))
    run(2, tmp_path / "a", 1, compressor=learns)
    os.remove(side_files(tmp_path / "a")["epoch=0-step=5.ckpt-step5-worker1of2.pt"])
    options = {"folder": str(tmp_path / "b"), "epochs": 2, "compressor": learns}
    options |= {"resume": checkpoint(tmp_path / "a", 0, 5)}
    results, _ = zip(*standing.run(warned, 2, 2, options), strict=True)
    assert results[0]["digest"] == results[1]["digest"]


@pytest.mark.parametrize("memory", [EF21(), pytest.param(DIANA(), marks=late)], ids=repr)
def test_a_lost_side_file_of_a_memory_that_all_have_alike(tmp_path: Path, memory: Memory) -> None:
    """An estimate that one worker has lost is reset on all: their means would differ."""
    compressor = QSGD(4) if isinstance(memory, DIANA) else TOPK
    common: dict[str, Any] = {"compressor": compressor, "memory": memory}
    run(2, tmp_path / "a", 1, **common)
    os.remove(side_files(tmp_path / "a")["epoch=0-step=5.ckpt-step5-worker1of2.pt"])
    options = {"folder": str(tmp_path / "b"), "epochs": 2, **common}
    options |= {"resume": checkpoint(tmp_path / "a", 0, 5)}
    (one, (sentence,)), (other, _) = standing.run(warned, 2, 2, options)
    assert one["digest"] == other["digest"]
    assert f"{type(memory).__name__} keeps buffers that must be equal on all" in sentence


def test_a_lost_side_file_counts_as_zeros(tmp_path: Path) -> None:
    first = run(2, tmp_path / "a", 1)
    lost = side_files(tmp_path / "a")["epoch=0-step=5.ckpt-step5-worker1of2.pt"]
    os.remove(lost)
    options = {"folder": str(tmp_path / "b"), "epochs": 2, "compressor": TOPK}
    options |= {"resume": checkpoint(tmp_path / "a", 0, 5)}
    (one, quiet), (other, (sentence,)) = standing.run(warned, 2, 2, options)
    assert quiet == []
    assert str(lost) in sentence
    assert FOLDER in sentence
    left, due = mean_error([one, other]), owed([one, other])
    for name, error in first[0]["errors"][0].items():
        assert np.abs(error / 2 + due[name] - left[name]).max() < 1e-6


def refused(worker: int, resumes: list[tuple[str, str]], folder: str) -> list[str]:
    """Try to resume from several checkpoints; return what this worker says of each."""
    said = []
    for resume in resumes:
        options: dict[str, Any] = {"folder": folder, "epochs": 2, "compressor": TOPK}
        try:
            fit_and_save(worker, 2, resume=resume[worker], **options)
        except RuntimeError as error:
            said.append(str(error))
    return said


def cut(zero: Path, one: Path) -> None:
    one.write_bytes(one.read_bytes()[:1000])


def swap(zero: Path, one: Path) -> None:
    contents = zero.read_bytes(), one.read_bytes()
    one.write_bytes(contents[0])
    zero.write_bytes(contents[1])


def malform(zero: Path, one: Path) -> None:
    own = torch.load(one, weights_only=True)
    del own["averaged"]["controller"]
    torch.save(own, one)


def test_a_damaged_side_file_stops_all_workers(tmp_path: Path) -> None:
    """With one sentence, which names the file of each worker that could not use its own."""
    run(2, tmp_path / "a", 1, controller=Fixed(0.1))
    damages = {cut: [1], swap: [0, 1], malform: [1]}
    expected = []
    for number, (damage, whose) in enumerate(damages.items()):
        shutil.copytree(tmp_path / "a", tmp_path / f"damaged{number}")
        files = list(side_files(tmp_path / f"damaged{number}").values())
        damage(*files)
        expected.append([f"Worker {i} of 2 could not use {files[i]}: " for i in whose])
    resumes = [(checkpoint(tmp_path / f"damaged{number}", 0, 5),) * 2 for number in range(3)]
    run(2, tmp_path / "other", 1, controller=Fixed(0.1))
    resumes.append((checkpoint(tmp_path / "a", 0, 5), checkpoint(tmp_path / "other", 0, 5)))
    zero, one = standing.run(refused, 2, resumes, str(tmp_path / "b"), timeout=60)
    assert zero[:3] == one[:3]
    assert all("Worker 1 has found another checkpoint at" in said for said in (zero[3], one[3]))
    for sentence, parts in zip(zero[:3], expected, strict=True):
        assert all(part in sentence for part in parts)
        assert sentence.count("could not use") == len(parts)
        assert "state='off'" in sentence


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"state='some'\): use 'full', 'mean' or 'off'"):
        CompressedDDPStrategy(TopK(), state="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="state_dtype='int8'"):
        CompressedDDPStrategy(TopK(), state_dtype="int8")  # type: ignore[arg-type]
