"""Controllers that follow a link, on links whose bandwidth is scheduled: no network, no clock."""

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_gc import NetworkModel
from lightning_gc.controllers import (
    BandwidthAware,
    CongestionAIMD,
    Controller,
    Curve,
    ExchangeRecord,
    GainSearch,
    Observation,
    Point,
)
from lightning_gc.transports.link import Link, fit
from tests.support.replay import patient

ELEMENTS, WHOLE = 5_000_000, 40_000  # compressed ones, and bytes of tensors sent whole


@dataclass
class Run:
    """A run of two workers whose steps take what the model of the network says."""

    controller: Controller
    network: NetworkModel
    compute: float = 0.05
    noise: float = 0.0
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    def bytes_of(self, level: float) -> float:
        return 8 * level * ELEMENTS + WHOLE  # a value and an index each

    def go(self, steps: int) -> tuple[list[float], list[float]]:
        """Return the seconds of each step and its level."""
        state = self.controller.init()
        decision, state = self.controller.decide(Observation(-1), state)
        every = self.controller.every_steps(0)
        seconds: list[float] = []
        levels: list[float] = []
        records: list[ExchangeRecord] = []
        since = 0
        for step in range(steps):
            level = decision.level or 1.0
            shake = 1 + self.noise * self.draw.uniform(-1, 1)
            nbytes = self.bytes_of(level)
            record = self.network.request("Gather", nbytes, 2, step)
            record = record._replace(seconds=record.seconds * shake)
            records.append(record)
            seconds.append(self.compute * shake + record.seconds)
            levels.append(level)
            since += 1
            if since == every:
                mean = sum(seconds[-since:]) / since
                link, r2 = fit(records[-64:])
                told = Observation(
                    0,
                    wire_bytes=sum(r.nbytes for r in records[-since:]),
                    steps=since,
                    ended=False,
                    step_seconds=mean,
                    phase_seconds={"communicate": sum(r.seconds for r in records[-since:]) / since},
                    exchanges=tuple(records[-since:]),
                    latency_us=link.latency_us,
                    bandwidth_gbps=link.gbps,
                    link_r2=r2,
                )
                decision, state = self.controller.decide(told, state)
                records, since = [], 0
        return seconds, levels


LADDER = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_link_that_slows_down_and_recovers(noise: float) -> None:
    """1000, 100, 1000 Mbit/s: after one turn 90 % of steps keep to 1.15 times the target."""
    target, turn, stretch = 0.1, 8, 120
    network = NetworkModel(1.0, 100.0, schedule=((stretch, 0.1), (2 * stretch, 1.0)))
    aware = BandwidthAware(LADDER, step_seconds=target, every=turn)
    run = Run(aware, network, noise=noise)
    seconds, levels = run.go(3 * stretch)
    settled = [
        took
        for start in (0, stretch, 2 * stretch)
        for took in seconds[start + 2 * turn : start + stretch]
    ]
    assert sum(took <= 1.15 * target for took in settled) >= 0.9 * len(settled)
    # It sends what the ladder allows, within its headroom, not just little.
    for start, gbps in ((0, 1.0), (stretch, 0.1), (2 * stretch, 1.0)):
        allowed = (target - run.compute) * gbps * 1e9 / 8
        oracle = max((x for x in LADDER if run.bytes_of(x) <= allowed), default=LADDER[-1])
        assert levels[start + stretch - 1] >= 0.4 * oracle
        assert run.bytes_of(levels[start + stretch - 1]) <= 1.15 * allowed
    assert min(levels[stretch + turn : 2 * stretch]) < levels[stretch - 1] / 3


def test_nothing_known_nothing_changed() -> None:
    aware = BandwidthAware(LADDER, step_seconds=0.1, first=0.01)
    decision, state = aware.decide(Observation(0, steps=5, wire_bytes=1e6), aware.init())
    assert (decision.level, state) == (0.01, aware.init())
    assert "stays" in decision.reason


@patient
@given(st.floats(0.01, 1), st.floats(0.01, 10), st.floats(1e3, 1e8), st.integers(0, 6))
def test_a_slower_link_never_compresses_less(
    took: float, gbps: float, nbytes: float, at: int
) -> None:
    """All else equal, and while a step is quicker than it may be."""
    aware = BandwidthAware(LADDER, step_seconds=2.0)

    def level(rate: float) -> float:
        told = Observation(0, steps=1, wire_bytes=nbytes, step_seconds=took,
                           bandwidth_gbps=rate, link_r2=1.0)  # fmt: skip
        return aware.decide(told, {"level": at, "bytes": {}})[0].level or math.inf

    assert level(gbps / 2) <= level(gbps)


