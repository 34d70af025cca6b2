"""A full disk or an exception costs no earlier checkpoint, and all workers say what happened."""

import functools
import re
import resource
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import OnExceptionCheckpoint

from lightning_gc import PerParameter, TopK
from lightning_gc.checkpoint.side_files import FOLDER
from tests.support.fitting import Crashed
from tests.support.processes import run_in_processes
from tests.support.resuming import Crash, differences, fit_and_save, in_processes, side_files

pytestmark = pytest.mark.processes
TOPK = PerParameter(TopK(0.1))
LAST = {"save_last": True, "save_top_k": 1, "save_on_train_epoch_end": True}


class FullDisk(pl.Callback):
    """From a step on, no file of this worker can have more than 4 KB."""

    def __init__(self, step: int, workers: tuple[int, ...]) -> None:
        self.step, self.workers = step, workers

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.strategy.engine.step == self.step and trainer.global_rank in self.workers:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def on_a_full_disk(worker: int, full: tuple[int, ...], options: dict[str, Any]) -> str:
    with pytest.raises(RuntimeError, match="could not write") as caught:
        fit_and_save(worker, 2, callbacks=[FullDisk(7, full)], **options)
    return str(caught.value)


@functools.cache
def undisturbed() -> list[dict[str, Any]]:
    """Return what a run with room for its files ends with."""
    with tempfile.TemporaryDirectory() as folder:
        return in_processes(2, folder=folder, epochs=3, compressor=TOPK, saving=LAST)


@pytest.mark.parametrize(
    ("full", "state"),
    [
        ((0,), "full"),
        ((1,), "full"),
        pytest.param((0, 1), "full", marks=pytest.mark.nightly),
        pytest.param((0,), "off", marks=pytest.mark.nightly),
    ],
)
def test_a_full_disk_costs_no_checkpoint(tmp_path: Path, full: Any, state: str) -> None:
    """All workers say who could not write and why; the run goes on from what was there before."""
    options: dict[str, Any] = {"epochs": 3, "compressor": TOPK, "saving": LAST, "state": state}
    options["folder"] = str(tmp_path / "first")
    sentences = run_in_processes(on_a_full_disk, 2, full, options, timeout=60)
    assert sentences[0] == sentences[1]
    for worker in full:
        assert f"Worker {worker} of 2 could not write " in sentences[0]
    assert "File too large" in sentences[0]
    named = re.findall(r"-worker(\d)of2\.pt", sentences[0])
    assert named == ([str(worker) for worker in full] if state == "full" else [])
    assert not list((tmp_path / "first").rglob("*.part"))
    resumed = in_processes(2, resume="last", **options)
    assert len(resumed[0]["losses"]) == 10
    if state == "full":
        assert differences(undisturbed(), resumed) == []


class CrashesBackward(pl.Callback):
    """Raises when the last of the gradients is ready: most buckets are on their way."""

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        seen: list[Any] = []

        def crash(grad: Any) -> None:
            seen.append(grad)
            if len(seen) == 2:  # the first time the module computes its own gradients for the books
                raise Crashed

        if trainer.strategy.engine.step == 7:
            module.body[0].weight.register_hook(crash)


class CrashesAfter(pl.Callback):
    """Raises between two steps."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.strategy.engine.step == 7:
            raise Crashed


def crashing(worker: int, callback: str, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    callbacks: list[Any] = [
        OnExceptionCheckpoint(folder, "crashed"),
        CrashesAfter() if callback == "between" else CrashesBackward(),
    ]
    if callback == "on worker 0":
        callbacks[1] = Crash(7 if worker == 0 else -1)
    return fit_and_save(worker, 2, callbacks=callbacks, **options)


def test_an_exception_between_steps_is_a_checkpoint_like_others(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 1, "batches": 12, "compressor": TOPK, "stateful": True}
    whole = in_processes(2, folder=str(tmp_path / "whole"), **options)
    options["folder"] = str(tmp_path / "first")
    run_in_processes(crashing, 2, "between", str(tmp_path), options)
    resumed = in_processes(2, resume=str(tmp_path / "crashed.ckpt"), **options)
    assert differences(whole, resumed) == []


def test_an_exception_within_a_step_says_that_errors_are_lost(tmp_path: Path) -> None:
    """Some buckets have been sent, others not: no errors fit to the weights that are saved."""
    options: dict[str, Any] = {
        "epochs": 1,
        "batches": 12,
        "compressor": TOPK,
        "bucket_cap_mb": 0.002,
    }
    options["folder"] = str(tmp_path / "first")
    run_in_processes(crashing, 2, "within", str(tmp_path), options)
    saved = torch.load(tmp_path / "crashed.ckpt", weights_only=True)
    assert saved["lightning_gc"]["torn"] is True
    assert not (tmp_path / FOLDER).exists()
    resumed = in_processes(2, resume=str(tmp_path / "crashed.ckpt"), **options)
    assert resumed[0]["rounds"][0] > 7


@pytest.mark.nightly
def test_an_exception_on_one_worker_saves_what_that_one_has(tmp_path: Path) -> None:
    """Nobody else answers, so saving must not wait for them; Lightning does so afterwards."""
    options: dict[str, Any] = {
        "epochs": 1,
        "batches": 12,
        "compressor": TOPK,
        "folder": str(tmp_path / "first"),
    }
    with pytest.raises((TimeoutError, RuntimeError)):
        run_in_processes(crashing, 2, "on worker 0", str(tmp_path), options, timeout=15)
    saved = torch.load(tmp_path / "crashed.ckpt", weights_only=True)
    assert (saved["lightning_gc"]["torn"], saved["lightning_gc"]["step"]) == (False, 7)
    assert list(side_files(tmp_path)) == ["crashed.ckpt-step7-worker0of2.pt"]
