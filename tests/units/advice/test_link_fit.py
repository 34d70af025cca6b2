"""The fit finds the link that made the seconds, with and without a knee and noise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gc.advice.link_probe import SIZES
from lightning_gc.controllers import ExchangeRecord
from lightning_gc.transports.link import NOMINAL, Link, at_rate, fit_with_knee
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
    found = at_rate({"Mean": one, "Gather": other}, 1.0)
    assert found == {"Mean": Link(NOMINAL, 50.0), "Gather": Link(NOMINAL, 70.0)}


def test_a_link_as_quick_with_any_size_has_some_rate() -> None:
    found = fit_with_knee([ExchangeRecord(2, 8, 1e-4), ExchangeRecord(2, 1 << 20, 1e-4)])
    assert found.gbps > 0
    assert found.latency_us == pytest.approx(50)
