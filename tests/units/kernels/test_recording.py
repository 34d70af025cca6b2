"""A recorded exchange has the bits of the exchange as it is written, whatever changes meanwhile."""

from __future__ import annotations

import gc as garbage
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_gc as gc
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.per_parameter import layerwise
from lightning_gc.engine import Engine
from lightning_gc.kernels.recording import Tape
from lightning_gc.memories import Memory
from tests.support.kernel_device import INTERPRETED, some
from tests.support.recording import (
    AS_WRITTEN,
    FEW,
    FORTY,
    MEMORIES,
    METHODS,
    Group,
    local_gradient,
    measure,
    run,
    watch,
)

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.timeout(900),
    # The interpreter computes with numpy, which warns of what floats do.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]


@pytest.mark.parametrize("compressor", some(METHODS, [gc.QSGD(4)]), ids=repr)
def test_same_bits(compressor: Compressor) -> None:
    """The second and third step of a layout are recorded, and must be equal."""
    replayed = run(compressor, None, 1, 20, FEW)
    meanwhile = () if compressor.traits.knob else (10, 11, 12)
    assert replayed == sorted([3, 4, 8, 9, *meanwhile, 13, 14, 18, 19])


@pytest.mark.nightly
@pytest.mark.parametrize("compressor", METHODS, ids=repr)
def test_same_bits_in_forty_steps(compressor: Compressor) -> None:
    assert len(run(compressor, None, 1, 40, FORTY)) > 10


@pytest.mark.nightly
@pytest.mark.parametrize("memory", MEMORIES, ids=repr)
def test_memories(memory: Memory) -> None:
    replayed = run(gc.TopK(0.05), memory, 1, 40, FORTY)
    assert bool(replayed) == (not isinstance(memory, gc.CSER)), "CSER asks which step it is"


@pytest.mark.nightly
def test_choices_of_a_menu() -> None:
    """A method's recorded work is not started for another one; state goes with its method."""
    menu = gc.Menu({"powersgd": gc.PowerSGD(2), "topk": gc.TopK(0.05), "dense": gc.Identity()})
    assert len(run(menu, None, 2, 40, FORTY)) > 10


@pytest.mark.nightly
@pytest.mark.parametrize("compressor", AS_WRITTEN, ids=repr)
def test_what_is_not_recorded(compressor: Compressor) -> None:
    assert not run(compressor, None, 2, 12, FEW)


@pytest.mark.nightly
@pytest.mark.parametrize("compressor", [gc.QSGD(4), gc.EFSignSGD(), gc.SignSGD()], ids=repr)
def test_shards(compressor: Compressor) -> None:
    assert run(compressor, None, 3, 12, FEW)


def test_replies_may_lie_elsewhere() -> None:
    """As with checksums, whose transport makes a reply of its own."""
    assert run(gc.Cast(), None, 2, 5, {}, copies=True)


def test_a_step_in_between_leaves_state_where_it_is_read() -> None:
    """The monitor measures norms in a step that it logs, which runs as written."""
    assert run(gc.PowerSGD(2), None, 1, 8, {5: measure, 6: measure}) == [3, 4, 5, 6, 7]


def test_the_end_of_a_fit_frees_gradients() -> None:
    """An engine stays from fit to fit, and DDP's buckets must not."""

    def make(worker: int, workers: int) -> Engine:
        return Engine(layerwise(gc.Cast()), worker=worker, workers=workers)

    group = Group(make, 1, recorded=True)
    for step in range(4):
        group.step([local_gradient("normal", 0, step)])
    assert all(group.replays)
    gradient = weakref.ref(group.grads.pop().held.untyped_storage())  # type: ignore[attr-defined]
    assert gradient() is not None
    (engine,) = group.engines
    engine.end_fit()
    garbage.collect()
    assert gradient() is None


@pytest.mark.nightly
def test_statistics_go_on() -> None:
    assert run(gc.Cast(), None, 1, 7, {0: watch})


@pytest.mark.parametrize(
    "reads",
    [
        lambda x, step: torch.rand(3),
        lambda x, step: x.sum().item(),
        lambda x, step: x.nonzero(),
        lambda x, step: x.add_(torch.tensor([1.0, 2.0, 3.0])),
        lambda x, step: step % 2 == 0,
        lambda x, step: step < 9,
        lambda x, step: step == 3,
        lambda x, step: repr((1, step)),
    ],
)
def test_what_a_tape_refuses(reads: Callable[[Tensor, int], Any]) -> None:
    tape = Tape(3, torch.device("cpu"))
    with tape.runs():
        reads(torch.ones(3), tape.step)
    assert tape.refused


@pytest.mark.parametrize(
    "reads",
    [
        lambda x, step: x.add_(x * 2).view(3, 1),
        lambda x, step: torch.zeros(5),
        lambda x, step: step < 2,
        lambda x, step: step >= 3,
    ],
)
def test_what_a_tape_takes(reads: Callable[[Tensor, int], Any]) -> None:
    """A comparison has the same result for ever if the step only grows."""
    tape = Tape(3, torch.device("cpu"))
    x = torch.ones(3)
    with tape.runs():
        reads(x, tape.step)
    assert tape.refused is None
    before = x.clone()
    tape.cut().start(4)
    assert torch.equal(x, 3 * before) or torch.equal(x, before)
