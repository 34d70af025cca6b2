"""``attach`` more than once, in a group, and a handle that is reset, loaded again or closed."""

import copy
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import (
    QSGD,
    GradiVeQ,
    GradZip,
    Identity,
    ModelTopK,
    NaturalCompression,
    PowerSGD,
    Quantised,
    RandomK,
    ReusedThreshold,
    TopK,
    VarianceCriterion,
    attach,
)
from lightning_gc.controllers import Accordion, Fixed
from lightning_gc.core.saved_state import CHECKSUM, checksum, with_checksum
from tests.processes.test_attach import Loop, Net, batches
from tests.support.controlled_workers import Listens
from tests.support.damaged_leaves import replaced
from tests.support.fitting import digest
from tests.support.processes import said, standing

pytestmark = pytest.mark.processes


def in_a_group(worker: int) -> dict[str, float | None]:
    """Workers 1 and 2 of three attach; worker 0 is busy with something else."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    group = dist.new_group([1, 2], timeout=timedelta(seconds=20))
    levels: dict[str, float | None] = {}
    if worker > 0:
        ddp = DistributedDataParallel(nn.Linear(64, 64), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        handle = attach(ddp, TopK(0.1), controller=Fixed(0.05), optimizers=optimizer)
        handle.begin_epoch(0)
        levels = handle.levels
        handle.close()
    dist.barrier()
    return levels


def test_a_controller_decides_for_the_group_of_its_module() -> None:
    assert standing.run(in_a_group, 3) == [{}, {"weight": 0.05}, {"weight": 0.05}]


def rolled_back(worker: int) -> None:
    dist.init_process_group("gloo")
    fixed = Loop(worker, TopK(0.05), controller=Fixed(0.2))
    other = Loop(worker, TopK(0.05), controller=Accordion(low=0.5, high=0.1, interval=1))
    fixed.handle.begin_epoch(0)
    fixed.run(0, 3)
    with pytest.warns(UserWarning, match=r"Fixed.* is now Accordion.*: its state is reset"):
        other.handle.load_state_dict(fixed.handle.state_dict())
    other.handle.begin_epoch(1, {"loss": 1.0}, max_epochs=2)
    assert set(other.handle.levels.values()) <= {0.5, 0.1}

    plain = Loop(worker, TopK(0.05))
    first, levels = plain.handle.state_dict(), plain.handle.levels
    plain.handle.set_levels(0.5)
    plain.handle.load_state_dict(first)
    assert plain.handle.levels == levels
    for loop in (fixed, other, plain):
        loop.handle.close()


def test_what_was_set_after_a_state_was_saved_is_gone_once_it_is_loaded() -> None:
    """Levels, and the state of another controller, which this one could not read."""
    standing.run(rolled_back, 1)


def begun_again(worker: int) -> list[int]:
    dist.init_process_group("gloo")
    controller = Listens()
    loop = Loop(worker, TopK(0.05), controller=controller)
    loop.handle.begin_epoch(0)
    loop.run(0, 3)
    loop.handle.reset()
    for epoch in (1, 2):
        loop.handle.begin_epoch(epoch)
        loop.run(3, 5)
    loop.handle.close()
    return [told.steps for told in controller.told]


def test_a_reset_keeps_the_step() -> None:
    """A controller counts on, and random numbers are not drawn again."""
    assert standing.run(begun_again, 1) == [[0, 3, 2]]


def attached_twice(worker: int) -> list[Any]:
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(nn.Linear(64, 64))
    handle = attach(ddp, TopK(0.1))

    def left() -> tuple[int, int]:
        return threading.active_count(), len(distributed_c10d._world.pg_map)

    before = left()
    with pytest.raises(
        RuntimeError, match=r"attach was called on this .* handle\.close\(\), and then attach"
    ):
        attach(ddp, TopK(0.1))
    after = left()
    handle.close()
    handle.close()
    hooked = DistributedDataParallel(nn.Linear(64, 64))
    hooked.register_comm_hook(None, allreduce_hook)
    with pytest.raises(RuntimeError, match=r"the communication hook allreduce_hook, and DDP"):
        attach(hooked, TopK(0.1))
    refusing: Any = DistributedDataParallel(nn.Linear(64, 64))
    refusing.register_comm_hook = lambda *_: 1 / 0  # whatever DDP may refuse
    with pytest.raises(ZeroDivisionError):
        attach(refusing, TopK(0.1))
    return [before == after, *left()]


def test_a_second_attach_leaves_nothing_behind_and_a_second_close_does_nothing() -> None:
    for same, threads, groups in standing.run(attached_twice, 2):
        assert same
        assert (threads, groups) == (1, 1)


class Attachable(Loop):
    """The loop of ``test_attach``, which attaches again to the same module."""

    def again(self, *args: Any) -> None:
        self.handle = attach(self.ddp, *args, optimizers=self.optimizer)


def rearmed(worker: int) -> dict[str, Any]:
    """A module trains with one handle, closes it, and continues with another one's state."""
    dist.init_process_group("gloo")
    straight, loop = Loop(worker, TopK(0.05)), Attachable(worker, TopK(0.05))
    straight.run(0, 8)
    loop.run(0, 4)
    state = loop.handle.state_dict()
    loop.handle.close()
    loop.again(TopK(0.05))
    found: dict[str, Any] = {"open": said(loop.again, TopK(0.05))}
    loop.handle.load_state_dict(state)
    loop.run(4, 8)
    found["resumed"], found["straight"] = loop.end()[0], straight.end()[0]
    loop.again(QSGD(4))  # other settings
    loop.run(8, 9)
    found["bytes"] = loop.handle.account().wire_bytes
    loop.handle.close()
    other = copy.deepcopy(loop.ddp)  # its reducer has no hook
    attach(other, TopK(0.05)).close()
    found["closed"] = said(loop.run, 9, 10)
    return found


