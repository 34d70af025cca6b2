"""No method makes the host wait for an accelerator more often than it declares."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gc import AllGather, GTopK, HardThreshold, SparseReduce, TopK
from lightning_gc.compressors import Compressor, PerParameter, SparseCodec, Waits
from lightning_gc.core.bucket import Bucket
from lightning_gc.engine import Engine
from lightning_gc.engine.compatibility import combine, waits_of_step
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.testing.contracts import cases
from lightning_gc.transports import Simulated
from tests.support import counted_waits
from tests.support.counted_waits import Accelerator, on_device
from tests.support.instances import ALL, ALL_MEMORIES, ONE_EACH, schemes_for

SHAPES = {"weight": (48, 50), "bias": (30,)}
NUMEL = 48 * 50 + 30
CYCLE = 4  # steps; some methods do in one of them what they do not in the others

Put = Callable[[Tensor], Tensor]
Pair = tuple[Compressor, Scheme | None]


@pytest.fixture(autouse=True)
def generators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bucket, "generator", counted_waits.generator)


def pairs(compressors: Iterable[Compressor]) -> list[Pair]:
    return [
        (compressor, scheme) for compressor in compressors for scheme in schemes_for(compressor)
    ]


def by_default(compressor: Compressor) -> Pair:
    return compressor, combine(compressor)[2]


class Run:
    """Workers whose gradients are put on a device; the second step comes first."""

    def __init__(self, put: Put, pair: Pair, workers: int, memory: Memory | None = None) -> None:
        self.put = put
        self.transport = Simulated(workers)
        compressor, scheme = pair
        self.engines = [
            Engine(PerParameter(compressor), memory, scheme, worker=worker, workers=workers)
            for worker in range(workers)
        ]
        for engine in self.engines:
            engine.reset(1)  # the first one may be dense

    def step(self, last: float | None = None) -> list[Any]:
        """Take a step; the last gradient, or worker 0's if not finite, may be one number."""
        draw = cases.generator(self.engines[0].step)
        made = [torch.randn(NUMEL, generator=draw) for _ in self.engines]
        if last is not None:
            for flat in made[: 1 if last != last else None]:
                flat[-30:] = last
        flats = [self.put(flat) for flat in made]
        flows = [
            engine.flow(flat, SHAPES) for engine, flat in zip(self.engines, flats, strict=True)
        ]
        for engine in self.engines:
            engine.advance()
        with torch.no_grad():
            self.transport.run(flows)
        return flats


def declared(pair: Pair, workers: int) -> Waits:
    """What compressor and scheme declare for a step of all workers; a scheme may wait once."""
    compressor, scheme = pair
    tensors = workers * sum(compressor.compresses(shape) for shape in SHAPES.values())
    each = waits_of_step(*pair, workers)
    again = 0 if scheme is None else (tensors - workers) * scheme.waits
    return Waits(tensors * each.least - again, tensors * each.limit)


def on_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(
            pair, marks=() if type(pair[0]) in map(type, ONE_EACH) else pytest.mark.nightly
        )
        for pair in pairs(ALL)
    ],
    ids=cases.label,
)
def test_without_any_data(pair: Pair) -> None:
    """A step that needs no number from a device runs on one that has none; others raise."""
    run, waits = Run(on_meta, pair, workers=1), declared(pair, 1)
    if waits.least == 0:
        for _ in range(CYCLE if waits.limit == 0 else 1):
            run.step()
    else:
        with pytest.raises((NotImplementedError, RuntimeError), match=r"[mM]eta"):
            run.step()


def counted(run: Run) -> list[str]:
    """Return what the host waits for in a step.

    Not counted are a new layout in the first step, and the message with the numbers of elements.
    """
    first = not any(engine.buffers.layouts._known for engine in run.engines)
    with Accelerator() as counting:
        run.step()
    exact = run.engines[0].compressor.traits.exact
    once = ["tensor"] * len(run.engines) if first and not exact else []
    method, scheme = run.engines[0].compressor.method, run.engines[0].scheme
    joint = scheme is not None and scheme.joint(len(run.engines)) == "parts"
    if joint and isinstance(method, SparseCodec) and method.ragged:
        once += ["tolist"] * len(run.engines)
    return sorted((Counter(counting.waits) - Counter(once)).elements())


BY_DAY = [*map(by_default, ONE_EACH), *pairs([TopK(0.1), HardThreshold(1.0)])]
AT_NIGHT = [pair for pair in pairs(ALL) if pair not in BY_DAY]
each_pair = pytest.mark.parametrize(
    "pair",
    [*BY_DAY, *(pytest.param(pair, marks=pytest.mark.nightly) for pair in AT_NIGHT)],
    ids=cases.label,
)


@each_pair
def test_with_data(pair: Pair) -> None:
    """Copies from the host, which a device without data does not show, and how often."""
    waits, run = declared(pair, 2), Run(on_device, pair, 2)
    found = [counted(run) for _ in range(CYCLE)]
    assert waits.least <= len(found[0])
    most = max(found, key=len)
    assert len(most) <= waits.limit, most
    assert waits.least or not waits.limit or most, "declared, but never seen"


@pytest.mark.parametrize("memory", ALL_MEMORIES, ids=cases.label)
def test_no_memory_waits(memory: Memory) -> None:
    run = Run(on_meta, by_default(TopK(0.1)), 1, memory)
    for _ in range(2):  # of which one is the third, in which some differ
        run.step()


@pytest.mark.parametrize("scheme", [AllGather(), SparseReduce(), None], ids=repr)
def test_the_same_as_on_the_host(scheme: Scheme | None) -> None:
    """Also where a parameter rests, and where a gradient is not finite."""
    compressor: Compressor = GTopK(0.1) if scheme is None else TopK(0.1)
    here, there = (Run(put, (compressor, scheme), 2) for put in (torch.clone, on_device))
    for change in (0.0, float("nan")):
        wanted = here.step(change)
        with Accelerator():
            found = there.step(change)
        for one, other in zip(wanted, found, strict=True):
            assert change != change or bool(one.isfinite().all())
            assert torch.equal(one.isnan(), other.held.isnan())
            assert torch.equal(one.nan_to_num(0.0), other.held.nan_to_num(0.0))
