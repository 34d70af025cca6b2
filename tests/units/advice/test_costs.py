"""A bucket put together of segments sends what the whole bucket sends."""

import pytest
import torch

from lightning_gc.advice.costs import bucket_trace, segment_trace, slowest
from lightning_gc.advice.prediction import WHOLE, Situation
from lightning_gc.advice.traces import Asked, Trace, trace
from lightning_gc.exchange.timeline import Module
from lightning_gc.methods.method import Method
from lightning_gc.transports.link import Link, alike

SHAPES = {"a": (64, 64), "b": (64,), "c": (48, 64), "d": (3,)}


def gradients() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def flat(names: list[str]) -> torch.Tensor:
    return torch.cat([gradients()[name].reshape(-1) for name in names])


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    "method",
    [
        None,
        Method("cast"),
        Method("qsgd"),
        Method("topk"),
        Method("topk", scheme="two_shot"),
        Method("topk", scheme="sparse_reduce"),
        Method("powersgd", fixed={"rank": 2}),
    ],
    ids=str,
)
def test_requests_and_bytes_of_the_whole(method: Method | None, workers: int) -> None:
    pieces = [["a", "b"], ["c"], ["d"]]
    parts = [
        segment_trace(method, {n: SHAPES[n] for n in names}, flat(names), workers)
        for names in pieces
    ]
    found = bucket_trace(parts)
    whole = segment_trace(method, SHAPES, flat(list(SHAPES)), workers)
    kinds = [asked.kind for asked in whole.asked]
    assert [asked.kind for asked in found.asked] == kinds
    # Each segment's message is padded, and positions are coded over fewer elements.
    padding = 16 * len(kinds) * workers
    if method is not None and method.scheme == "sparse_reduce":
        padding *= 2  # each segment has its own cuts and counts, too
    assert found.nbytes == pytest.approx(whole.nbytes, rel=0.03, abs=padding)
    assert len(found.seconds) == len(found.asked) + 1


def test_more_workers_than_are_simulated() -> None:
    method = Method("topk", scheme="two_shot")
    found = segment_trace(method, SHAPES, flat(list(SHAPES)), 8)
    true = trace(method.make_compressor({}), method.memory_and_scheme()[1], SHAPES, 8, 1)
    assert found.workers == 8
    assert found.nbytes == pytest.approx(true.sent, rel=0.1)


def made(kinds: str, seconds: tuple[float, ...], nbytes: float = 100.0, workers: int = 2) -> Trace:
    names = {"M": "Mean", "G": "Gather", "E": "Exchange"}
    return Trace(workers, tuple(Asked(names[kind], nbytes) for kind in kinds), seconds, nbytes)


def test_requests_of_one_kind_become_one() -> None:
    each = {"MG": (1.0, 2.0, 3.0), "GG": (10.0, 20.0, 30.0), "M": (5.0, 6.0)}
    found = bucket_trace([made(kinds, seconds, workers=3) for kinds, seconds in each.items()])
    assert [(a.kind, a.nbytes) for a in found.asked] == [
        ("Mean", 200.0),
        ("Gather", 200.0),
        ("Gather", 100.0),
    ]
    assert found.seconds == (16.0, 8.0, 23.0, 30.0)
    assert sum(found.seconds) == 1 + 2 + 3 + 10 + 20 + 30 + 5 + 6


def test_of_two_workers_a_small_mean_is_gathered() -> None:
    found = bucket_trace([made("M", (1.0, 2.0)), made("GG", (10.0, 20.0, 30.0))])
    assert [(a.kind, a.nbytes) for a in found.asked] == [("Gather", 200.0), ("Gather", 100.0)]
    assert found.seconds == (11.0, 22.0, 30.0)
    later = bucket_trace([made("M", (1.0, 2.0)), made("EG", (10.0, 20.0, 30.0))])
    assert [a.kind for a in later.asked] == ["Exchange", "Gather", "Mean"], "of another turn"


def test_the_slowest_worker_counts() -> None:
    found = slowest([made("G", (1.0, 4.0)), made("G", (2.0, 3.0), 120.0)])
    assert found.seconds == (2.0, 4.0)
    assert found.asked[0].nbytes == 120


def test_work_of_buckets() -> None:
    links = alike(Link(gbps=8e-9, latency_us=0.0))  # a byte a second
    traces = [made("G", (1.0, 2.0)), made("G", (3.0, 4.0)), made("G", (5.0, 6.0))]
    work = bucket_trace(traces[:2]).work(0.3, links)
    assert (work.ready, work.computing, work.communicating) == (0.3, (4.0, 6.0), (200.0,))
    mib, pieces = 1 << 20, (range(0, 1), range(1, 3), range(3, 4))
    sizes, ready = (mib // 4, mib // 4, mib // 2, mib), (0.1, 0.3, 0.2, 0.4)
    module = Module(1.0, 0.4, 0.0)
    case = Situation(module, tuple("abcd"), sizes, ready, pieces, {}, WHOLE, 2, links)
    # The first bucket has two segments: 10 + 200 s of work from 0.3 on, the second 11 + 100.
    assert case.step(None, traces).seconds == pytest.approx(1.0 + 0.3 + 210 + 111)
    ring = sum(sizes)  # of two workers; nothing is computed
    assert case.step(None).seconds == pytest.approx(1.0 + 0.3 + ring)
