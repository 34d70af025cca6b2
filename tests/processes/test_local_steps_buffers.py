"""Workers with local steps end alike in all that a module has beside trained weights."""

import copy
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gc import PerParameter, TopK
from tests.support.accelerator import WORKERS, needs_two
from tests.support.fitting import fit
from tests.support.local_steps import Learner, local
from tests.support.models import own_batches
from tests.support.processes import run_in_processes

pytestmark = [pytest.mark.processes, needs_two]


class Taught(Learner):
    """Has a teacher that follows it, as in self-supervised learning, and a frozen backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)
        self.backbone = copy.deepcopy(self.head).requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        for theirs, ours in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            theirs.data.mul_(0.5).add_(ours.data, alpha=0.5)


class Observed(Learner):
    """Has the least loss so far, which begins at ∞, and a value that is missing."""

    best: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("best", torch.tensor(math.inf))
        self.register_buffer("missing", torch.tensor([1.0, math.nan]))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.best = torch.minimum(self.best, loss.detach())
        return loss


class Queued(Learner):
    """Keeps unit vectors of its last batches in a queue, as contrastive learning does."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.eye(4, 5))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        key = torch.nn.functional.normalize(batch.detach().reshape(-1)[:5], dim=0)
        self.queue[batch_idx % 4] = key
        return super().training_step(batch, batch_idx)


class Growing(Learner):
    """Has a table that grows as it is needed, on worker 1 before worker 0, and then a new one."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rows = 2 + batch_idx + self.global_rank
        self.register_buffer("table", torch.ones(rows), persistent=False)
        self.register_buffer(f"table_{rows}", torch.ones(rows))
        return super().training_step(batch, batch_idx)


class GrowingFromStart(Growing):
    """Has the table when the fit begins, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(1))


def everything(worker: int) -> dict[str, Any]:
    """In one pair of processes, for starting them takes long."""
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module in (Taught, Observed, Growing, GrowingFromStart):
            for delay in (0, 1):
                found[f"{module.__name__} {delay}"] = fit(
                    local(PerParameter(TopK(0.1)), every=3, delay=delay),
                    module,
                    own_batches(worker, 8),
                    devices=WORKERS,
                    use_distributed_sampler=False,
                )
        parts = PerParameter(TopK(0.1)), Queued, own_batches(worker, 8)
        own: dict[str, Any] = {"every": 3, "buffers": ("que*",)}
        found["own"] = fit(
            local(parts[0], **own), *parts[1:], devices=WORKERS, use_distributed_sampler=False
        )
    found["lost"] = [str(each.message) for each in caught if "lost" in str(each.message)]
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run_in_processes(everything, WORKERS)
    return results


@pytest.mark.parametrize("module", ["Taught", "Observed", "Growing", "GrowingFromStart"])
@pytest.mark.parametrize("delay", [0, 1])
def test_all_end_alike(found: list[dict[str, Any]], module: str, delay: int) -> None:
    first, second = (worker[f"{module} {delay}"] for worker in found)
    assert first["digest"] == second["digest"]
    assert first["trained"][0] == second["trained"][0] != first["trained"][-1]
    if module == "Observed":
        for ours, theirs in zip(first["buffers"], second["buffers"], strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert np.isfinite(first["buffers"][0])
    for worker in found:
        assert worker["lost"] == []


def test_own_buffers_stay_own(found: list[dict[str, Any]]) -> None:
    """Unit vectors stay unit vectors, which a mean of two workers' vectors is not."""
    first, second = (worker["own"] for worker in found)
    assert first["trained"][0] == second["trained"][0] != first["trained"][-1]
    for ours, theirs in zip(first["parameters"], second["parameters"], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    queues = np.asarray(first["buffers"][0]), np.asarray(second["buffers"][0])
    assert not np.array_equal(*queues)
    for queue in queues:
        np.testing.assert_allclose(np.linalg.norm(queue, axis=1), 1, rtol=1e-5)
