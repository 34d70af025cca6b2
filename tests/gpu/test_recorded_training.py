"""Training with recorded exchanges over NCCL has the bits of training without; buckets on a GPU.

With two GPUs, or one that is shared, there are two workers. On a CPU, where nothing is recorded,
they use Gloo.
"""

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import lightning_gc as gc
from lightning_gc import PerParameter
from lightning_gc.advice.description import MODELS
from lightning_gc.core import Gather, Reply
from lightning_gc.engine.recorded_exchange import RecordedLayout
from lightning_gc.exchange.bucketing import caps, layout
from lightning_gc.exchange.synchronizer import Synchronizer
from lightning_gc.transports import Distributed
from tests.support.accelerator import DEVICE, WORKERS
from tests.support.fitting import ddp, fit
from tests.support.models import Plain, own_batches
from tests.support.processes import run_in_processes

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(400)]
STEPS, LAST = 50, 10
METHODS: dict[str, Any] = {
    "cast": gc.Cast(),
    "qsgd": PerParameter(gc.QSGD(4)),
    "topk": PerParameter(gc.TopK(0.1)),
    "signs": PerParameter(gc.EFSignSGD()),
    "votes": gc.SignSGD(),
    "randomk": PerParameter(gc.RandomK(0.1)),
    "powersgd": PerParameter(gc.PowerSGD(1)),
    "chunks": PerParameter(gc.Quantised(gc.ChunkedTopK(0.1, 64), gc.BinMeans(2, 16))),
}
GATHERED = {"cast", "qsgd", "topk", "signs", "votes", "chunks"}
"""Methods in which up to two workers gather messages."""
WAYS = ("by Triton", "as written", "recorded")


@contextlib.contextmanager
def running(way: str) -> Iterator[None]:
    """Let the exchanges of the body be run in one of ``WAYS``."""
    with contextlib.ExitStack() as stack:
        if way != "recorded":
            stack.enter_context(mock.patch.object(RecordedLayout, "is_due", return_value=False))
        if way == "by Triton" and DEVICE == "cuda":
            from lightning_gc.kernels.gpu import prepared_launch

            stack.enter_context(mock.patch.object(prepared_launch, "_trusted", False))
        yield


class Notes(pl.Callback):
    """Notes what each step sends and gathers, and whether all buckets are recorded in the end.

    Attributes:
        sent: bytes after each step.
        gathers: of each step, for each gather whether it had memory of an earlier one, and the
            places of its reply.
        recorded: of each bucket.
    """

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.gathers: list[list[tuple[bool, list[int]]]] = []
        self.recorded: list[bool] = []
        self._now: list[tuple[bool, list[int]]] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        gather = Distributed._gather

        def noted(transport: Distributed, request: Gather) -> Reply:
            reply = gather(transport, request)
            places = [leaf.data_ptr() for leaf in tree_leaves(list(reply))]
            self._now.append((request.into is not None, places))
            return reply

        with mock.patch.object(Distributed, "_gather", noted):
            yield

    def on_train_batch_start(self, *_: Any) -> None:
        self._now = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.gathers.append(self._now)
        strategy = trainer.strategy
        self.sent.append(strategy.recording.sent_bytes)
        known = strategy.engine._recordings._known.values()
        self.recorded = [each.recorded is not None for each in known]


def trained(worker: int, method: str) -> dict[str, dict[str, Any]]:
    """Train in each way; return the weights' digest, and what the steps have sent and gathered."""
    results = {}
    for way in WAYS:
        notes = Notes()
        with running(way), notes.listening():
            found = fit(
                ddp(METHODS[method], bucket_cap_mb=0.005),
                Plain,
                own_batches(worker, STEPS),
                devices=WORKERS,
                use_distributed_sampler=False,
                callbacks=[notes],
            )
        left = {key: found[key] for key in ("digest", "memory")}
        results[way] = left | {key: vars(notes)[key] for key in ("sent", "gathers", "recorded")}
    return results


