"""The scaling model predicts the volumes that transports count, also for more workers."""

import sys
from pathlib import Path

import pytest

from lightning_gc import QSGD, AllGather, AllReduce, Cast, RandomK, TopK, TwoShot
from lightning_gc.schemes import Scheme

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import scaling

from lightning_gc.advice.traces import Asked, Pattern, Trace, dense, pattern, trace
from lightning_gc.transports.link import Link, alike

SHAPES = {"weight": (64, 96), "bias": (96,)}


@pytest.mark.parametrize(
    ("compressor", "scheme"),
    [
        (Cast(), AllGather()),
        (QSGD(4), TwoShot()),
        (TopK(0.1), AllGather()),
        (TopK(0.1, value_dtype="bfloat16"), TwoShot()),
        (RandomK(0.1), AllReduce()),
    ],
)
def test_volumes_are_what_the_transport_counts(compressor, scheme: Scheme) -> None:
    traces = [trace(compressor, scheme, SHAPES, workers, 1) for workers in (3, 4, 6, 8)]
    for each in traces:
        assert each.nbytes == pytest.approx(each.sent, rel=0.01)  # the last shard may be shorter
        assert len(each.seconds) == len(each.asked) + 1
        assert all(second > 0 for second in each.seconds)
    found = pattern(traces)
    assert abs(scaling.errors(traces)[0]) < 0.05
    assert found.at(5).nbytes == pytest.approx(
        trace(compressor, scheme, SHAPES, 5, 1).sent, rel=0.05
    )


def test_what_the_benchmark_models_has_a_pattern_and_a_line(tmp_path: Path) -> None:
    lines = {}
    for key, pair in scaling.configurations().items():
        pattern([trace(*pair, SHAPES, workers, 1) for workers in scaling.SEEN])
        lines[key] = [1.0] * len(scaling.points())
    scaling.draw(tmp_path / "scaling.svg", scaling.points(), {"a link": lines}, scaling.COLOURS)


def made(workers: int) -> Trace:
    sizes = (1000.0, 4000 / workers, 8.0 * workers)
    asked = tuple(Asked(kind, n) for kind, n in zip(("Gather", "Exchange", "Mean"), sizes))  # noqa: B905
    return Trace(workers, asked, (1.0, 2 / workers, 0.5 + 0.1 * workers, 0.0))


def test_a_pattern_goes_on() -> None:
    traces = [made(workers) for workers in (2, 4, 8, 16)]
    assert scaling.errors(traces) == pytest.approx((0, 0), abs=1e-6)
    found = pattern(traces)
    far, true = found.at(1024), made(1024)
    assert far.seconds == pytest.approx(true.seconds, abs=1e-6)
    assert [a.nbytes for a in far.asked] == pytest.approx([a.nbytes for a in true.asked])


def test_flows_that_change_with_the_number_of_workers_have_no_pattern() -> None:
    other = Trace(8, (Asked("Mean", 1.0),), (1.0, 1.0))
    with pytest.raises(ValueError, match="depend on the number of workers"):
        pattern([made(2), made(4), other])


def test_seconds_on_a_link() -> None:
    link = Link(gbps=1.0, latency_us=100.0)
    assert str(link) == "1 Gbit/s"
    assert str(Link(0.1, 0)) == "100 Mbit/s"
    # 1 MB among 5: 8 messages of 0.2 MB in a ring, at 8 ns a byte.
    links = alike(link)
    assert dense(1_000_000, 5).takes(links) == pytest.approx(8 * (100e-6 + 200_000 * 8e-9))
    gather = Trace(5, (Asked("Gather", 1000),), (0.25, 0.5))
    assert gather.takes(links) == pytest.approx(0.75 + 4 * (100e-6 + 1000 * 8e-9))
    ragged = Asked("Exchange", 1000, lengths=16)
    assert ragged.takes(5, links) == pytest.approx(4 * (100e-6 + 1016 * 8e-9))
    ahead = Asked("Gather", 1000, lengths=16)
    assert ahead.takes(5, links) == pytest.approx(8 * 100e-6 + 4 * 1016 * 8e-9)


def test_nothing_becomes_negative() -> None:
    falling = [Trace(w, (), (1.0 / w**2,)) for w in (2, 4, 8, 16)]
    found = pattern_of_seconds(falling)
    assert all(term >= 0 for term in found.seconds[0])


def pattern_of_seconds(traces: list[Trace]) -> Pattern:
    asked = (Asked("Gather", 8.0),)
    return pattern([Trace(t.workers, asked, t.seconds) for t in traces])