@pytest.mark.parametrize(("gbps", "latency_us"), [(0.2, 1000.0), (1.0, 20_000.0)])
def test_congestion_stays_near_its_bound(gbps: float, latency_us: float) -> None:
    """In steady state a request takes its bound within a fifth, on either side of it."""
    control = CongestionAIMD(seconds=0.05, first=0.02, up=0.0005, least=0.0005, every=4)
    run = Run(control, NetworkModel(gbps, latency_us))
    seconds, _ = run.go(1600)
    late = [took - run.compute for took in seconds[-400:]]
    assert 0.8 * 0.05 <= min(late) < 0.05 < max(late) <= 1.2 * 0.05


def test_congestion_follows_a_link() -> None:
    network = NetworkModel(1.0, 5_000.0, schedule=((300, 0.05), (900, 1.0)))
    control = CongestionAIMD(seconds=0.05, first=0.02, least=0.0005, every=4)
    _, levels = Run(control, network).go(1500)
    assert levels[899] < 0.1 * levels[299]
    assert levels[-1] > 0.9 * levels[299]


GRID = (0.3, 0.1, 0.03, 0.01, 0.003)


def gains(level: float, tail: float) -> Curve:
    """A gradient of which a share of the norm is in few elements: the more, the less the tail."""
    kept = level**tail
    return Curve(
        1.0, tuple(Point(c, math.sqrt(1 - c**tail), 8e6 * c) for c in GRID) if kept else ()
    )


@pytest.mark.parametrize("seed", range(10))
def test_the_search_finds_the_best_of_a_grid(seed: int) -> None:
    draw = random.Random(seed)
    tail, compute = draw.uniform(0.05, 0.3), draw.uniform(0.01, 0.1)
    network, search = NetworkModel(10 ** draw.uniform(-1.5, 1)), GainSearch(GRID, gain=0.1, omega=0)

    def seconds(level: float) -> float:
        return compute + network.request("Gather", 8e7 * level, 2).seconds

    state, tried = search.init(), []
    level: float | None = GRID[0]
    for epoch in range(8):
        tried.append(level)
        told = Observation(
            epoch, error_curves={"w": gains(1.0, tail)}, step_seconds=seconds(level or 1.0)
        )
        decision, state = search.decide(told, state)
        level = decision.level
    scores = {c: math.sqrt(c**tail) / seconds(c) for c in GRID}
    assert scores[level or 0.0] == max(scores.values())
    assert tried[: len(GRID)] == list(GRID)
    assert not state["searching"]


def test_the_search_stops_at_the_least_gain_and_steps_back() -> None:
    search = GainSearch((0.1, 0.01), gain=0.75)
    good, bad = Point(0.1, 0.1, 1.0), Point(0.01, 0.9, 0.1)
    told = Observation(0, error_curves={"w": Curve(1.0, (good, bad))}, step_seconds=1.0)
    decision, state = search.decide(told, search.init())
    assert (decision.level, state["searching"]) == (0.1, False)
    fell = {"level": 1, "scores": {"0": 1.0, "1": 2.0}, "searching": False}
    assert search.decide(told, fell)[0].level == 0.1


@patient
@given(st.floats(1, 1e4), st.floats(0.01, 100))
def test_a_link_is_fitted(latency_us: float, gbps: float) -> None:
    network = NetworkModel(gbps, latency_us)
    records = [network.request(k, n, 3) for k in ("Mean", "Gather") for n in (8, 10**5, 10**7)]
    found, r2 = fit(records)
    assert found.gbps == pytest.approx(gbps, rel=1e-3)
    assert found.latency_us == pytest.approx(latency_us, rel=1e-2, abs=1e-2)
    assert r2 == pytest.approx(1)


RECORDS = st.builds(
    ExchangeRecord, st.integers(1, 9), st.floats(0, 10**6, allow_subnormal=False), st.floats(0, 1)
)


