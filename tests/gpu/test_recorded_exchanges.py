"""On a GPU a recorded exchange has the bits of the written one, bounded memory, and no wait."""

import gc as garbage
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import lightning_gc as gc
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.per_parameter import layerwise
from lightning_gc.core import Exchange, Gather, Reply, Request
from lightning_gc.engine import Engine, recorded_exchange
from lightning_gc.engine.recorded_exchange import Proof
from lightning_gc.kernels.gpu import prepared_launch
from lightning_gc.memories import Memory
from lightning_gc.transports import Recording, Transport
from lightning_gc.transports.background import Background
from tests.support.recording import (
    AS_WRITTEN,
    FEW,
    FORTY,
    GPU,
    MEMORIES,
    METHODS,
    SHAPES,
    Group,
    Shapes,
    cloned,
    local_gradient,
    replays,
    run,
)

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
methods = pytest.mark.parametrize("compressor", METHODS, ids=repr)
LARGE: list[Shapes] = [
    {"matrix": (1024, 700), "bias": (700,)},
    {"odd": (513, 1031), "filter": (64, 33, 3, 3), "norm": (1031,)},
]
CYCLES = 3_000_000  # about 2 ms


@methods
@pytest.mark.parametrize("workers", [1, 2])
def test_same_bits_in_forty_steps(compressor: Compressor, workers: int) -> None:
    """Gradients move, levels change, norms are measured, the run resumes, a loss is scaled."""
    assert len(run(compressor, None, workers, 40, FORTY, place=GPU)) > 10


@methods
def test_same_steps_as_without_a_gpu(compressor: Compressor) -> None:
    """The second and third step of a layout are recorded, and must be equal."""
    replayed = run(compressor, None, 1, 20, FEW, place=GPU)
    meanwhile = () if compressor.traits.knob else (10, 11, 12)
    assert replayed == sorted([3, 4, 8, 9, *meanwhile, 13, 14, 18, 19])


@pytest.mark.parametrize(
    ("compressor", "memory"),
    [
        (compressor, memory)
        for compressor in (gc.EFSignSGD(), gc.TopK(0.05), gc.PowerSGD(2))
        for memory in MEMORIES
        if isinstance(compressor, gc.TopK) or not isinstance(memory, gc.MomentumCorrection)
    ],
    ids=repr,
)
def test_memories(compressor: Compressor, memory: Memory) -> None:
    replayed = run(compressor, memory, 2, 40, FORTY, place=GPU)
    assert bool(replayed) == (not isinstance(memory, gc.CSER)), "CSER asks which step it is"


@pytest.mark.parametrize(
    "compressor", [gc.QSGD(4), gc.EFSignSGD(), gc.SignSGD(), gc.Cast()], ids=repr
)
def test_shards(compressor: Compressor) -> None:
    assert run(compressor, None, 3, 12, FEW, place=GPU)


@pytest.mark.parametrize("compressor", AS_WRITTEN, ids=repr)
def test_what_is_not_recorded(compressor: Compressor) -> None:
    assert not run(compressor, None, 2, 12, FEW, place=GPU)


@pytest.mark.parametrize("compressor", [gc.QSGD(4), gc.TopK(0.05), gc.SignSGD()], ids=repr)
def test_replies_may_lie_elsewhere(compressor: Compressor) -> None:
    """As with checksums, whose transport makes a reply of its own."""
    assert run(compressor, None, 2, 12, FEW, copies=True, place=GPU)


@pytest.mark.parametrize("compressor", [gc.Cast(), gc.TopK(0.05)], ids=repr)
def test_triton_starts_what_cannot_be_prepared(
    compressor: Compressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_launch, "_trusted", False)
    assert run(compressor, None, 2, 20, FEW, place=GPU)


def make(compressor: Compressor) -> Any:
    return lambda worker, workers: Engine(layerwise(compressor), worker=worker, workers=workers)


def recorded_group(compressor: Compressor, workers: int) -> Group:
    """Return engines after the steps in which they record, with large gradients."""
    group = Group(make(compressor), workers, recorded=True, place=GPU, buckets=LARGE)
    for step in range(3 + recorded_exchange.PROVEN):
        draw(group, step)
        group.exchange()
    assert all(group.replays)
    return group


def draw(group: Group, step: int) -> None:
    torch.manual_seed(step)
    for grad in group.grads:
        group.place.held(grad).normal_()


