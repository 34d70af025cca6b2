"""The process that started the workers goes on after they have ended, as in most notebooks."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.demos.boring_classes import BoringModel

from lightning_gc import QSGD, CompressedDDPStrategy, LocalStepsStrategy, TopK
from lightning_gc.controllers import Accordion
from tests.support.fitting import quiet_trainer, unwarned
from tests.support.processes import run_in_processes, without_others

pytestmark = pytest.mark.processes


def by_object() -> Any:
    controller = Accordion(low=0.2, high=0.1, interval=1)
    return CompressedDDPStrategy(TopK(0.2), controller=controller, start_method="fork")


def by_name() -> str:
    return "compressed_ddp_qsgd_notebook"


def with_local_steps() -> Any:
    return LocalStepsStrategy(QSGD(4), every=2, start_method="fork")


def trained(strategy: Any, resume: str | None = None, steps: int = 4) -> tuple[Any, Any]:
    """Return a Trainer and a module that two workers, which have ended, have trained."""
    module = BoringModel()
    trainer = quiet_trainer(strategy, accelerator="cpu", devices=2, max_steps=steps, max_epochs=-1)
    with unwarned():
        trainer.fit(module, ckpt_path=resume)
    return trainer, module


def saved(trainer: Any, path: str, *, weights_only: bool) -> tuple[Any, list[str]]:
    """Return what ``trainer.save_checkpoint`` writes, and the warnings that are ours."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.save_checkpoint(path, weights_only)
    return torch.load(path, weights_only=True), [str(each.message) for each in caught]


def afterwards(worker: int, make: Any, folder: str) -> None:
    port = os.environ["MASTER_PORT"]
    without_others()
    os.environ["MASTER_PORT"] = port
    trainer, module = trained(make())
    strategy = trainer.strategy
    path = os.path.join(folder, "last.ckpt")
    written, said = saved(trainer, path, weights_only=False)
    assert all(torch.equal(written["state_dict"][n], p) for n, p in module.state_dict().items())
    assert [text for text in said if "stayed in the worker processes" in text] == said
    assert len(said) == 1
    assert saved(trainer, path + "w", weights_only=True)[1] == []
    strategy.barrier("end")
    assert strategy.broadcast("x") == "x"
    assert float(strategy.reduce(torch.ones(()))) == 1
    assert (strategy.workers, strategy.world_size, strategy.levels()) == (2, 2, {})
    module.trainer = quiet_trainer("auto", accelerator="cpu")  # an earlier one of this process
    saved(trainer, path, weights_only=False)
    with unwarned():
        assert len(trainer.test(module, verbose=False)) == 1
        again, _ = trained(make(), path, steps=6)
    strategy.remove_checkpoint(path)
    assert not os.path.exists(path)
    assert again.state.finished


@pytest.mark.parametrize(
    "make", [by_object, pytest.param(by_name, marks=pytest.mark.nightly), with_local_steps]
)
def test_the_process_that_started_workers_saves_and_tests(make: Any, tmp_path: Path) -> None:
    """As with plain DDP: the file has the weights, and one warning says what it lacks."""
    run_in_processes(afterwards, 1, make, str(tmp_path))
