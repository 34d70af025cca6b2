"""One bucket's work of a GPU's host, without a GPU: what it calls, and what the driver is given.

``prepare`` replaces the driver's library of this process (``driver_stub``).
"""

from __future__ import annotations

import contextlib
import cProfile
import gc as gc_of_python
import math
import pstats
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import lightning_gc as gc
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.per_parameter import by_default
from lightning_gc.core import Exchange, Gather
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import resume
from lightning_gc.engine import Engine, recorded_exchange
from lightning_gc.engine.recorded_exchange import RecordedExchange, RecordedLayout
from tests.support import counted_waits, driver_stub

META = torch.device("meta")
METHODS: dict[str, Compressor] = {
    "Identity()": gc.Identity(),
    "Cast()": gc.Cast(),
    "QSGD(4)": gc.QSGD(4),
    "EFSignSGD()": gc.EFSignSGD(),
    "RandomK(0.01)": gc.RandomK(0.01),
    "TopK(0.01)": gc.TopK(0.01),
    "ChunkedTopK()": gc.ChunkedTopK(),
    "PowerSGD(2)": gc.PowerSGD(2),
    "Quantised(ChunkedTopK(), BinMeans(2))": gc.Quantised(gc.ChunkedTopK(), gc.BinMeans(2)),
}
EQUAL_STEPS = 6
"""Steps after which an exchange that can be recorded is recorded."""