@pytest.mark.parametrize("method", METHODS)
def test_recorded_exchanges_change_nothing(method: str) -> None:
    if DEVICE == "cpu" and method != "topk":
        pytest.skip("nothing is recorded on a CPU, where one method shows that this test runs")
    workers = run_in_processes(trained, WORKERS, method, timeout=350)
    assert len({found["digest"] for ways in workers for found in ways.values()}) == 1
    for ways in workers:
        for key in ("memory", "sent"):
            assert ways["recorded"][key] == ways["as written"][key] == ways["by Triton"][key]
        assert len(ways["recorded"]["sent"]) == STEPS
        assert not any(ways["as written"]["recorded"])
        recorded = ways["recorded"]["recorded"]
        assert (bool(recorded) and all(recorded)) == (DEVICE == "cuda")
        if DEVICE == "cuda" and method in GATHERED:
            *_, first = ways["recorded"]["gathers"][:-LAST]
            for step in ways["recorded"]["gathers"][-LAST:]:
                assert step
                assert all(into for into, _ in step)
                assert step == first, "a reply must arrive in the memory of the step before"


class OfShapes(pl.LightningModule):
    """Has parameters of given shapes, whose gradients are ready in reverse order."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.each = nn.ParameterList(torch.zeros(shape) for shape in shapes.values())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        total = batch.sum()
        for param in self.each:
            total = total + param.sum() * total.detach()
        return total

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def buckets(
    worker: int, compressor: Any, shapes: dict[str, tuple[int, ...]], options: dict[str, Any]
) -> tuple[list[int], list[str]]:
    """Return how many buckets each of four steps has, and what was said of their size."""
    counts, lines, hook = list[int](), Lines(), Synchronizer.hook
    log = logging.getLogger("lightning_gc")
    log.addHandler(lines)
    log.setLevel(logging.INFO)

    def noted(synchronizer, state, bucket):  # type: ignore[no-untyped-def]
        counts[-1] += 1
        return hook(synchronizer, state, bucket)

    class Opens(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            counts.append(0)

    with mock.patch.object(Synchronizer, "hook", noted):
        fit(
            ddp(compressor, **options),
            lambda: OfShapes(shapes),
            own_batches(worker, 4),
            devices=WORKERS,
            use_distributed_sampler=False,
            callbacks=[Opens()],
        )
    return counts, [line for line in lines.said if line.startswith("Buckets of")]


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU, for which sizes are chosen")
@pytest.mark.parametrize("waits", [True, False])
def test_as_many_buckets_as_announced(waits: bool) -> None:
    """DDP makes its last buckets after the first step, in the order of readiness."""
    compressor = gc.HardThreshold(1e3) if waits else gc.Cast()
    found = run_in_processes(buckets, WORKERS, compressor, MODELS["gpt2"](), {}, timeout=300)
    said, wanted = found[0][1], 13
    if waits:
        announced = re.match(r"Buckets of 100 MiB, (\d+) in place of 13,", said[0])
        assert announced is not None, said
        wanted = int(announced[1])
    assert len(said) == waits
    assert {counts[-1] for counts, _ in found} == {wanted}
    assert not any(lines for _, lines in found[1:])


@pytest.mark.parametrize("cap", [25, 0.5])
def test_a_users_size_holds(cap: float) -> None:
    """On a CPU with smaller matrices, and without the embedding."""
    shapes = MODELS["gpt2"]()
    if DEVICE == "cpu":
        shapes = {n: (max(1, s[0] // 16), *s[1:]) for n, s in shapes.items() if s[0] < 50_000}
    nbytes = [4 * torch.Size(shape).numel() for shape in shapes.values()][::-1]
    found = run_in_processes(
        buckets, WORKERS, gc.Cast(), shapes, {"bucket_cap_mb": cap}, timeout=300
    )
    for counts, said in found:
        assert counts[-1] == len(layout(nbytes, caps(cap)))
        assert not said
