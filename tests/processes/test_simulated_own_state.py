"""What a module, a callback, an optimizer or a sampler keeps is each simulated worker's own."""

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from lightning_gc import PerParameter, TopK
from lightning_gc.lightning.for_pytorch_lightning import SimulatedLocalStepsStrategy
from tests.support.local_steps import local
from tests.support.models import Plain, common_rows
from tests.support.processes import run_in_processes
from tests.support.simulation import real, simulated

pytestmark = pytest.mark.processes


class Counts(Plain):
    """Weighs its loss by the number of its own steps."""

    n = 0

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.n += 1
        return super().loss(batch, batch_idx) / (1 + 0.1 * self.n)


def move(teacher: nn.Module, student: nn.Module) -> None:
    for theirs, ours in zip(teacher.parameters(), student.parameters(), strict=True):
        theirs.data.mul_(0.5).add_(ours.data, alpha=0.5)


class Taught(Plain):
    """Learns of a mean teacher, too."""

    when = ""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.body).requires_grad_(False)

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.when == "step":
            move(self.teacher, self.body)
        taught = (self.body(batch) - self.teacher(batch + 0.1)).square().mean()
        return super().loss(batch, batch_idx) + taught

    def on_train_batch_end(self, *arguments: Any) -> None:
        if self.when == "end":
            move(self.teacher, self.body)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.when == "zero":
            move(self.teacher, self.body)


class TaughtInStep(Taught):
    when = "step"


class TaughtAtEnd(Taught):
    when = "end"


class TaughtBeforeZero(Taught):
    when = "zero"


class Moves(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *arguments: Any) -> None:
        move(module.teacher, module.body)


class Falls(Plain):
    """Lowers its learning rate after each step, by hand."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.9


class Queue(Plain):
    """Compares with what it has seen lately: in a tensor, a deque, a list and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.place = torch.zeros(6, 40), 0
        self.last: deque[Tensor] = deque(maxlen=3)
        self.bank: list[Tensor] = []
        self.means: dict[str, float] = {}

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        features = self.body(batch)
        mean = features.detach().mean(0)
        loss = super().loss(batch, batch_idx)
        for each in (*self.queue, *self.last, *self.bank):
            loss = loss + 0.1 * (features.mean(0) - each).square().mean()
        loss = loss * (1 + self.means.get("loss", 0.0))
        self.queue[self.place] = mean
        self.place = (self.place + 1) % len(self.queue)
        self.last.append(mean)
        self.bank.append(mean)
        if len(self.bank) > 4:
            self.bank.pop(0)
        self.means["loss"] = 0.5 * self.means.get("loss", 0.0) + 0.1 * float(loss.detach())
        return loss


class Dropped(Plain):
    """Draws from its process's random numbers: worker 1 a number more, so streams differ."""

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch[0, 0] > 0:
            torch.rand(1)
        return super().loss(nn.functional.dropout(batch, 0.3), batch_idx)


class Lookahead(torch.optim.SGD):
    """Goes half way back to slow weights, by a dict, and adds noise of its own generator."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 0.05, momentum=0.9)
        self.slow: dict[Any, Tensor] = {}
        self.steps = 0
        self.noise = torch.Generator().manual_seed(7)

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.steps += 1
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                slow = self.slow.setdefault(param, param.detach().clone())
                param.add_(torch.randn(param.shape, generator=self.noise), alpha=0.01)
                if self.steps % 3 == 0:
                    slow.add_(param - slow, alpha=0.5)
                    param.copy_(slow)
        return loss


class Looks(Plain):
    def configure_optimizers(self) -> Any:
        return Lookahead(self.parameters())


class Shuffles(Sampler[int]):
    """Has an order of its own for each epoch, which it is told; else draws a common number."""

    def __init__(self, rows: int, drawing: str) -> None:
        self.rows, self.drawing, self.epoch = rows, drawing, 0
        self.generator = torch.Generator().manual_seed(3)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[int]:
        generator: Any = self.generator
        if self.drawing == "epoch":
            generator = torch.Generator().manual_seed(self.epoch)
        if self.drawing == "global":
            generator = None
        yield from torch.randperm(self.rows, generator=generator).tolist()


class Batches(BatchSampler):
    """Is told the epoch, by which it turns its batches."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            turn = self.epoch % len(batch)
            yield batch[turn:] + batch[:turn]


