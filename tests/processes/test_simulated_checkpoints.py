"""Real and simulated workers resume from each other's checkpoints, bit for bit."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_gc import HardThreshold, PerParameter, TopK
from lightning_gc.checkpoint.side_files import FOLDER
from lightning_gc.controllers import Accordion, TotalErrorBudget
from lightning_gc.lightning.for_pytorch_lightning import SimulatedDDPStrategy
from tests.support.controlled_workers import Listens
from tests.support.fitting import quiet_trainer, unwarned
from tests.support.models import GoesOn, Plain, common_batches, common_rows
from tests.support.processes import standing
from tests.support.resuming import Crash, checkpoint, side_files
from tests.support.simulation import fit_case, real, simulated

pytestmark = pytest.mark.processes
EVERYWHERE = PerParameter(TopK(0.05))
STEPS = 15  # of an epoch, with two workers
SAME = ("digest", "memory", "metrics", "controller", "steps")


def run(
    kind: str,
    folder: Path,
    resume: str | None = None,
    crash: int = -1,
    workers: int = 2,
    saving: dict[str, Any] | None = None,
    **case: Any,
) -> dict[str, Any]:
    """Fit three epochs, saving each; return what there is to compare, with errors of all."""
    saving = saving or {"save_on_train_epoch_end": True}
    case = {
        "compressor": EVERYWHERE,
        "max_epochs": 3,
        "enable_checkpointing": True,
        "resume": resume,
        "callbacks": [
            Crash(crash),
            ModelCheckpoint(folder, "{epoch}-{step}", save_top_k=-1, **saving),
        ],
        **case,
    }
    if kind == "simulated":
        return simulated(workers, case)
    runs = [each[0] for each in standing.run(real, workers, workers, [case])]
    of_all = {what: [each[what][0] for each in runs] for what in ("errors", "memory") if runs[0]}
    return runs[0] | of_all


CASES: dict[str, dict[str, Any]] = {
    "topk": {},
    "accordion": {
        "options": {"controller": Accordion(low=0.5, high=0.1, interval=1, threshold=0.2)}
    },
    "budget": {
        "compressor": PerParameter(HardThreshold(0.1)),
        "options": {"controller": TotalErrorBudget(0.1)},
    },
}


@functools.cache
def undisturbed(kind: str, name: str) -> dict[str, Any]:
    """Return what three epochs end with."""
    with tempfile.TemporaryDirectory() as folder:
        return run(kind, Path(folder), **CASES[name])


@pytest.mark.parametrize(
    "name", ["topk", pytest.param("accordion", marks=pytest.mark.nightly), "budget"]
)
@pytest.mark.parametrize(
    ("first", "second"),
    [("simulated", "simulated"), ("simulated", "real"), ("real", "simulated")],
)
def test_goes_on_as_the_other(tmp_path: Path, name: str, first: str, second: str) -> None:
    """Bit for bit what the second would have been alone."""
    run(first, tmp_path / "first", crash=2 * STEPS, **CASES[name])
    resume = checkpoint(tmp_path / "first", 1, 2 * STEPS)
    resumed = run(second, tmp_path / "second", resume, **CASES[name])
    whole = undisturbed(second, name)
    assert {key: resumed[key] for key in SAME} == {key: whole[key] for key in SAME}


def goes_on() -> GoesOn:
    return GoesOn(common_rows(), 4, shuffle=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second"),
    [("simulated", "simulated"), ("simulated", "real"), ("real", "simulated")],
)
def test_within_an_epoch(tmp_path: Path, first: str, second: str) -> None:
    case = {**CASES["budget"], "data": goes_on, "saving": {"every_n_train_steps": STEPS + 7}}
    whole = run(second, tmp_path / "whole", **case)
    run(first, tmp_path / "first", crash=STEPS + 7, **case)
    resume = checkpoint(tmp_path / "first", 1, STEPS + 7)
    resumed = run(second, tmp_path / "second", resume, **case)
    assert {key: resumed[key] for key in SAME} == {key: whole[key] for key in SAME}


def test_the_same_files(tmp_path: Path) -> None:
    """As real workers write: side files by name and content, and what Lightning has counted."""
    contents = []
    for kind in ("real", "simulated"):
        folder = tmp_path / kind
        run(kind, folder, max_epochs=1)
        files = side_files(folder)
        assert list(files) == [f"epoch=0-step=15.ckpt-step15-worker{i}of2.pt" for i in range(2)]
        side = [torch.load(file, weights_only=True) for file in files.values()]
        main = torch.load(checkpoint(folder, 0, STEPS), weights_only=True)
        contents.append((side, main))
    (theirs, their_main), (ours, our_main) = contents
    for one, other in zip(theirs, ours, strict=True):
        for name, kept in one["averaged"]["memory"].items():
            assert torch.equal(kept["error"], other["averaged"]["memory"][name]["error"])
        assert one["worker"] == other["worker"]
    assert our_main["loops"]["fit_loop"] == their_main["loops"]["fit_loop"]
    assert our_main["global_step"] == their_main["global_step"]


class Owing(Plain):
    """Adds up the mean gradient of the workers, less what the optimizer was given."""

    def __init__(self) -> None:
        super().__init__()
        self.added: list[tuple[str, Any]] = []  # one for all workers, since it only grows

    def noted(self) -> dict[str, Any]:
        owed: dict[str, Any] = {}
        for name, value in self.added:
            owed[name] = owed.get(name, 0) + value
        return super().noted() | {"owed": owed}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        names, params = zip(*self.named_parameters(), strict=True)
        for name, grad in zip(
            names, torch.autograd.grad(loss, params, retain_graph=True), strict=True
        ):
            self.add(name, grad.double() / self.trainer.accumulate_grad_batches)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        for name, param in self.named_parameters():
            assert param.grad is not None
            self.add(name, -param.grad.double())

    def add(self, name: str, value: Tensor) -> None:
        self.added.append((name, value.numpy()))


def kept(result: dict[str, Any], name: str) -> Any:
    return np.mean([errors[name] for errors in result["errors"]], axis=0)


@pytest.mark.parametrize("state", ["full", "mean", "off"])
@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 3), (2, 1)])
def test_other_numbers_of_workers_owe_the_same(
    tmp_path: Path, before: int, now: int, state: str
) -> None:
    case: dict[str, Any] = {"module": Owing, "options": {"state": state}}
    first = run("simulated", tmp_path / "a", workers=before, max_epochs=1, **case)
    (resume,) = (tmp_path / "a").glob("*.ckpt")
    second = run("simulated", tmp_path / "b", str(resume), workers=now, max_epochs=2, **case)
    for name, earlier in first["owed"].items():
        assert np.abs(kept(first, name) - earlier).max() < 1e-5
        assert np.abs(earlier).max() > 1e-4
        due = second["owed"][name] + (0 if state == "off" else earlier)
        assert np.abs(kept(second, name) - due).max() < 1e-5, name
    assert (tmp_path / "a" / FOLDER).exists() == (state == "full")


@pytest.mark.filterwarnings("ignore")  # Lightning's advice for small fits
def test_a_second_fit_goes_on() -> None:
    """The same Trainer and strategy: errors stay, and so do the user's settings."""
    strategy = SimulatedDDPStrategy(EVERYWHERE, workers=3)
    first = fit_case(strategy, max_epochs=1)
    assert first["steps"] == 10
    module = strategy.lightning_module
    assert module is not None
    trainer = module.trainer
    assert trainer.accumulate_grad_batches == 1
    trainer.fit_loop.max_epochs = 2
    engine = strategy.engine
    trainer.fit(module, common_batches())
    assert strategy.engine is engine
    assert engine is not None
    assert engine.step == 20
    assert trainer.accumulate_grad_batches == 1


@pytest.mark.parametrize("state", ["full", "off"])
def test_a_controller_that_begins_anew_counts_from_the_resumed_step(
    state: Any, tmp_path: Path
) -> None:
    """Another one than in the checkpoint, and the same where no state is restored."""
    path, told = str(tmp_path / "last.ckpt"), []
    begins: list[Any] = [(1, None, "full"), (2, path, state)]
    for epochs, resume, kept in begins:
        controller = Listens()
        strategy = SimulatedDDPStrategy(TopK(0.1), controller=controller, workers=2, state=kept)
        trainer = quiet_trainer(strategy, max_epochs=epochs, limit_train_batches=4)
        with unwarned():
            trainer.fit(Plain(), common_batches(), ckpt_path=resume)
            trainer.save_checkpoint(path)
        told.append([each.steps for each in controller.told])
    assert told == [[0], [0]]
    assert strategy.engine is not None
    assert strategy.engine.step == 8
