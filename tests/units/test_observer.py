"""Statistics collected for controllers match sums made by hand."""

import math

import numpy as np
import pytest
import torch

from lightning_gc import TopK
from lightning_gc.compressors.wrappers.per_parameter import layerwise
from lightning_gc.engine import Engine
from lightning_gc.engine.epoch_statistics import EpochStatistics
from lightning_gc.testing.contracts import cases
from tests.support.engines import step_alone


def test_norm_of_the_sum_not_sum_of_norms() -> None:
    engine = Engine(layerwise(TopK(0.5)))
    engine.statistics.epoch = EpochStatistics("epoch sum")
    step_alone(engine, w=torch.tensor([3.0, 0.0]), b=torch.tensor([1.0]))
    step_alone(engine, b=torch.tensor([-1.0]), w=torch.tensor([0.0, 4.0]))  # another layout
    assert engine.statistics.epoch.norms() == {"w": 5.0, "b": 0.0}
    engine.statistics.epoch.end_epoch()
    step_alone(engine, w=torch.tensor([1.0, 0.0]), b=torch.tensor([2.0]))
    assert engine.statistics.epoch.norms() == {"w": 1.0, "b": 2.0}


def test_first_batch_only() -> None:
    engine = Engine(layerwise(TopK(0.5)))
    engine.statistics.epoch = EpochStatistics("first batch")
    for value in (2.0, 7.0):
        step_alone(engine, w=torch.tensor([value]))
    assert engine.statistics.epoch.norms() == {"w": 2.0}


def test_gradients_are_unscaled_and_finite() -> None:
    engine = Engine(layerwise(TopK(0.5)))
    engine.statistics.epoch = EpochStatistics("epoch sum")
    engine.loss_scaling.scale = torch.tensor(1024.0)
    step_alone(engine, w=torch.tensor([1024.0, 2048.0]))
    step_alone(engine, w=torch.tensor([float("inf"), 0.0]))
    assert engine.statistics.epoch.norms()["w"] == pytest.approx(math.sqrt(5))


def test_total_error_is_the_sum_of_squares() -> None:
    engine = Engine(layerwise(TopK(0.25)))
    engine.statistics.epoch = EpochStatistics(errors=True)
    expected = 0.0
    for step in range(5):
        step_alone(engine, w=torch.randn(8, generator=cases.generator(step)))
        expected += float((engine.errors()["w"].numpy().astype(np.float64) ** 2).sum())
    engine.statistics.epoch.end_epoch()  # which it outlives
    assert engine.statistics.epoch.total_error == pytest.approx(expected)


def test_moments_need_the_whole_epoch() -> None:
    with pytest.raises(ValueError, match="of the whole epoch"):
        EpochStatistics("first batch", moments=True)
