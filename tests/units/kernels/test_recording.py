"""A recorded exchange has the bits of the exchange as it is written, whatever changes meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_gc as gc
from lightning_gc import ErrorFeedback, NoMemory
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.per_parameter import layerwise
from lightning_gc.engine import Engine
from lightning_gc.engine.statistics import EpochStatistics
from lightning_gc.kernels.recording import Tape
from lightning_gc.memories import Memory
from tests.support.bucket_kernels import gradient
from tests.support.counted_waits import on_device
from tests.support.kernel_device import INTERPRETED, some
from tests.support.recording import SHAPES, Group, kernels_elsewhere

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.timeout(900),
    # The interpreter computes with numpy, which warns of what floats do.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]
METHODS: list[Compressor] = [
    *(gc.Cast(), gc.Identity(), gc.QSGD(4), gc.Uniform(9, block_size=64), gc.Int8(), gc.Float8()),
    *(gc.TopK(0.05), gc.TopK(0.05, "bfloat16"), gc.ChunkedTopK(0.1, 64), gc.RandomK(0.1)),
    *(gc.EFSignSGD(), gc.OneBitSGD(), gc.SignSGD(), gc.PowerSGD(2), gc.GradZip()),
    gc.Quantised(gc.ChunkedTopK(0.1, 64), gc.BinMeans(2, 16)),
]
AS_WRITTEN: list[Compressor] = [gc.TernGrad(), gc.HardThreshold(1.0), gc.AtomoSVD()]
"""Methods in which the host reads random numbers or lengths."""
MEMORIES: list[Memory] = [
    *(NoMemory(), ErrorFeedback(0.5, gain=0.5), ErrorFeedback(lr_aware=True)),
    *(gc.LocalMomentum(), gc.MomentumCorrection(), gc.EF21(), gc.CSER(every=3)),
]


def move(group: Group) -> None:
    """Put the gradients elsewhere, as DDP's new buckets do."""
    group.kept = list(group.grads)  # else the allocator could give the same memory
    group.grads = [on_device(grad.held) for grad in group.grads]  # type: ignore[attr-defined]


def change_levels(group: Group) -> None:
    """Make the compressor tighter, or as it was."""
    for engine in group.engines:
        knob, levels = engine.compressor.traits.knob, engine.levels
        if knob is not None:
            levels.set(levels._first.level if levels.changed else knob.tightest)


def leave_uncompressed(group: Group) -> None:
    """Send everything uncompressed, or compress again."""
    for engine in group.engines:
        if engine.compressor.traits.knob is not None:
            engine.levels.set(engine.levels._first.level if engine.levels.uncompressed else None)


def measure(group: Group) -> None:
    """Measure norms, as the monitor does in steps that it logs, or stop it."""
    for engine in group.engines:
        engine.statistics.norms_wanted = not engine.statistics.norms_wanted


def resume(group: Group) -> None:
    """Go on in new engines, as after a restart."""
    with kernels_elsewhere():
        for index, engine in enumerate(group.engines):
            fresh = group.make(index, len(group.engines))
            fresh.load_state_dict(engine.state_dict())
            requested = engine.levels.requested()
            if requested is not None:
                fresh.levels.set(*requested)
            fresh.statistics.tally.add(engine.tally)
            group.engines[index] = fresh


def scale(group: Group) -> None:
    """Scale the loss, as float16 needs it."""
    with kernels_elsewhere():
        for engine in group.engines:
            engine.begin_fit(revocable=True)
            engine.prepare(on_device(torch.tensor(1024.0)), None)


def rescale(group: Group) -> None:
    """Change the scale in place, as a gradient scaler does."""
    for engine in group.engines:
        engine.loss_scaling.scale.held.mul_(0.5)  # type: ignore[union-attr]


def watch(group: Group) -> None:
    """Let a controller's statistics see gradients and errors."""
    for engine in group.engines:
        engine.statistics.epoch = EpochStatistics("epoch sum", True, True, True)


def rest(group: Group) -> None:
    """Set a learning rate of 0, in which a step changes no error, or another one."""
    for engine in group.engines:
        now = engine.learning_rates.now.get("a", 0.1)
        engine.prepare(engine.loss_scaling.scale, dict.fromkeys(SHAPES, 0.1 - now))


KINDS = ("normal", "idle", "ties", "normal", "not finite", "huge", "idle")
FORTY = {
    **{6: move, 10: change_levels, 14: measure, 15: measure, 18: resume, 22: change_levels},
    **{23: watch, 27: scale, 30: rescale, 33: rest, 34: rest, 35: leave_uncompressed},
    36: leave_uncompressed,
}
FEW = {5: move, 10: change_levels, 15: resume}


def run(
    compressor: Compressor,
    memory: Memory | None,
    workers: int,
    steps: int,
    events: Mapping[int, Callable[[Group], None]],
    **options: Any,
) -> list[int]:
    """Compare exchanges in every step; return in which ones recorded work was started."""

    def make(worker: int, workers: int) -> Engine:
        return Engine(layerwise(compressor), memory, worker=worker, workers=workers)

    written = Group(make, workers, recorded=False, **options)
    recorded = Group(make, workers, recorded=True, **options)
    replayed = []
    for step in range(steps):
        for group in (written, recorded):
            if step in events:
                events[step](group)
        kind = KINDS[step % len(KINDS)]
        gradients = [_gradient(kind, worker, step) for worker in range(workers)]
        before = recorded.replays
        written.step(gradients)
        recorded.step(gradients)
        for ours, theirs in zip(recorded.everything(), written.everything(), strict=True):
            assert _same(ours, theirs), (step, kind)
        if all(before) and all(recorded.replays):
            replayed.append(step)
    return replayed


def _gradient(kind: str, worker: int, step: int) -> Tensor:
    flat = gradient(kind, list(SHAPES.values()), worker, step)
    if kind == "not finite" and worker == 0:
        flat[::50] = math.nan
    return flat


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one.nan_to_num(7.0), other.nan_to_num(7.0)
    )


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
@pytest.mark.parametrize("compressor", [gc.EFSignSGD(), gc.TopK(0.05)], ids=repr)
def test_memories(compressor: Compressor, memory: Memory) -> None:
    replayed = run(compressor, memory, 1, 40, FORTY)
    assert bool(replayed) == (not isinstance(memory, gc.CSER)), "CSER asks which step it is"


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
