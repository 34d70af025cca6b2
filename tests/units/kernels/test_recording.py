"""A recorded exchange has the bits of the exchange as it is written, whatever changes meanwhile."""

from __future__ import annotations

import gc as garbage
import math
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_gc as gc
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.per_parameter import layerwise
from lightning_gc.engine import Engine, recorded_exchange
from lightning_gc.engine.recorded_exchange import Proof
from lightning_gc.kernels.recording import Span, Tape
from lightning_gc.memories import Memory
from tests.support.counted_waits import Elsewhere
from tests.support.kernel_device import INTERPRETED, some, switched
from tests.support.recording import (
    AS_WRITTEN,
    BUCKETS,
    FEW,
    FORTY,
    LAYOUTS,
    MEMORIES,
    MENU,
    METHODS,
    SHAPES,
    Event,
    Group,
    Shapes,
    fuzz,
    local_gradient,
    measure,
    peaks,
    reload,
    replays,
    run,
    watch,
)

NIGHTLY = pytest.mark.nightly
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


@pytest.mark.parametrize("value", ["prepared", "written", "torch"])
def test_the_switch(value: str) -> None:
    """Nothing is recorded, or watched for it."""
    with switched(value), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tape, "runs", lambda tape: pytest.fail("watched"))
        assert not run(gc.QSGD(4), None, 1, 6, {})


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
    assert len(run(MENU, None, 2, 40, FORTY)) > 10


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


def chooses(choice: float | None, *others: Event) -> Event:
    """Return an event that sets a menu's choice, and others."""

    def act(group: Group) -> None:
        for engine in group.engines:
            engine.levels.set(choice)
        for other in others:
            other(group)

    return act


def lays_out(buckets: Sequence[Shapes], rate: float | None = None) -> Event:
    """Return an event that cuts buckets anew in a step that measures norms, or has a rate."""

    def act(group: Group) -> None:
        group.lay_out(buckets)
        if rate is None:
            measure(group)
        for engine in group.engines:
            engine.prepare(None, None if rate is None else dict.fromkeys(SHAPES, rate))

    return act


RATED = gc.ErrorFeedback(lr_aware=True)
OTHER, ANEW = lays_out(LAYOUTS[1]), lays_out(BUCKETS)
UNSEEN: dict[str, tuple[Compressor, Memory | None, dict[int, Event]]] = {
    "a choice": (MENU, None, {5: chooses(2, measure), 6: chooses(1, measure)}),
    "errors": (MENU, None, {0: chooses(None), 5: chooses(2, measure), 6: chooses(None, measure)}),
    "buckets": (gc.TopK(0.05), None, {5: OTHER, 6: ANEW}),
    "buckets of a state": (gc.PowerSGD(2), None, {5: OTHER, 6: ANEW}),
    "buckets at a rate of 0": (
        gc.TopK(0.05),
        RATED,
        {0: lays_out(BUCKETS, 0.1), 5: lays_out(LAYOUTS[1], 0.0), 6: lays_out(BUCKETS, 0.1)},
    ),
}


@pytest.mark.parametrize("name", some(UNSEEN, ["a choice", "errors"]))
def test_a_step_that_is_not_repeated_leaves_nothing_stale(name: str) -> None:
    """What changes within it, and back after it, is another situation."""
    compressor, memory, events = UNSEEN[name]
    assert run(compressor, memory, 1, 10, events) == [3, 4, 9]


def test_errors_and_state_that_are_replaced_are_followed() -> None:
    """A checkpoint that is loaded within a fit: the same names, in other memory."""
    assert run(gc.PowerSGD(2), None, 1, 10, {5: reload}) == [3, 4, 8, 9]


def test_buckets_in_flight_together_do_not_share_memory() -> None:
    """A transport of somebody's own may drive two flows of an engine in turns."""
    found = []
    for recorded in (False, True):
        group = Group(lambda w, n: Engine(layerwise(gc.QSGD(4))), 1, recorded=recorded)
        for step in range(7):
            local = [local_gradient("normal", 0, step)]
            if step < 5:
                group.step(local)
            else:
                group.together(local)
        found.append(group.everything())
    assert all(map(torch.equal, *found))


def made_anew(compressor: Compressor) -> Group:
    """Return a group after eight steps whose gradients are freed after each."""
    group = Group(lambda w, n: Engine(layerwise(compressor)), 1, recorded=True)
    for step in range(8):
        group.grads = []
        garbage.collect()
        with group.place.around():
            group.grads = [group.place.put(torch.zeros(sum(group.sizes)))]
        group.step([local_gradient("normal", 0, step)])
    return group


def test_gradients_that_are_made_anew_are_not_kept() -> None:
    """FSDP2's: a recording would hold a gradient, so that the next one had another address."""
    (engine,) = made_anew(gc.Cast()).engines
    assert engine._recordings._memory is None
    assert not any(replays(engine))


LARGE = [
    *((gc.EFSignSGD(), None), (gc.Float8(), None), (gc.Cast(), None), (gc.PowerSGD(2), None)),
    *((gc.QSGD(4), None), (gc.ChunkedTopK(0.1, 64), None)),
]


