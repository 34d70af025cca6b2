"""``attach``: equal to the strategy, resumed bit for bit, with a gradient scaler."""

import copy
import io
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_gc import (
    DGC,
    QSGD,
    Cast,
    EFSignSGD,
    ErrorFeedback,
    GTopK,
    Identity,
    PowerSGD,
    RandomK,
    SignSGD,
    StepAhead,
    TopK,
    attach,
)
from lightning_gc.compressors import Compressor
from lightning_gc.controllers import Accordion, Fixed
from lightning_gc.core.saved_state import checksum, with_checksum
from tests.support.fitting import ddp, digest, fit, unwarned
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes
STEPS = 20
FAMILIES: tuple[Compressor, ...] = (
    Identity(),
    Cast(),
    TopK(0.05),
    RandomK(0.1),
    QSGD(4),
    EFSignSGD(),
    SignSGD(),
    PowerSGD(1),
    GTopK(0.1),
)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out

    def training_step(self, x: Tensor) -> Tensor:
        return (self(x) - x[:, :4]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def batches(worker: int) -> Tensor:
    return torch.randn(STEPS, 8, 16, generator=torch.Generator().manual_seed(7 + worker))


class Loop:
    """A training loop of a user's own."""

    def __init__(self, worker: int, *args: Any, amp: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.ddp = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=amp)
        both: dict[str, Any] = {"optimizers": self.optimizer, "scaler": self.scaler}
        self.handle = attach(self.ddp, *args, **both | options)
        self.data = batches(worker)

    def run(self, start: int, stop: int, spoil: int = -1) -> None:
        for step in range(start, stop):
            x = self.data[step]
            loss = (self.ddp(x) - x[:, :4]).square().mean()
            if step == spoil:
                loss = loss * math.inf
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def end(self) -> tuple[str, dict[str, Any]]:
        state = self.handle.state_dict()
        self.handle.close()
        memory = state["engine"]["memory"]
        return digest(self.net), {n: kept["error"].numpy() for n, kept in memory.items()}


def both_ways(worker: int) -> list[tuple[Any, Any]]:
    dist.init_process_group("gloo")
    found = []
    for compressor in FAMILIES:
        loop = Loop(worker, compressor)
        loop.run(0, STEPS)
        own, errors = loop.end()
        with unwarned():
            data: Any = DataLoader(list(batches(worker)), batch_size=None)  # type: ignore[arg-type]
            left = fit(ddp(compressor), Net, data, devices=2, use_distributed_sampler=False)
        theirs = left["errors"][0]
        same = all((errors[n] == theirs[n]).all() for n in theirs) and len(errors) == len(theirs)
        found.append(((own, same), (left["digest"], True)))
    return found


def test_it_equals_the_strategy() -> None:
    """The same weights and errors, bit for bit, after 20 steps: one method of each family."""
    for results in run_in_processes(both_ways, 2):
        for compressor, (attached, strategy) in zip(FAMILIES, results, strict=True):
            assert attached == strategy, compressor


def interrupted(worker: int) -> list[Any]:
    dist.init_process_group("gloo")
    cases: list[Callable[[], tuple[Any, ...]]] = [
        lambda: (TopK(0.05),),
        lambda: (PowerSGD(1),),
        lambda: (QSGD(4),),
        lambda: (TopK(0.05), ErrorFeedback(lr_aware=True)),
        lambda: (TopK(0.05), None, None, Accordion(low=0.5, high=0.05, interval=1)),
    ]
    found = []
    by_hand = {"body.2.weight": None}
    for case in cases:
        straight, first, second = (Loop(worker, *case()) for _ in range(3))
        for loop in (straight, first):
            if len(case()) == 1 and not isinstance(case()[0], PowerSGD):
                loop.handle.set_levels(4 if isinstance(case()[0], QSGD) else 0.1, by_hand)
            epochs(loop, 0, 10)
        saved = io.BytesIO()
        torch.save(
            {
                "net": first.net.state_dict(),
                "optimizer": first.optimizer.state_dict(),
                "compression": first.handle.state_dict(),
            },
            saved,
        )
        saved.seek(0)
        loaded = torch.load(saved, weights_only=True)
        second.net.load_state_dict(loaded["net"])
        second.optimizer.load_state_dict(loaded["optimizer"])
        second.handle.load_state_dict(loaded["compression"])
        for loop in (straight, second):
            epochs(loop, 10, STEPS)
        (a, errors), (b, others) = straight.end(), second.end()
        first.handle.close()
        found.append((a, b, all((errors[n] == others[n]).all() for n in errors)))
    return found


def epochs(loop: Loop, start: int, stop: int) -> None:
    for begin in range(start, stop, 5):
        if loop.handle.control is not None:
            loop.handle.begin_epoch(begin // 5, {"loss": 1.0}, max_epochs=4)
        loop.run(begin, begin + 5)


def test_it_resumes_bit_for_bit() -> None:
    for results in run_in_processes(interrupted, 2):
        for straight, resumed, same in results:
            assert straight == resumed
            assert same


def overflowing(worker: int) -> list[str]:
    """Worker 1's gradient overflows in step 5; the other run leaves that step out."""
    dist.init_process_group("gloo")
    spoiled = Loop(worker, TopK(0.05), amp=True)
    spoiled.run(0, 10, spoil=5 if worker == 1 else -1)
    without = Loop(worker, TopK(0.05), amp=True)
    without.run(0, 5)
    without.run(6, 10)
    (a, errors), (b, others) = spoiled.end(), without.end()
    assert spoiled.scaler.get_scale() < without.scaler.get_scale()
    assert all((errors[n] == others[n]).all() for n in errors)
    return [a, b]


def test_an_overflow_on_one_worker_leaves_no_trace() -> None:
    for a, b in run_in_processes(overflowing, 2):
        assert a == b


def handled(worker: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    loop = Loop(worker, TopK(0.05))
    before = loop.handle.levels
    loop.run(0, 1)
    at_first = loop.handle.account().wire_bytes
    loop.handle.set_levels(0.5, {"body.2.weight": None})
    after = loop.handle.levels
    loop.run(1, 2)
    at_last = loop.handle.account().wire_bytes
    said = []
    wrong = edited(loop.handle.state_dict(), lambda state: state.update(workers=3), anew=True)
    for attempt in (
        lambda: loop.handle.load_state_dict(wrong),
        lambda: loop.handle.begin_epoch(0),
        lambda: attach(loop.net, TopK()),  # type: ignore[arg-type]
        lambda: Loop(worker, TopK(), StepAhead()),
        lambda: Loop(worker, TopK(), ErrorFeedback(lr_aware=True), optimizers=()),
        lambda: Loop(worker, DGC(0.1)),
        lambda: Loop(worker, TopK(), None, None, Fixed(0.1), optimizers=()),
    ):
        try:
            attempt()
        except ValueError as error:
            said.append(str(error))
    loop.handle.close()
    return {"levels": (before, after), "bytes": (at_first, at_last), "said": said}


def test_levels_bytes_and_refusals() -> None:
    for found in run_in_processes(handled, 2):
        before, after = found["levels"]
        assert before == {"body.0.weight": 0.05, "body.2.weight": 0.05}
        assert after == {"body.0.weight": 0.5, "body.2.weight": None}
        assert found["bytes"][1] > 5 * found["bytes"][0] > 0
        words = (
            "workers=3",
            "controller=",
            "wrap",
            "StepAhead",
            "optimizers=",
            "momentum",
            "optim",
        )
        assert len(found["said"]) == len(words)
        for sentence, word in zip(found["said"], words, strict=True):
            assert word in sentence
        assert "or leave load_state_dict out, and errors begin at zero" in found["said"][0]


def edited(state: dict[str, Any], change: Callable[[Any], Any], anew: bool) -> dict[str, Any]:
    state = copy.deepcopy(state)
    change(state)
    return with_checksum({n: v for n, v in state.items() if n != "sha256"}) if anew else state


ERROR = ("engine", "memory", "body.0.weight", "error")


def spoil(state: Any, value: float) -> None:
    for name in ERROR:
        state = state[name]
    state[0, 0] = value


DAMAGED: dict[str, tuple[bool, Callable[[Any], Any], str]] = {
    "one bit": (False, lambda state: spoil(state, 1e-9), "checksum"),
    "NaN": (True, lambda state: spoil(state, math.nan), "body.0.weight/error.*NaN"),
    "nothing": (True, dict.clear, "format=None"),
    "a former format": (True, lambda state: state.update(format=2), "format=2, but"),
    "no levels": (True, lambda state: state.pop("levels"), "levels is missing"),
    "a negative level": (True, lambda state: state.update(levels=(-1.0, {})), "levels/0 is -1.0"),
    "no step": (True, lambda state: state["engine"].pop("step"), "engine/step is missing"),
    "other worker": (True, lambda state: state.update(worker=0), "the state of worker 0"),
    "other step": (True, lambda state: state["engine"].update(step=3), "step 3 of run"),
    "other run": (True, lambda state: state.update(run="other"), "step 4 of run other"),
}


def loading(worker: int) -> dict[str, Any]:
    """Worker 1's state is damaged in many ways; both try to load, and then a whole one."""
    dist.init_process_group("gloo")
    controller = Accordion(low=0.5, high=0.05, interval=1)
    first, second = (Loop(worker, TopK(0.05), None, None, controller) for _ in range(2))
    first.handle.begin_epoch(0, max_epochs=1)
    first.run(0, 4)
    whole = first.handle.state_dict()
    empty = checksum(second.handle.state_dict()["engine"])
    said: dict[str, Any] = {}
    for name, (anew, change, _) in DAMAGED.items():
        state = edited(whole, change, anew) if worker == 1 else whole
        try:
            second.handle.load_state_dict(state)
        except ValueError as error:
            said[name] = str(error)
        assert checksum(second.handle.state_dict()["engine"]) == empty, name
    second.handle.load_state_dict(whole)
    assert checksum(second.handle.state_dict()["engine"]) == checksum(whole["engine"])
    for loop in (first, second):
        loop.handle.close()
    return said


def test_a_damaged_state_is_refused_on_all_workers() -> None:
    """Nothing is loaded on any."""
    zero, one = run_in_processes(loading, 2)
    assert zero == one
    assert set(zero) == set(DAMAGED)
    for name, (_, _, why) in DAMAGED.items():
        assert re.search(
            rf"^(Worker 1 (of 2 )?has a|All 2 ranks were given) .*{why}", zero[name]
        ), zero[name]