class LoneBucket:
    """One worker's exchange of a bucket of nine matrices with itself, without a transport.

    Args:
        compressor: as a user gives it.
        device: of the gradient, whose contents are not set.
        numel: elements, about.
        dtype: of the gradient.
    """

    def __init__(
        self,
        compressor: Compressor,
        device: torch.device = META,
        numel: int = 6_500_000,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        rows = max(1, numel // 9 // 768)
        self.shapes = {f"p{i}": (rows, 768) for i in range(9)}
        self.engine = Engine(by_default(compressor))
        numel = sum(map(math.prod, self.shapes.values()))
        self.grad = torch.zeros(numel, device=device, dtype=dtype)

    def __call__(self) -> None:
        flow = self.engine.flow(self.grad, self.shapes)
        request = next(flow, None)
        while request is not None:
            if isinstance(request, Exchange):
                reply: Any = [request.payloads[0]]
            elif isinstance(request, Gather):
                reply = [request.tensors]
            else:
                reply = list(request.tensors)
            request = resume(flow, reply)
        self.engine.advance()

    @property
    def recorded(self) -> RecordedExchange | None:
        """What its steps start again."""
        return next(iter(self.engine._recordings._known.values())).recorded


@dataclass(frozen=True)
class Cost:
    """Work of the host for one bucket.

    Attributes:
        calls: of functions.
        ours: of those in this library. On meta torch's operations call Python functions of torch.
        launches: of kernels.
    """

    calls: int
    ours: int
    launches: int


def prepare() -> driver_stub.Stub:
    """Let kernels be started without a GPU; return the stub of the driver's library."""
    global _stub
    _stub = driver_stub.in_new_folder()
    from lightning_gc.kernels.gpu import prepared_launch

    mock.patch.object(prepared_launch, "equal", _equal).start()
    mock.patch.object(recorded_exchange, "same_bits", _equal).start()
    mock.patch.object(Bucket, "generator", counted_waits.generator).start()
    return _stub


_stub: driver_stub.Stub


def _equal(one: Tensor, other: Tensor) -> bool:
    """On meta nothing is computed."""
    return one.is_meta or torch.equal(one, other)


def cost(bucket: LoneBucket) -> Cost:
    """Count what one more exchange does."""
    before, profile = _stub.launches, cProfile.Profile()
    profile.enable()
    bucket()
    profile.disable()
    stats: Any = pstats.Stats(profile)
    ours = sum(row[1] for (file, *_), row in stats.stats.items() if "lightning_gc" in file)
    return Cost(stats.total_calls, ours, _stub.launches - before)


@contextlib.contextmanager
def by_triton() -> Iterator[Callable[..., LoneBucket]]:
    """Yield a maker of buckets whose kernels Triton starts."""
    from lightning_gc.kernels.gpu import prepared_launch

    with mock.patch.object(prepared_launch, "_trusted", False), as_written() as bucket_of:
        yield bucket_of


@contextlib.contextmanager
def as_written() -> Iterator[Callable[..., LoneBucket]]:
    """Yield a maker of buckets whose exchanges are not recorded, with prepared launches."""
    with mock.patch.object(RecordedLayout, "is_due", return_value=False):
        yield run_in


@contextlib.contextmanager
def recorded() -> Iterator[Callable[..., LoneBucket]]:
    """Yield a maker of buckets whose exchanges are recorded."""
    yield run_in


WAYS = (by_triton, as_written, recorded)


def run_in(name: str, *of_bucket: Any, **more: Any) -> LoneBucket:
    """Return a bucket of a method of ``METHODS``, after some steps."""
    bucket = LoneBucket(METHODS[name], *of_bucket, **more)
    for _ in range(EQUAL_STEPS):
        bucket()
    return bucket


def differences(name: str, device: torch.device) -> tuple[list[str], int]:
    """Return kernels for which the driver is given other things by Triton than when prepared.

    On the CPU tensors have addresses, and exchanges are not recorded. On meta recorded launches are
    compared, too. Also how many launches were compared: those of one exchange as it is written.
    """
    from lightning_gc.kernels.gpu import prepared_launch

    found, calls = list[str](), list[tuple[Any, ...]]()
    start = prepared_launch.start

    def noted(program: Any, grid: Any, arguments: Any, constants: Any, **options: Any) -> Any:
        started = start(program, grid, arguments, constants, **options)
        calls.append((program, grid, arguments, constants, started))
        return started

    with as_written():
        bucket = run_in(name, device, 20_000)
        with mock.patch.object(prepared_launch, "start", noted):
            bucket()
    again = _recorded_launches(name, bucket.engine.step - 1) if device == META else []
    for index, (program, grid, arguments, constants, started) in enumerate(calls):
        if started is None:
            found.append(f"{program.__name__} is not prepared")
            continue
        variant, _ = started
        given = program, grid, arguments, constants
        theirs = _stub.given(variant.sizes, partial(prepared_launch.by_triton, *given))
        ours = _stub.given(variant.sizes, partial(start, *given, may_prepare=False))
        if ours != theirs:
            found.append(f"{program.__name__}: {theirs} by Triton, {ours} when prepared")
        for way in again[index : index + 1]:
            numbers = [i for i, form in enumerate(variant.formats) if form != "P"]
            kept, theirs = (_numbers(g, numbers) for g in (_stub.given(variant.sizes, way), theirs))
            if kept != theirs:
                found.append(f"{program.__name__}: {theirs} as written, {kept} when recorded")
    return found, len(calls)


def _numbers(given: tuple[bytes, list[int]], places: Sequence[int]) -> tuple[Any, ...]:
    """Return the numbers among the arguments. A recorded exchange has other addresses."""
    arguments, sizes = given
    return [arguments[8 * i : 8 * i + 8] for i in places], sizes


def _recorded_launches(name: str, step: int) -> list[Callable[[], object]]:
    """Return the launches of a recorded exchange, in order, set to a step."""
    with recorded():
        exchange = run_in(name, META, 20_000).recorded
    assert exchange is not None
    gc_of_python.collect()  # memory of the recorded arguments must not be freed
    found: list[Callable[[], object]] = []
    for span in (exchange.opening, *exchange.exchange, exchange.closing):
        for write, place in span._writes:
            write(*place, step)
        found += [partial(call, *given) for call, given in span._calls if len(given) > 4]
    return [*found, lambda: exchange]