@pytest.mark.parametrize("case", some(LARGE, [LARGE[2]]), ids=repr)
def test_half_precision_is_recorded_in_large_buckets(
    case: tuple[Compressor, Memory | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is in elements: errors and means of bfloat16 gradients are float32."""
    monkeypatch.setattr(recorded_exchange, "SMALL", 0)
    assert run(*case, 1, 5, {}, dtype=torch.bfloat16, buckets=[{"a": (50, 400)}]) == [3, 4]


THIRSTY: list[tuple[Compressor, Memory | None]] = [
    *((gc.NVFP4(), None), (gc.MXFP4(), None), (gc.AtomoSVD(2), None), (gc.AQSGD(), None)),
    *((gc.TopK(0.05), gc.MomentumCorrection()), (gc.TopK(0.05), gc.EF21())),
    *((method, None) for method in METHODS),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", some(THIRSTY, [THIRSTY[0]]), ids=repr)
def test_watching_needs_no_more_memory(
    case: tuple[Compressor, Memory | None], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the limit is: what is watched is not kept."""
    monkeypatch.setattr(recorded_exchange, "MOST", 1000)
    written, watched = (peaks(*case, dtype, recorded=each) for each in (False, True))
    assert watched <= 1.5 * written
    assert written or case == (gc.Identity(), None), "that nothing is counted proves nothing"


def test_what_makes_too_much_is_watched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all buckets of a method, until the fit ends."""
    monkeypatch.setattr(recorded_exchange, "SMALL", 0)
    watched: list[int] = []
    recorder = recorded_exchange.ExchangeRecorder

    def noted(bucket: Any, before: Any) -> Any:
        watched.append(bucket.step)
        return recorder(bucket, before)

    monkeypatch.setattr(recorded_exchange, "ExchangeRecorder", noted)
    assert not run(gc.NVFP4(), None, 1, 6, {})
    assert watched == [1]


def test_state_that_changes_places_is_not_carried() -> None:
    """Its tensors would be overwritten before they are read."""
    one, two, square = torch.zeros(2), torch.ones(2), torch.arange(9.0).view(3, 3)
    for before, after in (
        ({"a": one, "b": two}, {"a": two, "b": one}),
        ({"q": square}, {"q": square.t()}),
    ):
        wanted = {name: each.clone() for name, each in after.items()}
        state: dict[str, dict[str, Any]] = {"n": dict(after)}
        assert not recorded_exchange.carried({"n": before}, state)
        assert all(torch.equal(state["n"][name], each) for name, each in wanted.items())


class Others(gc.Cast):
    """A method of somebody else."""


def test_code_of_others_is_not_recorded() -> None:
    """It may read the step's number where nothing notices it."""
    assert not run(Others(), None, 1, 6, {})
    assert not run(gc.PerParameter(Others()), None, 1, 6, {})


def test_a_recording_that_differs_is_found_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is as written; so are all later ones."""
    start = Span.start

    def late(span: Span, step: int) -> None:
        start(span, step + 1)

    monkeypatch.setattr(Span, "start", late)
    with pytest.warns(UserWarning, match="gave other bits .*LIGHTNING_GC_KERNELS=prepared") as said:
        assert run(gc.RandomK(0.1), None, 1, 6, {}) == []
    assert len(said) == 1


@pytest.mark.parametrize("copies", [2, 5, 8])
def test_without_memory_for_a_proof_all_is_as_written(
    copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told: there is nothing to report."""
    left = [copies]
    clone = torch.Tensor.clone

    def scarce(tensor: Tensor) -> Tensor:
        if isinstance(tensor, Elsewhere):
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError
        return clone(tensor)

    monkeypatch.setattr(recorded_exchange, "_clone", scarce)
    assert run(gc.QSGD(4), None, 1, 6, {}) == []


def test_recordings_are_proven_at_first_and_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_exchange, "AGAIN", 4)
    proofs: list[int] = []
    holds = Proof.holds

    def noted(proof: Proof, error: Tensor, step: int) -> bool | None:
        proofs.append(step)
        return holds(proof, error, step)

    monkeypatch.setattr(Proof, "holds", noted)
    run(gc.Cast(), None, 1, 12, {5: measure, 6: measure}, buckets=[SHAPES])
    assert proofs == [3, 4, 6, 10]


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 2000), marks=NIGHTLY)], ids=str)
def test_random_sequences(seeds: range) -> None:
    """Of steps and of what may happen between them, often twice in a row."""
    assert sum(map(fuzz, seeds)) >= len(seeds)


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
        lambda x, step: range(step),
        lambda x, step: [1, 1, 1, 1, 1][step],
        lambda x, step: [1, 1, 1, 1, 1][:step],
        lambda x, step: "%d" % step,  # noqa: UP031 - it reads a number otherwise
        lambda x, step: step.bit_length(),
        lambda x, step: round(step),
        lambda x, step: math.gcd(step, 4),
        lambda x, step: math.floor(step),
        lambda x, step: struct.pack("q", step),
        lambda x, step: max(step, 9),
        lambda x, step: x[step:],
        lambda x, step: torch.zeros(step),
    ],
)
def test_what_a_tape_refuses(reads: Callable[[Tensor, Any], Any]) -> None:
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
def test_what_a_tape_takes(reads: Callable[[Tensor, Any], Any]) -> None:
    """A comparison has the same result for ever if the step only grows."""
    tape = Tape(3, torch.device("cpu"))
    x = torch.ones(3)
    with tape.runs():
        reads(x, tape.step)
    assert tape.refused is None
    before = x.clone()
    tape.cut().start(4)
    assert torch.equal(x, 3 * before) or torch.equal(x, before)
