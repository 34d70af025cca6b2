"""Simulated workers with local steps train, save and resume as real processes do."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

from lightning_gc import (
    QSGD,
    AllGather,
    GrowingRounds,
    InnerMoments,
    NoMemory,
    OuterSGD,
    PerParameter,
    TopK,
)
from lightning_gc.controllers import RoundSchedule, Schedule
from lightning_gc.lightning.for_pytorch_lightning import SimulatedLocalStepsStrategy
from tests.support.local_steps import local
from tests.support.models import Plain
from tests.support.processes import run_in_processes
from tests.support.resuming import Crash, checkpoint
from tests.support.simulation import real, simulated

pytestmark = pytest.mark.processes
LOCAL = {"real": local, "simulated": SimulatedLocalStepsStrategy}
SPARSE = PerParameter(TopK(0.1))


class Adam(Plain):
    """Has statistics, a head that only some batches use, a rate that falls, and decay."""

    def __init__(self) -> None:
        super().__init__()
        self.body.insert(1, nn.BatchNorm1d(40))
        self.other = nn.Linear(40, 4)

    def loss(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        head = self.other if batch[0, 0] > 0.5 else self.head
        output: torch.Tensor = head(self.body(batch))
        return (output - batch[:, :4] * 2).square().mean()

    def configure_optimizers(self) -> Any:
        adam = torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.5)
        falling = torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)
        return [adam], [{"scheduler": falling, "interval": "step"}]


class Taught(Adam):
    """Has a mean teacher, and the least loss so far, which begins at ∞."""

    least: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)
        self.register_buffer("least", torch.tensor(torch.inf))

    def loss(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for theirs, ours in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            theirs.data.mul_(0.5).add_(ours.data, alpha=0.5)
        loss = super().loss(batch, batch_idx)
        self.least = torch.minimum(self.least, loss.detach())
        return loss


class Adapts(torch.optim.SGD):
    """Estimates its step size as Prodigy does, and keeps it in its group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.param_groups[0] |= {"d": 0.01, "seen": torch.zeros(())}

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        (group,) = self.param_groups
        grads = [param.grad for param in group["params"] if param.grad is not None]
        group["seen"] += torch.stack([grad.norm() for grad in grads]).sum()
        group["d"] = max(group["d"], 0.01 * float(group["seen"]))
        for grad in grads:
            grad.mul_(group["d"])
        super().step()
        return loss


class Counts(Adapts):
    """Keeps a number of its own, and moments in an optimizer that it holds."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.norm = 0.0
        self.inner = torch.optim.AdamW(self.param_groups[0]["params"], lr=0.001)

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.norm += float(self.param_groups[0]["params"][0].grad.norm())
        self.inner.param_groups[0]["lr"] = 0.001 * self.norm
        self.inner.step()
        return loss


class Distance:
    """A number and a tensor in an object of the user's."""

    def __init__(self) -> None:
        self.steps, self.seen = 0, [torch.zeros(())]


