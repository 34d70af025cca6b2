"""Auto in real fits: workers agree on every choice, runs resume within a look, traces replay."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from lightning_gc import NoMemory
from lightning_gc.controllers import Auto
from lightning_gc.kernels.dispatch import HostFamilies
from lightning_gc.lightning.for_pytorch_lightning import CompressedDDPStrategy
from tests.processes.test_attach import STEPS, Loop, Net, batches
from tests.processes.test_fabric import FabricLoop
from tests.processes.test_link_controllers import same
from tests.processes.test_resume import continued, interrupted
from tests.support.auto import MENU, Scripted
from tests.support.fitting import ddp, fit, unwarned
from tests.support.models import Books, own_batches
from tests.support.processes import run_in_processes
from tests.support.resuming import differences
from tests.support.simulation import real, simulated

pytestmark = pytest.mark.processes
PLACES = {name: place for place, name in enumerate(MENU.names, 1)}
FAST_LINK = (("powersgd", 1.3), ("topk", 1.4))
"""Seconds of a link on which uncompressed steps, of a second, are the fastest."""


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def listened(*args: Any, **options: Any) -> tuple[dict[str, Any], list[str]]:
    """Fit, and return what worker 0 has said of its choice too."""
    heard, log = Heard(), logging.getLogger("lightning_gc.core.notices")
    log.addHandler(heard)
    log.setLevel(logging.INFO)
    left = fit(*args, devices=2, use_distributed_sampler=False, **options)
    log.removeHandler(heard)
    return left, [line for line in heard.lines if line.startswith("auto: ")]


def choosing(worker: int, trace: str) -> tuple[dict[str, Any], list[str]]:
    """The link becomes fast, so that it looks again; replicas and messages are compared."""
    auto = Scripted(changes=30, then=FAST_LINK, allow=MENU, every=4, trace=trace)
    strategy = ddp("auto", controller=auto, verify="payload")
    return listened(strategy, Books, own_batches(worker, 16), max_epochs=5)


def test_workers_agree_and_a_trace_replays(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    (one, said), (other, silent) = run_in_processes(choosing, 2, str(path))
    for what in ("digest", "levels", "controller"):
        assert one[what] == other[what]
    levels = same(path, Scripted(changes=30, then=FAST_LINK, allow=MENU, every=4))
    assert levels[:2] == [None, PLACES["powersgd"]]
    assert levels[-1] is None
    assert silent == []
    assert [line.split(",")[0] for line in said] == [
        "auto: powersgd",
        "auto: uncompressed",
        "auto: uncompressed at the end",
    ]
    assert set(one["levels"].values()) == {None}
    # Uncompressed steps have sent all errors, and nothing is kept any more.
    assert one["memory"] == [{}]
    told = [json.loads(line)["observation"] for line in path.read_text().splitlines()]
    weighed = [each["weighed"][1] for each in told if each["weighed"]]
    names = [*MENU.names, "uncompressed"]
    assert len(weighed) == 2
    assert all([name for _, name, _ in choices] == names for choices in weighed)


@pytest.mark.parametrize("crash", [4, pytest.param(9, marks=pytest.mark.nightly), 12])
def test_it_resumes_within_a_look(tmp_path: Path, crash: int) -> None:
    """Saved while steps are timed, in the first trial, and when it has decided."""
    saving = {"save_top_k": -1, "every_n_train_steps": 1}
    whole, resumed = interrupted(
        tmp_path,
        "auto",
        epochs=1,
        batches=24,
        crash=crash,
        saving=saving,
        stateful=True,
        controller=Scripted(allow=MENU),
    )
    assert differences(whole, resumed) == []
    assert whole[0]["controller"]["phase"] == "watch"
    assert whole[0]["controller"]["name"] == "powersgd"


@pytest.mark.nightly
def test_it_resumes_between_epochs(tmp_path: Path) -> None:
    whole, resumed = continued(tmp_path, "auto", controller=Scripted(allow=MENU))
    assert differences(whole, resumed) == []


def test_simulated_workers_choose_as_real_ones() -> None:
    case = {"compressor": "auto", "options": {"controller": Scripted(allow=MENU, every=4)}}
    them = run_in_processes(real, 2, 2, [case])
    us = simulated(2, case)
    assert us["controller"] == them[0][0]["controller"]
    assert us["levels"] == them[0][0]["levels"]
    assert us["digest"] == them[0][0]["digest"]
    # Bytes of the exchanges by which choices are weighed count in both.
    total = "compression/total_wire_bytes"
    assert us["metrics"][total] == them[0][0]["metrics"][total]


def test_tensorboard_shows_the_choice_and_why(tmp_path: Path) -> None:
    """A curve of places in the menu, 0 while uncompressed, and each change as text."""
    case = {
        "compressor": "auto",
        "options": {"controller": Scripted(allow=MENU, every=4)},
        "logger": TensorBoardLogger(str(tmp_path), name="", version=""),
        "log_every_n_steps": 1,
    }
    simulated(2, case)
    events = EventAccumulator(str(tmp_path)).Reload()
    curve = [each.value for each in events.Scalars("~compression/choice")]
    assert curve[0] == 0
    assert curve[-1] == PLACES["powersgd"]
    texts = [
        each.tensor_proto.string_val[0].decode()
        for each in events.Tensors("compression/decision/text_summary")
    ]
    assert any(text.startswith("auto: powersgd, since a step takes 0.5 s") for text in texts)


def loops(worker: int) -> list[tuple[Any, ...]]:
    dist.init_process_group("gloo")
    auto, found = Scripted(allow=MENU, every=4), []
    kinds = (
        Loop(worker, "auto", controller=auto),
        FabricLoop("lightning_fabric", worker, "auto", None, None, auto),
    )
    for loop in kinds:
        loop.run(0, STEPS)
        control = loop.handle.control
        assert control is not None
        found.append((control.state["phase"], control.state["name"], loop.end()[0]))
    with unwarned():
        data: Any = DataLoader(list(batches(worker)), batch_size=None)  # type: ignore[arg-type]
        strategy = ddp("auto", controller=auto)
        left = fit(strategy, Net, data, devices=2, use_distributed_sampler=False)
    found.append((left["controller"]["phase"], left["controller"]["name"], left["digest"]))
    return found


def test_loops_of_ones_own_need_no_call() -> None:
    """``attach`` and Fabric choose as the strategy does, bit for bit."""
    for found in run_in_processes(loops, 2):
        assert found[0][:2] == ("watch", "powersgd")
        assert found[0] == found[1] == found[2]


def compiling(worker: int) -> tuple[dict[str, Any], list[bool]]:
    """The second worker compiles while it is asked three times."""
    asked: list[bool] = []

    def answer(_: HostFamilies) -> bool:
        asked.append(worker == 1 and len(asked) < 3)
        return asked[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HostFamilies, "compiling", property(answer))
        strategy = ddp("auto", controller=Scripted(allow=MENU, every=4), verify="payload")
        return fit(
            strategy, Books, own_batches(worker, 48), devices=2, use_distributed_sampler=False
        ), asked


def test_training_goes_on_while_a_worker_compiles() -> None:
    """Nobody waits for it, no choice is weighed without it, and ``Auto`` asks again."""
    (one, asked), (other, theirs) = run_in_processes(compiling, 2)
    assert asked == [False] * 4
    assert theirs == [True] * 3 + [False]
    assert one["digest"] == other["digest"]
    assert one["controller"] == other["controller"]
    assert one["controller"]["name"] == "powersgd"


def by_the_clock(worker: int) -> dict[str, Any]:
    strategy = CompressedDDPStrategy("auto", process_group_backend="gloo")
    assert strategy.memory == NoMemory()
    torch.manual_seed(0)
    return fit(strategy, Books, own_batches(worker, 24), devices=2, use_distributed_sampler=False)


def test_with_real_seconds_workers_agree_too() -> None:
    """Whatever is chosen on this machine, it is chosen by all."""
    one, other = run_in_processes(by_the_clock, 2)
    assert one["digest"] == other["digest"]
    assert one["controller"] == other["controller"]
    assert one["controller"]["permitted"] == ["QSGD(4)", "QSGD(6)", "QSGD(8)", "Cast()"]


def test_its_settings_travel() -> None:
    auto = Auto(allow="feedback")
    assert replace(auto, every=8).allow == "feedback"
