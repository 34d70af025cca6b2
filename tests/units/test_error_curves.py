"""Error curves: errors as NumPy finds them, bytes as sent; nothing is changed by drawing them."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gc import QSGD, GradiVeQ, PowerSGD, TopK
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.per_parameter import by_default
from lightning_gc.control.control_loop import ControlLoop, Moment
from lightning_gc.control.probes import error_curves
from lightning_gc.controllers import LayerBudget, Needs, Observation
from lightning_gc.engine import Engine
from lightning_gc.exchange.peers import Peers
from tests.support.controlled_workers import CPU, Listens, Training

DENSITIES = (0.01, 0.1, 0.5)


def gradient(rows: int = 40, columns: int = 64, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return draw.standard_normal((rows, columns)).astype(np.float32) * draw.gamma(1, 1, (rows, 1))


def curve(compressor: Any, x: np.ndarray, levels: tuple[float, ...]) -> Any:
    given = torch.from_numpy(x.astype(np.float32))
    before = given.clone()
    engine = Engine(by_default(compressor))
    (found,) = error_curves(engine, {"w": given}, levels).values()
    assert torch.equal(given, before)
    assert not engine.buffers.named
    assert not engine.compressor_state
    assert found.norm == pytest.approx(np.linalg.norm(x), rel=1e-5)
    assert [point.level for point in found.points] == list(levels)
    return found


def test_top_k_as_numpy_cuts() -> None:
    x = gradient()
    found = curve(TopK(0.01), x, DENSITIES)
    sizes = np.sort(np.abs(x).ravel())
    for point in found.points:
        left = sizes[: x.size - round(point.level * x.size)]
        assert point.error == pytest.approx(np.linalg.norm(left), rel=1e-4)
        assert point.nbytes >= 4 * round(point.level * x.size)


def test_a_low_rank_is_near_the_best_one() -> None:
    x = gradient()
    found = curve(PowerSGD(2), x, (1, 4, 8))
    singular = np.linalg.svd(x, compute_uv=False)
    for point in found.points:
        least = np.linalg.norm(singular[int(point.level) :])
        assert least * 0.999 <= point.error <= 1.25 * least
        assert point.nbytes == 4 * int(point.level) * sum(x.shape)


@pytest.mark.parametrize(
    "compressor",
    [PowerSGD(4, dense_steps=1000), GradiVeQ(4, 64, every=100, dense_steps=10)],
    ids=repr,
)
def test_steps_that_send_everything_are_left_out(compressor: Compressor) -> None:
    engine = Engine(by_default(compressor))
    for step in (0, 5, 100, 199):
        engine.reset(step)
        given = {"w": torch.from_numpy(gradient(64, 64))}
        (found,) = error_curves(engine, given, (1, 4)).values()
        assert found.points[0].error > found.points[1].error > 0
        assert found.points[0].nbytes < found.points[1].nbytes < 4 * 64 * 64


def test_bits() -> None:
    found = curve(QSGD(4), gradient(), (2, 4, 8))
    errors, sizes = ([point[i] for point in found.points] for i in (1, 2))
    assert errors == sorted(errors, reverse=True)
    assert sizes == sorted(sizes)


def test_small_tensors_and_what_is_not_finite_have_none() -> None:
    tensors = {
        "w": torch.ones(64, 64),
        "bias": torch.ones(64),
        "broken": torch.full((64, 64), float("nan")),
    }
    assert set(error_curves(Engine(by_default(TopK(0.1))), tensors, (0.1,))) == {"w"}


def test_one_threshold_is_the_optimum_of_sparsifiers() -> None:
    """At one threshold's error no plan of densities sends fewer elements; a plan comes near."""
    tensors = {f"w{i}": gradient(seed=i) * 10.0**-i for i in range(4)}
    everything = np.concatenate([t.ravel() for t in tensors.values()])
    densities = tuple(10 ** (-3 + 3 * i / 40) for i in range(41))
    engine = Engine(by_default(TopK(0.01)))
    named = {n: torch.from_numpy(t.astype(np.float32)) for n, t in tensors.items()}
    found = error_curves(engine, named, densities)
    reference = densities[20]
    budget = LayerBudget(reference, densities)
    decision, _ = budget.decide(Observation(0, error_curves=found), budget.init())
    levels = {n: decision.levels.get(n) or reference for n in tensors}
    kept = sum(round(levels[n] * t.size) for n, t in tensors.items())
    allowed = sum(point.error**2 for c in found.values() for point in c.points
                  if point.level == reference)  # fmt: skip
    squares = np.sort(everything.astype(np.float64) ** 2)
    least = everything.size - np.searchsorted(np.cumsum(squares), allowed * (1 + 1e-6), "right")
    uniform = sum(round(reference * t.size) for t in tensors.values())
    assert least <= kept < uniform


class Asks(Listens):
    """Wants curves of the epoch's gradients."""

    needs = Needs(curves=DENSITIES)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_controller_is_told_curves_of_the_sum_of_an_epoch(workers: int) -> None:
    training, controller = Training(workers, TopK(0.1), 4096), Asks()
    training.workers.names = {torch.nn.Parameter(torch.zeros(64, 64)): "w"}
    control = ControlLoop(controller, training.workers)
    control.attach()
    peers = Peers(True, CPU, mean=lambda tensor: tensor)
    decide = partial(control.decide, optimizers=[training.sgd], moment=lambda: Moment({}))
    draw, summed = np.random.default_rng(0), np.zeros(4096)
    decide(0, peers=peers)
    for _ in range(3):
        made = draw.standard_normal((workers, 4096))
        summed += made[0]
        training.step(made)
    decide(1, peers=peers)
    before, after = controller.told
    assert before.error_curves == {}
    assert after.error_curves["w"].norm == pytest.approx(np.linalg.norm(summed), rel=1e-5)
    assert [point.level for point in after.error_curves["w"].points] == list(DENSITIES)
    assert after.gradient_norms == {}  # not declared
    assert after.levels == {"w": 0.1}


def test_curves_and_first_batches_are_not_both_kept() -> None:
    with pytest.raises(ValueError, match="the first batch's gradients are"):
        Needs(gradients="first batch", curves=(0.1,))
    both = Needs(curves=(0.1, 0.5)) | Needs(curves=(0.5, 1.0), seconds=True)
    assert (both.curves, both.seconds, both.sums) == ((0.1, 0.5, 1.0), True, "epoch sum")


def test_a_level_outside_the_range_is_clamped_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="an error curve is outside"):
        error_curves(Engine(by_default(TopK(0.1))), {"w": torch.ones(64, 64)}, (2.0,))