class Remembers(torch.optim.SGD):
    """Looks ahead from slow weights in a dict, adds noise of its own, and keeps an object."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.slow: dict[Any, dict[str, torch.Tensor]] = {}
        self.stream = torch.Generator().manual_seed(7)
        self.distance = Distance()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.distance.steps += 1
        for param in self.param_groups[0]["params"]:
            param.add_(torch.randn(param.shape, generator=self.stream), alpha=0.01)
            slow = self.slow.setdefault(param, {"weights": param.clone()})
            if self.distance.steps % 3 == 0:
                self.distance.seen[0] += (param - slow["weights"]).norm()
                rate = 1 / (2 + float(self.distance.seen[0]))
                slow["weights"].lerp_(param, rate)
                param.copy_(slow["weights"])
        return loss


class Adapting(Adam):
    """Has an optimizer that adapts numbers, at a rate that falls."""

    kind: Any = Adapts

    def configure_optimizers(self) -> Any:
        adapting = self.kind(self.parameters())
        falling = torch.optim.lr_scheduler.ExponentialLR(adapting, 0.9)
        return [adapting], [{"scheduler": falling, "interval": "step"}]


class Counting(Adapting):
    kind = Counts


class Remembering(Adapting):
    kind = Remembers


class Conflicting(Adapting):
    """Its optimizer sets the learning rate, and so does the scheduler."""

    class kind(Adapts):  # noqa: N801 - an attribute
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            self.param_groups[0]["lr"] *= 1.0 + float(self.param_groups[0]["d"])
            return loss


CASES: dict[str, dict[str, Any]] = {
    "adapting": {"module": Adapting, "options": {"every": 3}},
    "counting, growing": {"module": Counting, "options": {"every": GrowingRounds(0.2, 2)}},
    "remembering": {"module": Remembering, "options": {"every": 3}},
    "sparse": {"module": Adam, "options": {"every": 4}},
    "clipped, accumulated, delayed": {
        "module": Adam,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.1,
        "options": {"every": 4, "delay": 1, "fragments": 2, "merge": "mix"},
    },
    "quantised, growing, outer momentum": {
        "compressor": PerParameter(QSGD(4)),
        "module": Adam,
        "precision": "bf16-mixed",
        "options": {
            "every": GrowingRounds(0.02, 2),
            "memory": NoMemory(),
            "scheme": AllGather(),
            "outer": OuterSGD.diloco(),
        },
    },
    "taught": {"module": Taught, "options": {"every": 4}},
    "moments": {
        "module": Adam,
        "options": {"every": 2, "moments": InnerMoments({"exp_avg": 1, "exp_avg_sq": 2})},
    },
    "levels": {"options": {"every": 3, "controller": Schedule((0.2, 0.05))}},
    "rounds": {"options": {"controller": RoundSchedule((3, 1, 5), levels=Schedule((0.2, 0.05)))}},
}
RESUMED: dict[str, dict[str, Any]] = {
    "an adapted number": {"module": Adapting, "options": {"every": 4}},
    "within a round": {"module": Adam, "options": {"every": 4}},
    "an exchange under way": {
        "module": Adam,
        "options": {"every": 6, "delay": 4, "outer": OuterSGD.diloco()},
    },
    "a teacher": {"module": Taught, "options": {"every": 6, "delay": 4}},
    "moments": {"module": Adam, "options": {"every": 4, "moments": InnerMoments({"exp_avg": 2})}},
    "a round of another H": {"options": {"every": 2, "controller": RoundSchedule((4, 2))}},
}
SAME = ("digest", "memory", "metrics", "controller", "steps")


def whole(case: dict[str, Any]) -> dict[str, Any]:
    return {"compressor": SPARSE, **LOCAL, **case}


def test_equal_to_real_workers() -> None:
    cases = [whole(case) for case in CASES.values()]
    runs = zip(*run_in_processes(real, 2, 2, cases), strict=True)
    for name, case, them in zip(CASES, cases, runs, strict=True):
        accumulated = case.get("accumulate_grad_batches", 1)
        us = simulated(2, case | {"accumulate_grad_batches": 2 * accumulated})
        assert us["steps"] == them[0]["steps"] >= 12
        assert us["digest"] == them[0]["digest"] == them[1]["digest"], name
        assert us["memory"] == [run["memory"][0] for run in them], name
        assert us["metrics"] == them[0]["metrics"], name
        assert us["rounds"] == [run["rounds"][0] for run in them], name
        for ours, theirs in zip(us["buffers"], them[0]["buffers"], strict=True):
            assert np.array_equal(ours, theirs), name


def test_what_simulated_workers_cannot_have_of_their_own_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"adapts 'lr' in its steps, and a scheduler or callback"
    ):
        simulated(2, whole({"module": Conflicting, "options": {"every": 4}}))


def run(kind: str, folder: Path, case: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Fit three epochs, saving each."""
    callbacks = [
        Crash(more.pop("crash", -1)),
        ModelCheckpoint(folder, "{epoch}-{step}", save_top_k=-1, save_on_train_epoch_end=True),
    ]
    case = whole(case) | {"max_epochs": 3, "enable_checkpointing": True, "callbacks": callbacks}
    if kind == "simulated":
        return simulated(2, case | more)
    runs = [each[0] for each in run_in_processes(real, 2, 2, [case | more])]
    return runs[0] | ({"memory": [each["memory"][0] for each in runs]} if runs[0] else {})


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.nightly if n == "moments" else ()) for n in RESUMED]
)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("real", "simulated"),
        pytest.param("simulated", "simulated", marks=pytest.mark.nightly),
        pytest.param("simulated", "real", marks=pytest.mark.nightly),
    ],
)
def test_resume_each_other(before: str, after: str, name: str, tmp_path: Path) -> None:
    case = RESUMED[name]
    undisturbed = run("simulated", tmp_path / "whole", case)
    run(before, tmp_path / "crashed", case, crash=5)
    resumed = run(after, tmp_path / "on", case, resume=checkpoint(tmp_path / "crashed", 0, 15))
    assert {w: undisturbed[w] for w in SAME} == {w: resumed[w] for w in SAME}
