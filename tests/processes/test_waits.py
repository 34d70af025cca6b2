"""A worker that waits for another one says for whom: the other one comes once this is said."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric.plugins import TorchCheckpointIO
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import PerParameter, TopK, attach
from lightning_gc.checkpoint.side_files import FOLDER, together, told_by_rank_0
from lightning_gc.controllers import Fixed
from lightning_gc.exchange.peers import take_over
from lightning_gc.transports.distributed import Distributed, gather_text, own_group
from tests.support.fitting import ddp, fit
from tests.support.models import Books, own_batches
from tests.support.processes import run_in_processes
from tests.support.resuming import checkpoint, fit_and_save
from tests.support.waits import hearing, held

pytestmark = pytest.mark.processes
CPU = torch.device("cpu")
PEER = "Waiting for worker 1 to save or read a checkpoint"
Act = Callable[[], object]


def host() -> Any:
    return SimpleNamespace(root_device=CPU, global_rank=dist.get_rank(), world_size=2)


def groups() -> Act:
    return lambda: own_group([[0, 1]], None)


def settings() -> Act:
    return lambda: gather_text("a setting", Distributed(), CPU)


def weights() -> Act:
    return lambda: take_over(nn.Linear(2, 2))


def results() -> Act:
    return lambda: together(host(), {dist.get_rank(): lambda: ""})


def paths() -> Act:
    return lambda: told_by_rank_0(host(), "a.ckpt")


def handle() -> Any:
    module = DistributedDataParallel(nn.Linear(40, 40))
    made = attach(module, TopK(0.1), optimizers=torch.optim.SGD(module.parameters(), 0.1))
    module(torch.ones(1, 40)).sum().backward()
    return made


def mean_state() -> Act:
    made = handle()
    return lambda: made.state_dict("mean")


def loading() -> Act:
    made = handle()
    state = made.state_dict()
    return lambda: made.load_state_dict(state)


def meet(worker: int, late: int, make: Callable[[], Act], sentence: str, seen: Path) -> None:
    dist.init_process_group("gloo")
    act = make()
    if worker == late:
        held(seen)
        act()
    else:
        with hearing(sentence, seen.touch):
            act()
    dist.barrier()  # none leaves before the other one has its answer


@pytest.mark.parametrize(
    ("late", "make", "until"),
    [
        (1, groups, "start"),
        (1, settings, "start"),
        (0, weights, "begin with the same weights"),
        (1, results, "save or read a checkpoint"),
        (0, paths, "save or read a checkpoint"),
        (1, mean_state, "save the mean state"),
        (1, loading, "load a state"),
    ],
)
def test_whom_a_worker_waits_for(
    late: int, make: Callable[[], Act], until: str, tmp_path: Path
) -> None:
    sentence = f"Waiting for worker {late} to {until} ("
    run_in_processes(meet, 2, late, make, sentence, tmp_path / "seen")


class Holds(pl.Callback):
    """Keeps this worker at one place until the other one has said its line."""

    def __init__(self, place: str, seen: Path) -> None:
        setattr(self, place, lambda *_, **__: held(seen))


def train(worker: int, place: str, sentence: str, seen: Path) -> None:
    def run(*callbacks: Any) -> None:
        strategy = ddp(PerParameter(TopK(0.1)), controller=Fixed(0.1))
        data = own_batches(worker, 2)
        fit(strategy, Books, data, devices=2, callbacks=[*callbacks], use_distributed_sampler=False)

    if worker == 0:
        with hearing(sentence, seen.touch):
            run()
    elif place:
        run(Holds(place, seen))
    else:
        held(seen)
        run()


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("", "Waiting for the other workers to start"),
        ("setup", "Waiting for worker 1 to reach Lightning's barrier post_setup"),
        ("on_train_batch_start", "Waiting for worker 1 to begin epoch 0"),
    ],
)
def test_whom_a_fit_waits_for(place: str, sentence: str, tmp_path: Path) -> None:
    run_in_processes(train, 2, place, sentence, tmp_path / "seen")


class EachStep(Fixed):
    """Decides before every step."""

    def every_steps(self, epoch: int) -> int:
        return 1


class Started(pl.Callback):
    """Names the threads that have been started until the first batch's end, and after it."""

    def __init__(self) -> None:
        self.first: list[str] = []
        self.later: list[str] = []
        self._now = self.first

    def setup(self, *_: Any, **__: Any) -> None:
        start = threading.Thread.start

        def named(thread: threading.Thread) -> None:
            self._now.append(thread.name)
            start(thread)

        threading.Thread.start = named  # type: ignore[assignment]

    def on_train_batch_end(self, *_: Any) -> None:
        self._now = self.later

    def on_train_epoch_end(self, *_: Any) -> None:
        self._now = []


def train_each_step(worker: int) -> None:
    started, strategy = Started(), ddp(PerParameter(TopK(0.1)), controller=EachStep(0.1))
    fit(
        strategy,
        Books,
        own_batches(worker, 4),
        devices=2,
        callbacks=[started],
        use_distributed_sampler=False,
    )
    assert "notices" in started.first
    assert not started.later


def test_no_step_starts_a_thread() -> None:
    run_in_processes(train_each_step, 2)


class Slow(TorchCheckpointIO):
    """Writes or reads a side file once a line has been said."""

    def __init__(self, saves: Path | None, loads: Path | None) -> None:
        self.saves, self.loads = saves, loads

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if self.saves is not None and FOLDER in str(path):
            held(self.saves)
        super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> Any:
        if self.loads is not None and FOLDER in str(path):
            held(self.loads)
        return torch.load(path, map_location, weights_only=True)


def save_or_restore(worker: int, folder: Path, epochs: int, peer: str, file: str) -> None:
    """Worker 0's own file takes until its line, and worker 1's takes until worker 0 names it."""
    seen = folder / f"{('file', 'peer')[worker]}{epochs}"
    io = Slow(seen, None) if epochs == 1 else Slow(None, seen)
    resume = None if epochs == 1 else checkpoint(folder, 0, 5)

    def run() -> None:
        topk = PerParameter(TopK(0.1))
        fit_and_save(worker, 2, str(folder), epochs, topk, resume, plugins=[io])

    if worker == 1:
        run()
        return
    own, other = folder / f"file{epochs}", folder / f"peer{epochs}"
    with hearing(file, own.touch), hearing(peer, other.touch):
        run()


def test_what_saving_and_restoring_wait_for(tmp_path: Path) -> None:
    peer, file = f"{PEER} (", f"Waiting for {tmp_path / FOLDER}/...-worker0of2.pt to be"
    run_in_processes(save_or_restore, 2, tmp_path, 1, peer, f"{file} written (")
    run_in_processes(save_or_restore, 2, tmp_path, 2, peer, f"{file} read (")


def save_mean(worker: int, folder: Path, seen: Path, sentence: str) -> None:
    def run(*callbacks: Any) -> None:
        topk = PerParameter(TopK(0.1))
        fit_and_save(worker, 2, str(folder), 1, topk, state="mean", callbacks=callbacks)

    if worker == 1:
        run(Holds("on_save_checkpoint", seen))
        return
    with hearing(sentence, seen.touch):
        run()


def test_whom_saving_the_mean_waits_for(tmp_path: Path) -> None:
    run_in_processes(save_mean, 2, tmp_path, tmp_path / "seen", f"{PEER} (")
