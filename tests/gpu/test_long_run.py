"""Memory and events stay as many over a run without a monitor; devices change at a resume."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback

from lightning_gc import HardThreshold, PerParameter, StepAhead, TopK
from lightning_gc.controllers import TotalErrorBudget
from tests.support.accelerator import DEVICE, WORKERS
from tests.support.fitting import ddp, fit
from tests.support.models import Plain, own_batches
from tests.support.processes import run_in_processes
from tests.support.resuming import checkpoint, fit_and_save

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.processes,
    pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU"),
]


class Counts(Callback):
    """Notes allocated bytes and the number of CUDA events in some steps."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.found = steps, []  # type: ignore[var-annotated]

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step in self.steps:
            gc.collect()
            events = sum(type(each) is torch.cuda.Event for each in gc.get_objects())
            self.found.append((torch.cuda.memory_allocated(), events))


def counted(worker: int) -> list[tuple[int, int]]:
    counts = Counts(50, 200)
    fit(
        ddp(PerParameter(TopK(0.1)), bucket_cap_mb=0.005),
        Plain,
        own_batches(worker, 200),
        devices=WORKERS,
        use_distributed_sampler=False,
        callbacks=[counts],
    )
    return counts.found


def test_nothing_piles_up() -> None:
    for early, late in run_in_processes(counted, WORKERS):
        assert late[0] <= early[0] + 4096, (early, late)
        assert late[1] <= early[1] + 10, (early, late)


CASES: dict[str, dict[str, Any]] = {
    "residual": {"compressor": PerParameter(TopK(0.2))},
    "step ahead": {"compressor": PerParameter(TopK(0.2)), "memory": StepAhead()},
    "budget": {
        "compressor": PerParameter(HardThreshold(0.1)),
        "controller": TotalErrorBudget(0.1),
    },
}


def elsewhere(worker: int, device: str, folder: str, case: str, resume: Any) -> Any:
    """Fit on a device, whatever the tests are set to."""
    from tests.support import fitting, resuming

    for module in (fitting, resuming):
        vars(module)["DEVICE"] = device
    vars(fitting)["BACKEND"] = "nccl" if device == "cuda" else "gloo"
    return fit_and_save(worker, WORKERS, folder, 2, resume=resume, **CASES[case])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("first", "then"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_going_on_elsewhere(tmp_path: Path, case: str, first: str, then: str) -> None:
    whole = run_in_processes(elsewhere, WORKERS, first, str(tmp_path / "a"), case, None)
    resume = checkpoint(tmp_path / "a", 0, 5)
    found = run_in_processes(elsewhere, WORKERS, then, str(tmp_path / "b"), case, resume)
    assert [each["steps"] for each in found] == [10] * WORKERS
    if first == then:
        assert [each["digest"] for each in found] == [each["digest"] for each in whole]
        assert [each["memory"] for each in found] == [each["memory"] for each in whole]