@methods
def test_they_are_proven_on_this_device(
    compressor: Compressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each bucket's first repeated steps have the bits of those as written."""
    proofs: list[bool | None] = []
    holds = Proof.holds

    def noted(proof: Proof, error: Tensor, step: int) -> bool | None:
        proofs.append(holds(proof, error, step))
        return proofs[-1]

    monkeypatch.setattr(Proof, "holds", noted)
    recorded_group(compressor, 1)
    assert proofs == [True] * len(LARGE) * recorded_exchange.PROVEN


@methods
@pytest.mark.parametrize("workers", [1, 2])
def test_the_host_never_waits(compressor: Compressor, workers: int) -> None:
    group = recorded_group(compressor, workers)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(5):
            draw(group, step)
            group.exchange()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(group.replays)
    assert all(group.place.held(grad).isfinite().all() for grad in group.grads)


def requested() -> int:
    """Return the bytes of all tensors of the GPU, as they were asked for."""
    torch.cuda.synchronize()
    garbage.collect()
    found: int = torch.cuda.memory_stats()["requested_bytes.all.current"]
    return found


@methods
def test_memory_is_bounded_and_stays(compressor: Compressor) -> None:
    group = Group(make(compressor), 1, recorded=True, place=GPU, buckets=LARGE)
    draw(group, 0)
    group.exchange()
    before = requested()  # errors, tables of the layout
    for step in range(1, 3 + recorded_exchange.PROVEN):
        draw(group, step)
        group.exchange()
    assert all(group.replays)
    kept = requested() - before
    sizes = [4 * sum(map(math.prod, shapes.values())) for shapes in LARGE]
    bound = max(recorded_exchange.MOST * max(sizes), recorded_exchange.SMALL)
    assert kept <= bound, "all buckets share the memory of the largest one"
    for step in range(50):
        draw(group, step)
        group.exchange()
    assert requested() - before == kept
    group.engines.clear()
    assert requested() <= before, "a recording must not outlive its engine"


class Alone(Transport):
    """One worker's transport, whose replies lie in memory of their own."""

    worker, workers, sent_bytes = 0, 1, 0

    def fulfil(self, request: Request) -> Reply:
        if isinstance(request, Gather | Exchange):
            own = request.payloads[0] if isinstance(request, Exchange) else request.tensors
            return [cloned(own)]
        return cloned(request.tensors)  # type: ignore[no-any-return]


class Late(Recording):
    """Runs flows on a stream that is late, before them and behind them."""

    def run(self, flow: Any, device: torch.device) -> None:
        torch.cuda._sleep(CYCLES)
        super().run(flow, device)
        torch.cuda._sleep(CYCLES)


def means(
    compressor: Compressor, gradients: Sequence[Tensor], waits: bool
) -> tuple[list[Tensor], Mapping[str, Tensor]]:
    """Exchange on the stream of ``Background``, as DDP's hook does; return means and errors.

    The default stream is late too, and it writes to the gradient as soon as it may.
    """
    engine: Engine = make(compressor)(0, 1)
    grad, found = torch.zeros_like(gradients[0]), list[Tensor]()
    background = Background(Late(Alone()), grad.device, waits=waits)
    for gradient in gradients:
        torch.cuda._sleep(CYCLES)
        grad.copy_(gradient)
        future = background.submit(engine.flow(grad, SHAPES), grad)
        engine.advance()
        torch.full((grad.numel(),), 7.0, device="cuda")  # in memory that is free, if there is any
        future.wait()
        found.append(grad.clone())
        grad.fill_(math.nan)
    assert background.close()
    background.check()
    torch.cuda.synchronize()
    assert any(replays(engine))
    return found, engine.errors()


@methods
@pytest.mark.parametrize("waits", [False, True], ids=["by the caller", "by a thread"])
def test_streams_wait_for_each_other(compressor: Compressor, waits: bool) -> None:
    steps = 12
    gradients = [local_gradient("normal", 0, step).cuda() for step in range(steps)]
    written, wanted = Group(make(compressor), 1, recorded=False, place=GPU), list[Tensor]()
    for gradient in gradients:
        written.step([gradient])
        torch.cuda.synchronize()
        wanted.append(written.grads[0].clone())
    found, errors = means(compressor, gradients, waits)
    for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(ours, theirs), step
    for name, error in written.engines[0].errors().items():
        assert torch.equal(errors[name], error), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("compressor", [gc.Cast(), gc.TopK(0.05)], ids=repr)
def test_another_device_is_the_current_one(compressor: Compressor) -> None:
    groups = [Group(make(compressor), 1, recorded=way, place=GPU) for way in (True, False)]
    for step in range(8):
        with torch.cuda.device(step % 2 if step > 4 else 0):
            for group in groups:
                group.step([local_gradient("normal", 0, step)])
        ours, theirs = (group.everything() for group in groups)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), step
    assert all(groups[0].replays)