class Rows(Dataset[Tensor]):
    """Is told the epoch by the module."""

    epoch = 0

    def __len__(self) -> int:
        return len(common_rows())

    def __getitem__(self, index: int) -> Tensor:
        return common_rows()[index] * (1 + 0.1 * self.epoch)


class Tells(Plain):
    def on_train_epoch_start(self) -> None:
        loader: Any = self.trainer.train_dataloader
        for told in (loader.dataset, loader.batch_sampler):
            if hasattr(told, "set_epoch"):
                told.set_epoch(self.current_epoch)
            elif isinstance(told, Rows):
                told.epoch = self.current_epoch


def shuffled(drawing: str) -> DataLoader[Any]:
    rows: Any = common_rows()
    return DataLoader(rows, 4, sampler=Shuffles(len(rows), drawing))


def in_batches() -> DataLoader[Any]:
    rows: Any = common_rows()
    return DataLoader(rows, batch_sampler=Batches(Shuffles(len(rows), "epoch"), 4, False))


def by_epoch() -> DataLoader[Any]:
    return shuffled("epoch")


def by_generator() -> DataLoader[Any]:
    return shuffled("own")


def by_process() -> DataLoader[Any]:
    return shuffled("global")


def moving() -> list[Any]:
    return [Moves()]


def rows() -> DataLoader[Any]:
    return DataLoader(Rows(), 4, shuffle=True)


CASES: dict[str, dict[str, Any]] = {
    "a number": {"module": Counts},
    "queues": {"module": Queue},
    "a teacher moved in the step": {"module": TaughtInStep},
    "a teacher moved after the step": {"module": TaughtAtEnd},
    "a teacher moved before gradients are zero": {"module": TaughtBeforeZero},
    "a teacher moved by a callback": {"module": Taught, "callbacks": moving},
    "a rate": {"module": Falls},
    "an optimizer": {"module": Looks},
    "dropout": {"module": Dropped},
    "dropout and a sampler": {"module": Dropped, "data": by_process},
    "the epoch of a sampler": {"data": by_epoch},
    "a sampler's generator": {"data": by_generator},
    "the epoch of batches": {"module": Tells, "data": in_batches},
    "the epoch of data": {"module": Tells, "data": rows},
}


def whole(case: dict[str, Any], steps: bool) -> dict[str, Any]:
    made = {"compressor": PerParameter(TopK(0.1)), "module": Plain, **case}
    if steps:
        made |= {"real": local, "simulated": SimulatedLocalStepsStrategy, "options": {"every": 4}}
    return made


KINDS = [(name, steps) for name in CASES for steps in (False, True)]
DAILY = [
    *(
        (name, False)
        for name in ("queues", "a teacher moved by a callback", "the epoch of batches")
    ),
    *((name, True) for name in ("an optimizer", "a rate", "dropout and a sampler")),
]


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(DAILY, id="daily"),
        pytest.param([k for k in KINDS if k not in DAILY], id="rest", marks=pytest.mark.nightly),
    ],
)
def test_equal_to_real_workers(
    kinds: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # An earlier test may have set Lightning's seed here; the processes do not inherit it.
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    cases = [whole(CASES[name], steps) for name, steps in kinds]
    runs = zip(*run_in_processes(real, 2, 2, cases, timeout=200), strict=True)
    wrong: list[tuple[Any, ...]] = []
    for kind, case, them in zip(kinds, cases, runs, strict=True):
        us = simulated(2, case)
        assert us["steps"] == them[0]["steps"] >= 12
        memory = [run["memory"][0] for run in them]
        pairs = {n: (us[n], them[0][n]) for n in ("digest", "metrics")}
        pairs["memory"] = (us["memory"], memory)
        wrong += [(*kind, n, *pair) for n, pair in pairs.items() if pair[0] != pair[1]]
    assert not wrong, "\n".join(map(str, wrong))