@patient
@given(st.lists(RECORDS, min_size=1, max_size=8), st.floats(0, 2), st.floats(0, 2))
def test_no_link_without_negative_terms_fits_better(
    records: list[ExchangeRecord], latency: float, slowness: float
) -> None:
    def missed(alpha: float, beta: float) -> float:
        return sum((r.seconds - alpha * r.messages - beta * r.nbytes) ** 2 for r in records)

    found, _ = fit(records)
    alpha = found.latency_us / 1e6
    beta = 8e-9 / found.gbps if found.gbps else 0.0
    sizes = {r.nbytes / r.messages for r in records}
    assume(max(sizes) > 1 + 1.1 * min(sizes))  # what one size takes is the rate's by convention
    assert alpha >= 0
    assert beta >= 0
    others = [(latency, slowness * 1e-6), (latency * alpha, slowness * beta)]
    others += [(alpha, slowness * beta), (latency * alpha, beta), (latency, 0.0)]
    assert all(missed(alpha, beta) <= missed(*other) + 1e-9 for other in others)


def test_latency_alone_is_not_taken_for_a_slow_link() -> None:
    found, _ = fit([ExchangeRecord(2, nbytes, 0.01 - nbytes / 1e9) for nbytes in (1, 500, 4000)])
    assert found.latency_us == pytest.approx(5000, rel=1e-3)
    assert found.gbps == 0


def test_messages_of_one_size_give_a_lower_bound() -> None:
    found, _ = fit([NetworkModel(1.0, 100.0).request("Gather", 1e6, 2)] * 5)
    assert 0.9 < found.gbps < 1.0
    assert fit([]) == (Link(0.0, 0.0), 0.0)


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (BandwidthAware, {"levels": (0.1,), "step_seconds": 1.0}, "two or more levels"),
    (BandwidthAware, {"levels": (0.1, 0.1), "step_seconds": 1.0}, "each once"),
    (BandwidthAware, {"levels": (0.1, 0.01), "step_seconds": 0.0}, "seconds must be above 0"),
    (BandwidthAware, {"levels": (0.1, 0.01), "step_seconds": 1.0, "first": 0.5}, "one of"),
    (BandwidthAware, {"levels": (0.1, 0.01), "step_seconds": 1.0, "headroom": 2}, "use 0.9"),
    (BandwidthAware, {"levels": (0.1, 0.01), "step_seconds": 1.0, "every": 0}, "1 or more"),
    (CongestionAIMD, {"seconds": 1.0, "first": 2.0}, "within least"),
    (CongestionAIMD, {"seconds": 1.0, "least": 0.0}, r"\(least=0.0, most=1.0\): finite levels"),
    (CongestionAIMD, {"seconds": 1.0, "least": 1.0, "first": 1.0}, "least below most"),
    (CongestionAIMD, {"seconds": 1.0, "most": math.inf}, "finite levels"),
    (CongestionAIMD, {"seconds": 1.0, "every": 0}, "1 or more"),
    (CongestionAIMD, {"seconds": 1.0, "down": 1.0}, r"a factor must be in \(0, 1\)"),
    (CongestionAIMD, {"seconds": 0.0}, "seconds must be above 0"),
    (GainSearch, {"levels": (0.1, -1.0)}, "finite numbers above 0"),
    (GainSearch, {"gain": 0.0}, r"gain=0.0\): it must be in \(0, 1\]"),
]


@pytest.mark.parametrize(("controller", "settings", "what"), WRONG)
def test_what_makes_no_sense_is_refused(
    controller: Any, settings: dict[str, Any], what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        controller(**settings)


@dataclass(frozen=True)
class Knob:
    field: str = "density"
    more: str = "bytes"
    low: float = 1e-5
    high: float = 1.0


@pytest.mark.parametrize(
    "controller",
    [BandwidthAware((0.1, 0.01), 1.0), CongestionAIMD(0.1), GainSearch((0.1, 0.01))],
    ids=lambda c: type(c).__name__,
)
def test_knobs(controller: Controller) -> None:
    controller.check(Knob())
    with pytest.raises(ValueError, match="threshold"):
        controller.check(Knob("threshold", "compression"))
    with pytest.raises(ValueError, match="has no level"):
        controller.check(None)


@pytest.mark.parametrize("cls", [BandwidthAware, GainSearch])
def test_a_ladder_goes_from_least_compression_to_most(cls: Any) -> None:
    settings = {"step_seconds": 1.0} if cls is BandwidthAware else {}
    with pytest.raises(ValueError, match="from least compression to most"):
        cls(levels=(0.01, 0.1), **settings).check(Knob())
