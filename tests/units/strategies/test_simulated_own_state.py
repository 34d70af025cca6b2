"""What OwnState notices and says, and how little it does where nothing is a worker's own."""

import logging
from collections import Counter
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gc import QSGD
from lightning_gc.lightning.for_pytorch_lightning import SimulatedDDPStrategy
from lightning_gc.lightning.simulation.own_state import Holder, OwnValues, Scope
from tests.support.fitting import fit, unwarned
from tests.support.models import Plain, common_batches


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(call)] += 1
        return call(*args, **(kwargs or {}))


def state(values: list[dict[str, Any]], notes: dict[str, list[Any]] | None = None) -> OwnValues:
    held = [Holder(str(index), each) for index, each in enumerate(values)]

    def says(what: str, *key: str) -> None:
        assert notes is not None, (what, *key)
        notes[what].append(key)

    return OwnValues(2, lambda: (held, Scope((), ())), says)


def part(index: int) -> dict[str, Any]:
    weight = nn.Parameter(torch.full((64,), float(index)), requires_grad=False)
    settings = {"names": ["a", "b"], "rate": 0.1}
    return {"weight": weight, "mask": torch.ones(64) * index, "n": index, "settings": settings}


def test_a_turn_without_changes_makes_few_operations() -> None:
    """However many modules there are; nothing is copied, and vocabularies are compared as one."""
    values = [part(index) for index in range(200)]
    values[0]["vocabulary"] = {str(index): index for index in range(9_000)}
    own = state(values)
    own.enter(0)  # all is kept for the first time
    for worker in (1, None, 0):
        with Counted() as counted:
            own.enter(worker)
        assert sum(counted.calls.values()) <= 6, counted.calls
        assert not any("clone" in name or "copy" in name for name in counted.calls)


def test_what_belongs_to_the_process_is_left_as_it_is() -> None:
    """A logger of the module's: its handlers are the process's, whichever worker adds them."""
    log = logging.Logger("own")
    own = state([{"log": log, "n": 0}])
    own.enter(0)
    own.enter(1)
    handler = logging.NullHandler()
    log.addHandler(handler)
    own.enter(None)
    assert log.handlers == [handler]


def test_long_lists_that_stay_are_not_said() -> None:
    """Such as a data set's paths, or a sampler's lengths."""
    own = state([{"paths": [str(index) for index in range(20_000)], "sizes": [[1]] * 11_000}])
    for worker in (0, 1, None, 0):
        own.enter(worker)


def test_a_tensor_written_by_its_data_is_noticed() -> None:
    """It has no new version; one place of many changes, or each by little."""
    values = [part(index) for index in range(3)]
    own = state(values)
    own.enter(0)
    values[1]["mask"].data[17] = 5.0
    values[2]["weight"].data.mul_(1 + 1e-6)
    own.enter(1)
    assert values[1]["mask"][17] == 1.0
    assert torch.equal(values[2]["weight"], torch.full((64,), 2.0))
    own.enter(0)
    assert values[1]["mask"][17] == 5.0
    assert not torch.equal(values[2]["weight"], torch.full((64,), 2.0))


class Notes(pl.callbacks.Timer):
    """A user's own kind of one of Lightning's callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append((trainer.strategy.worker, trainer.global_step))


def test_what_a_user_adds_to_a_callback_of_lightning_is_called_after_the_step() -> None:
    notes = Notes()
    with unwarned():
        fit(SimulatedDDPStrategy(QSGD(4), workers=2), Plain, common_batches(16), callbacks=[notes])
    assert notes.seen == [(worker, step) for step in (1, 2) for worker in (0, 1)]


def test_a_record_that_becomes_a_queue_is_said() -> None:
    notes: dict[str, list[Any]] = {"differing": [], "too_large": [], "joint": []}
    values: list[dict[str, Any]] = [{"losses": [], "bank": []}]
    own = state(values, notes)
    for step in range(3):
        for worker in (0, 1):
            own.enter(worker)
            values[0]["losses"].append(float(step))
            values[0]["bank"].append(torch.full((2,), float(worker)))
            assert [int(each[0]) for each in values[0]["bank"]] == [worker] * (step + 1)
    assert len(values[0]["losses"]) == 6
    assert not any(notes.values())
    values[0]["losses"].pop(0)
    own.enter(None)
    assert notes == {"differing": [], "too_large": [], "joint": [("0", "losses")]}


def test_what_is_set_back_between_turns_is_common_without_a_word() -> None:
    """Any other change of what workers have apart is said."""
    notes: dict[str, list[Any]] = {"differing": [], "too_large": [], "joint": []}
    values: list[dict[str, Any]] = [{"hidden": {}, "n": 0, "rate": 1.0}]
    own = state(values, notes)
    for worker in (0, 1):
        own.enter(worker)
        values[0]["hidden"]["h"] = values[0]["n"] = values[0]["rate"] = worker + 1
    own.enter(None)
    values[0]["hidden"].clear()
    values[0]["n"] = 0
    values[0]["rate"] *= 0.5
    own.enter(1)
    assert values == [{"hidden": {}, "n": 0, "rate": 0.5}]
    assert notes == {"differing": [("0", "rate")], "too_large": [], "joint": []}
