"""``ErrorFeedback`` was called ``Residual``: code, names and checkpoints of then still work."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_gc
from lightning_gc import (
    ErrorFeedback,
    PerParameter,
    Residual,
    SimulatedDDPStrategy,
    TopK,
    attach,
    memories,
)
from lightning_gc.core.registry import public_name, with_new_names
from lightning_gc.engine.compatibility import combine
from lightning_gc.methods.yaml_config import methods_in
from tests.support.fitting import fit
from tests.support.models import Plain, common_batches
from tests.support.processes import run_in_processes

OLD = "Residual(decay=0.9, lr_aware=False, gain=1.0)"


def test_the_old_name_is_the_same_class_without_a_warning() -> None:
    assert Residual is ErrorFeedback is memories.Residual is lightning_gc.Residual
    assert repr(Residual(0.9)) == OLD.replace("Residual", "ErrorFeedback")
    assert "Residual" in lightning_gc.__all__


def test_the_registry_has_it_once_and_takes_both_names() -> None:
    assert "error_feedback" in memories.MEMORIES
    assert "residual" not in memories.MEMORIES
    for name in ("residual", "error_feedback"):
        made = SimulatedDDPStrategy(TopK(0.1), memory=name, workers=2)
        assert made.memory == ErrorFeedback()
    assert combine(TopK(0.1))[1] == ErrorFeedback()


def test_settings_of_then_are_read_with_the_new_name() -> None:
    words = {"memory": OLD, "compressor": "TopK(density=0.1)", "note": "NarrowResidual('int8')"}
    assert with_new_names(words) == words | {"memory": repr(ErrorFeedback(0.9))}
    now = "lightning_gc.memories.ErrorFeedback"
    assert public_name("lightning_gc.memories.Residual") == now
    assert public_name("lightning_gc.memories.residual.Residual") == now
    assert public_name("mine.Residual") == "mine.Residual"


@pytest.mark.parametrize("path", ["", "lightning_gc.", "lightning_gc.memories."])
def test_yaml_files_of_then_are_read(path: str) -> None:
    for memory in (f"{path}Residual", {"class_path": f"{path}Residual"}):
        methods = methods_in({"tune": {"methods": {"topk": {"memory": memory}}}})
        assert methods["topk"].memory == ErrorFeedback()


@contextlib.contextmanager
def then() -> Iterator[None]:
    """Let the class have its old name, which its ``repr`` and so checkpoints contain."""
    ErrorFeedback.__qualname__ = "Residual"
    try:
        yield
    finally:
        ErrorFeedback.__qualname__ = "ErrorFeedback"


def run(folder: Path, resume: str | None = None) -> dict[str, Any]:
    saving = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    strategy = SimulatedDDPStrategy(PerParameter(TopK(0.05)), memory=Residual(0.9), workers=2)
    return fit(strategy, Plain, common_batches, resume=resume, max_epochs=2, callbacks=[saving])


@pytest.mark.filterwarnings("ignore:(?!Resumed with changes)")
def test_a_checkpoint_of_then_is_resumed_bit_for_bit(
    tmp_path: Path,
) -> None:
    """Without the warning "Resumed with changes", which would be an error here."""
    with then():
        unbroken = run(tmp_path)
    saved = str(tmp_path / "epoch=0.ckpt")
    assert OLD in str(torch.load(saved, weights_only=True)["lightning_gc"])
    resumed = run(tmp_path / "again", saved)
    for what in ("digest", "memory", "steps"):
        assert resumed[what] == unbroken[what], what


def resume_attached(worker: int) -> None:
    """Save after three steps under the old name, go on, and repeat that from the saved state."""

    def steps(model: nn.Module, first: int, last: int) -> None:
        for step in range(first, last):
            model.zero_grad()
            data = torch.randn(8, 40, generator=torch.Generator().manual_seed(9 * step + worker))
            model(data).square().sum().backward()
            with torch.no_grad():
                for param in model.parameters():
                    assert param.grad is not None
                    param.sub_(param.grad, alpha=1e-3)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(40, 40))
    with then():
        handle = attach(model, PerParameter(TopK(0.05)), Residual(0.9))
        steps(model, 0, 3)
        weights = {name: value.clone() for name, value in model.module.state_dict().items()}
        state = handle.state_dict()
    steps(model, 3, 6)
    handle.close()
    assert OLD in str(state)
    again = DistributedDataParallel(nn.Linear(40, 40))
    again.module.load_state_dict(weights)
    handle = attach(again, PerParameter(TopK(0.05)), ErrorFeedback(0.9))
    handle.load_state_dict(state)
    steps(again, 3, 6)
    handle.close()
    assert torch.equal(again.module.weight, model.module.weight)
    assert torch.equal(again.module.bias, model.module.bias)
    dist.destroy_process_group()


@pytest.mark.processes
def test_the_state_of_an_attached_module_of_then_is_loaded() -> None:
    run_in_processes(resume_attached, 2)
