"""The fit finds the link that made the seconds, with and without a knee and noise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gc.advice.link_probe import SIZES
from lightning_gc.controllers import ExchangeRecord
from lightning_gc.transports.link import (
    NOMINAL,
    Link,
    alike,
    at_rate,
    fit_with_knee,
    with_directions,
)
from tests.support.replay import patient


def probes(link: Link, workers: int = 2, noise: float = 0.0) -> list[ExchangeRecord]:
    """What a link would have shown; noise alternates."""
    found = []
    for i, size in enumerate(SIZES):
        messages, nbytes = 2.0 * (workers - 1), 2.0 * (workers - 1) * size / workers
        seconds = link.seconds(messages, nbytes) * (1 + noise * (-1) ** i)
        found.append(ExchangeRecord(messages, nbytes, seconds))
    return found


@patient
@given(st.floats(0.01, 40), st.floats(5, 40_000), st.sampled_from([2, 4]))
def test_exact_without_noise(gbps: float, latency_us: float, workers: int) -> None:
    true = Link(gbps, latency_us)
    found = fit_with_knee(probes(true, workers))
    assert found.gbps == pytest.approx(gbps, rel=0.01)
    assert found.latency_us == pytest.approx(latency_us, rel=0.02, abs=1)


@patient
@given(st.sampled_from([0.05, 0.2, 1.0]), st.sampled_from([0, 2]), st.floats(-0.03, 0.03))
def test_a_shaped_link_with_a_burst(gbps: float, delay_ms: int, noise: float) -> None:
    """A shaper lets 128 KiB pass at once; held to what the issue accepts."""
    true = Link(gbps, 50 + 1e3 * delay_ms, knee_bytes=131_072)
    found = fit_with_knee(probes(true, noise=noise))
    assert found.gbps == pytest.approx(gbps, rel=0.05)
    assert abs(found.latency_us - true.latency_us) <= max(0.2 * true.latency_us, 50)
    for each in probes(true, noise=noise):
        assert found.seconds(each.messages, each.nbytes) == pytest.approx(each.seconds, rel=0.25)


def test_another_rate_keeps_the_latency() -> None:
    one, other = Link(8.0, 50.0, 1000.0), Link(6.0, 70.0)
    found = at_rate({"Mean": one, "Gather": other}, Link(1.0, 0.0))
    assert found == {"Mean": Link(NOMINAL, 50.0), "Gather": Link(NOMINAL, 70.0)}


def test_a_link_as_quick_with_any_size_has_some_rate() -> None:
    found = fit_with_knee([ExchangeRecord(2, 8, 1e-4), ExchangeRecord(2, 1 << 20, 1e-4)])
    assert found.gbps > 0
    assert found.latency_us == pytest.approx(50)


def test_each_direction_has_its_own_rate() -> None:
    """A byte a second up, and ten down; what is slower counts, as both run at the same time."""
    link = Link(8e-9, 1e6, knee_bytes=10.0, down_gbps=8e-8)
    assert link.seconds(1, 110, 110) == pytest.approx(1 + 100)
    assert link.seconds(1, 20, 310) == pytest.approx(1 + 30)
    assert link.seconds(1, 60, 310) == pytest.approx(1 + 50)
    assert link.seconds(0, 110) == link.seconds(0, 110, 110)
    assert str(Link(0.02, 0.0, down_gbps=1.0)) == "20 Mbit/s up, 1 Gbit/s down"
    assert str(Link(0.02, 0.0, down_gbps=0.02)) == "20 Mbit/s"
    assert link.times(2).seconds(0, 20, 310) == pytest.approx(15)
    found = at_rate(alike(Link(1.0, 50.0)), Link(1.0, 7.0, down_gbps=2.0))
    assert found["Mean"] == Link(NOMINAL, 50.0, down_gbps=2 * NOMINAL)


def test_the_fit_is_the_slower_directions() -> None:
    fitted = alike(Link(0.02, 50.0, 1000.0))
    faster = with_directions(fitted, 0.019, 0.19)["Mean"]
    assert [faster.gbps, faster.down_gbps] == pytest.approx([0.02, 0.2])
    faster = with_directions(fitted, 0.19, 0.019)["Mean"]
    assert [faster.gbps, faster.down_gbps] == pytest.approx([0.2, 0.02])
    assert with_directions(fitted, 0.02, 0.025) == fitted, "noise"
