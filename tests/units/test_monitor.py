"""Figures of the monitor: per step, per epoch, and of levels."""

from typing import Any

import pytest

from lightning_gc import PerParameter, RandomK, TopK
from lightning_gc.controllers import Schedule
from lightning_gc.engine.compatibility import by_default
from lightning_gc.monitor.decisions import level_figures
from lightning_gc.monitor.totals import Totals
from lightning_gc.strategies.for_pytorch_lightning import CompressionMonitor, SimulatedDDPStrategy
from tests.support.fitting import fit, unwarned
from tests.support.models import Plain, common_batches


def test_averages_per_step_and_element() -> None:
    totals = Totals(
        steps=4, wire_bytes=800, dense_bytes=1600, elements=400, sent=40, payload_bytes=50, whole=80
    )
    figures = totals.averages(workers=2)
    assert figures == {
        "wire_bytes": 200,
        "dense_bytes": 400,
        "ratio": 2,
        "density": 0.25,  # (40 + 80) of 480
        "compressed_density": 0.1,
        "bits_per_element": 1,  # 400 bits for 400 elements, of which 40 are sent
    }


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_gradient_has_an_encoded_size_whoever_listens(workers: int) -> None:
    with unwarned():
        result = fit(
            SimulatedDDPStrategy(RandomK(0.1), workers=workers),
            Plain,
            lambda: common_batches(48, 4),
            callbacks=[CompressionMonitor()],
        )
    metrics = result["metrics"]
    sizes = [parameter.size for parameter in result["parameters"]]
    compressed = [by_default(RandomK(0.1)).compresses(p.shape) for p in result["parameters"]]
    sent = [round(0.1 * n) if ours else n for n, ours in zip(sizes, compressed, strict=True)]
    assert sorted(set(compressed)) == [False, True]
    assert metrics["compression_epoch/encoded_bytes"] == 4 * sum(sent)
    assert metrics["compression_epoch/encoding_ratio"] == pytest.approx(sum(sizes) / sum(sent))
    assert metrics["compression/total_encoded_bytes"] == 4 * sum(sent) * result["steps"]
    assert metrics["compression/total_encoding_ratio"] == pytest.approx(sum(sizes) / sum(sent))
    assert (metrics["compression/total_wire_bytes"] == 0) == (workers == 1)


def test_levels_in_figures() -> None:
    assert level_figures({}) == {}
    assert level_figures({"a": None}) == {"uncompressed_share": 1}
    figures = level_figures({"a": 0.1, "b": None, "c": 0.3, "d": 0.2})
    assert figures == {
        "uncompressed_share": 0.25,
        "level": 0.2,
        "level_min": 0.1,
        "level_max": 0.3,
    }


def test_an_epoch_and_a_step_are_counted_by_themselves() -> None:
    """Figures of the last epoch are of its level alone; a micro-batch is not a step."""
    monitor = CompressionMonitor()
    strategy = SimulatedDDPStrategy(
        PerParameter(TopK(0.5)), workers=2, controller=Schedule((0.5, 0.1))
    )
    settings: dict[str, Any] = {"max_epochs": 2, "callbacks": [monitor]}
    with unwarned():
        result = fit(strategy, Plain, lambda: common_batches(48, 4), **settings)
    assert result["steps"] == 12
    assert result["metrics"]["compression_epoch/density"] == pytest.approx(0.1, abs=0.01)
    total = monitor.state_dict()["total"]
    assert total["steps"] == 12
    assert total["sent"] / total["elements"] == pytest.approx(0.3, abs=0.01)
