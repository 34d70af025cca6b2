"""A replay asks for what a training asks for, at the times of the timeline, and waits asleep."""

import time
from typing import Any

import pytest
import torch.distributed as dist

from lightning_gc.advice.description import LATENCY_US, shapes_of
from lightning_gc.advice.replay import replay
from lightning_gc.advice.what_if import WhatIf
from lightning_gc.core import Exchange, Gather, Mean
from lightning_gc.transports.link import Link

CASE = WhatIf(shapes_of("resnet50"), 0.12, 4, Link(1e6, LATENCY_US), codec=0.03)
"""With four workers 4 bits take two requests for each of five buckets."""


class Noting:
    """Sends nothing, and notes each request and its time."""

    workers = CASE.workers

    def __init__(self) -> None:
        self.asked: list[tuple[float, Any]] = []

    def fulfil(self, request: Any) -> None:
        self.asked.append((time.perf_counter(), request))


def size(request: Any) -> int:
    """Return the bytes that a worker sends."""
    others = CASE.workers - 1
    if isinstance(request, Exchange):
        return others * request.payloads[0][0].nbytes
    nbytes: int = request.tensors[0].nbytes
    return others * nbytes if isinstance(request, Gather) else 2 * others * nbytes // CASE.workers


def test_requests_are_those_of_the_buckets_and_no_sooner() -> None:
    situation, noting = CASE.situation(), Noting()
    buckets = situation.buckets(None, situation.costs["qsgd"])
    began = time.perf_counter()
    seconds = replay(situation, buckets, noting)()  # type: ignore[arg-type]
    kinds = [{"Exchange": Exchange, "Gather": Gather, "Mean": Mean}[a.kind] for a in asked(buckets)]
    assert [type(request) for _, request in noting.asked] == kinds
    sent = sum(size(request) for _, request in noting.asked)
    assert sent == pytest.approx(sum(trace.nbytes for _, trace in buckets), rel=1e-3)
    at = iter(moment - began - situation.module.forward for moment, _ in noting.asked)
    compressed = 0.0
    for ready, trace in buckets:  # its first request follows its own compression, and all before
        compressed += trace.seconds[0]
        assert min([next(at) for _ in trace.asked]) >= ready + compressed - 1e-6
    assert seconds >= CASE.step + 0.03


def asked(buckets: Any) -> list[Any]:
    return [each for _, trace in buckets for each in trace.asked]


def test_all_reduces_of_ddp_are_under_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way: list[int] = []

    class Work:
        def wait(self) -> None:
            under_way.append(-1)

    def all_reduce(tensor: Any, async_op: bool) -> Work:
        assert async_op
        under_way.append(tensor.nbytes)
        return Work()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    situation = CASE.situation()
    buckets = situation.buckets(None, share=situation.sixteen)
    replay(situation, buckets, Noting())()  # type: ignore[arg-type]
    assert sum(under_way[: len(buckets)]) == CASE.parameters * 2
    assert under_way[len(buckets) :] == [-1] * len(buckets)


def test_it_waits_asleep() -> None:
    """Half a second without an exchange takes no tenth of that from the processor."""
    situation = WhatIf(CASE.shapes, 0.5, 2, CASE.link).situation()
    step = replay(situation, [], Noting())  # type: ignore[arg-type]
    began = time.process_time()
    assert step() >= 0.5
    assert time.process_time() - began < 0.05