def test_attach_after_close_continues_on_the_same_module() -> None:
    """As when the Trainer of transformers trains twice: it keeps its DDP."""
    for found in standing.run(rearmed, 2):
        assert "after the handle of this module was closed. Call attach" in found["closed"]
        assert "Call handle.close(), and then attach again" in found["open"]
        assert found["resumed"] == found["straight"]
        assert found["bytes"] > 0


STATEFUL = (
    PowerSGD(1),
    GradZip(1),
    GradiVeQ(3, 16, every=4, dense_steps=1),
    ModelTopK(0.1),
    ReusedThreshold(0.1),
    VarianceCriterion(),
    Quantised(VarianceCriterion(), NaturalCompression()),
)
LEVELS: tuple[Any, ...] = (
    (1e300, {}),
    (-1.0, {}),
    ("much", {}),
    (0.1, {"body.2.weight": 1e9}),
    (0.1,),
)


def edited(state: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """Return a state with a valid checksum that says something else."""
    return with_checksum({n: v for n, v in (state | changed).items() if n != CHECKSUM})


def nonsense(worker: int) -> list[str]:
    """Return what was loaded, or changed what it should not, though it makes no sense."""
    dist.init_process_group("gloo")
    taken = []
    for compressor in STATEFUL:
        loop = Loop(worker, compressor)
        loop.run(0, 3)
        state = loop.handle.state_dict()
        before, name = checksum(state), "body.2.weight"
        kept = state["engine"]["compressor"]
        made = {
            what: {"engine": state["engine"] | {"compressor": kept | damaged}}
            for what, damaged in replaced({name: kept[name]})
        }
        made["another parameter"] = {
            "engine": state["engine"] | {"compressor": kept | {"head.bias.more": kept[name]}}
        }
        made |= {f"levels={levels}": {"levels": levels} for levels in LEVELS}
        for what, change in made.items():
            try:
                loop.handle.load_state_dict(edited(state, **change))
                taken.append(f"{compressor!r}: {what} was loaded")
            except ValueError as error:
                if "cannot be used" not in str(error):
                    taken.append(f"{compressor!r}: {what}: {error}")
            if checksum(loop.handle.state_dict()) != before:
                taken.append(f"{compressor!r}: {what} changed the state")
        loop.handle.load_state_dict(edited(state))
        loop.run(3, 4)
        loop.handle.close()
    return taken


def test_nonsense_with_a_valid_checksum_is_refused_before_anything_changes() -> None:
    """Each value that a compressor keeps, by one of another type, shape or range; and levels."""
    assert standing.run(nonsense, 1) == [[]]


def apart(worker: int) -> list[str]:
    """Worker 1's state has levels, or buckets, that fit, but are not worker 0's."""
    dist.init_process_group("gloo")
    loop = Loop(worker, TopK(0.05))
    loop.run(0, 2)
    state = loop.handle.state_dict()
    said = []
    changes: tuple[dict[str, Any], ...] = (
        {"levels": (0.2, {})},
        {"layout": [*state["layout"], []]},
    )
    for change in changes:
        try:
            loop.handle.load_state_dict(edited(state, **(change if worker else {})))
        except ValueError as error:
            said.append(str(error))
    loop.handle.load_state_dict(edited(state, levels=(0.2, {})))
    loop.run(2, 3)
    loop.handle.close()
    return said


def test_levels_and_buckets_must_be_equal_on_all_workers() -> None:
    for sentences in standing.run(apart, 2):
        assert len(sentences) == 2
        for sentence in sentences:
            assert sentence.startswith("Worker 1 has a state with other levels, buckets or")


def under_one_name(worker: int, folder: str) -> str:
    """All workers save under one name; torch keeps each tensor of one of them."""
    dist.init_process_group("gloo")
    loop = Loop(worker, TopK(0.05))
    loop.run(0, 2)
    save({"errors": loop.handle.state_dict()}, checkpoint_id=folder)
    into = {"errors": copy.deepcopy(loop.handle.state_dict())}
    load(into, checkpoint_id=folder)
    answer = said(loop.handle.load_state_dict, into["errors"])
    loop.run(2, 3)  # nothing has changed
    loop.handle.close()
    return answer


def test_states_saved_under_one_name_are_called_so(tmp_path: Path) -> None:
    zero, one = standing.run(under_one_name, 2, str(tmp_path))
    assert zero == one
    assert zero.startswith("ValueError: All 2 ranks were given the state of worker ")
    assert "If all saved under one name" in zero


def elsewhere_by_default(worker: int) -> list[list[str]]:
    """Return digests of trainings without and with a default device that holds no numbers."""
    dist.init_process_group("gloo")
    found: list[list[str]] = [[], []]
    for compressor in (Identity(), QSGD(4), RandomK(0.1), PowerSGD(1)):
        for device, digests in zip((None, "meta"), found, strict=True):
            torch.manual_seed(0)
            net, data = Net(), batches(worker)
            wrapped = DistributedDataParallel(net)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
            torch.set_default_device(device)
            try:
                handle = attach(wrapped, compressor)
                for step in range(4):
                    if step == 2:
                        handle.load_state_dict(handle.state_dict())
                    optimizer.zero_grad()
                    wrapped(data[step]).square().mean().backward()
                    optimizer.step()
                handle.close()
            finally:
                torch.set_default_device(None)
            digests.append(digest(net))
    return found


def test_a_default_device_is_not_that_of_the_exchange() -> None:
    for usual, other in standing.run(elsewhere_by_default, 2):
        assert usual == other
