"""Statistics collected for controllers match sums made by hand."""

import gc
import math

import numpy as np
import pytest
import torch

from lightning_gc import ErrorFeedback, TopK
from lightning_gc.compressors.wrappers.per_parameter import layerwise
from lightning_gc.engine import Engine
from lightning_gc.engine.statistics import EpochStatistics
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


def test_moments_of_a_long_epoch_take_no_more_memory() -> None:
    engine = Engine(layerwise(TopK(0.5)))
    engine.statistics.epoch = EpochStatistics(moments=True)

    def live() -> int:
        gc.collect()  # what other tests have left
        return sum(type(each) is torch.Tensor for each in gc.get_objects())

    counts = set()
    for value in range(1, 11):
        step_alone(engine, w=torch.tensor([float(value)]))
        counts.add(live() if value > 5 else 0)
    assert len(counts) == 2
    assert engine.statistics.epoch.squares() == 385.0


def test_total_error_is_the_sum_of_squares() -> None:
    engine = Engine(layerwise(TopK(0.25)))
    engine.statistics.epoch = EpochStatistics(errors=True)
    expected = 0.0
    for step in range(5):
        step_alone(engine, w=torch.randn(8, generator=cases.generator(step)))
        expected += float((engine.errors()["w"].numpy().astype(np.float64) ** 2).sum())
    engine.statistics.epoch.end_epoch()  # which it outlives
    assert engine.statistics.epoch.total_error == pytest.approx(expected)


def test_squares_of_a_large_tensor_are_those_of_float64() -> None:
    """In one float32 sum, torch's are off by 3e-4 at this size."""
    engine = Engine(layerwise(TopK(0.001)))
    engine.statistics.epoch = epoch = EpochStatistics(moments=True, errors=True, scale=True)
    gradient = torch.randn(5_000_000, generator=cases.generator(0))
    step_alone(engine, w=gradient.clone(), b=torch.ones(3))
    error = engine.errors()["w"].double().square().sum()
    assert epoch.total_error == pytest.approx(float(error), rel=1e-6)
    squared = pytest.approx(float(gradient.double().square().sum()) + 3, rel=1e-6)
    assert epoch.squares() == squared
    assert epoch.squared_gradients == squared


@pytest.mark.parametrize("lr_aware", [False, True])
def test_total_error_in_units_of_the_update(lr_aware: bool) -> None:
    """Σ γ_t²·‖e_t‖² by NumPy, where learning rates change and differ between parameters.

    With ``lr_aware`` that is the sum of squared errors of the paper's Algorithm 1, whose errors
    have the update's units.
    """
    engine = Engine(layerwise(TopK(0.25)), ErrorFeedback(lr_aware=lr_aware))
    engine.statistics.epoch = EpochStatistics(errors=True)
    numpy = {name: np.zeros(8) for name in "abc"}  # errors, times the rate if lr_aware
    plain = update = 0.0
    for step, rate in enumerate((0.5, 0.1, 0.1, 2.0)):
        rates = {"a": rate, "b": rate, "c": 0.01}
        engine.learning_rates.now = rates
        draw = np.random.default_rng(step)
        made = {name: draw.standard_normal(8) for name in "abc"}
        step_alone(engine, **{n: torch.tensor(g, dtype=torch.float32) for n, g in made.items()})
        for name, grad in made.items():
            unit = rates[name] if lr_aware else 1.0
            whole = numpy[name] + unit * grad
            whole[np.argsort(np.abs(whole))[-2:]] = 0  # the two of eight that are sent
            numpy[name] = whole
            plain += np.square(whole / unit).sum()
            update += np.square(whole / unit * rates[name]).sum()
    assert engine.statistics.epoch.total_error == pytest.approx(plain, rel=1e-5)
    assert engine.statistics.epoch.total_error_update == pytest.approx(update, rel=1e-5)


def test_parameters_of_no_known_rate_add_nothing_to_the_updates_error() -> None:
    engine = Engine(layerwise(TopK(0.5)))
    engine.statistics.epoch = EpochStatistics(errors=True)
    step_alone(engine, w=torch.tensor([1.0, 2.0]))
    assert engine.statistics.epoch.total_error == 1.0
    assert engine.statistics.epoch.total_error_update == 0.0


def test_both_total_errors_go_on_from_a_state() -> None:
    kept = EpochStatistics(errors=True)
    state = EpochStatistics().own_state() | {"total_error": 2.5, "total_error_update": 0.5}
    kept.load_own_state(state)
    assert (kept.total_error, kept.total_error_update) == (2.5, 0.5)
    assert kept.own_state()["total_error_update"] == 0.5


def test_moments_need_the_whole_epoch() -> None:
    with pytest.raises(ValueError, match="of the whole epoch"):
        EpochStatistics("first batch", moments=True)
