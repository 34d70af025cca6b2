"""The outer step is torch's SGD; fragments and buffers do what the reference does by names."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_gc import QSGD, ErrorFeedback, Identity, OuterSGD, PerParameter, TopK
from lightning_gc.local_steps.common_weights import Fragment
from lightning_gc.testing import LocalLockstep

OUTER = (OuterSGD(), OuterSGD(0.5, 0.8), OuterSGD.diloco())
SHAPES = {"a": (17, 13), "b": (19,), "c": (), "d": (3, 2)}


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g).to(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("outer", OUTER, ids=str)
def test_it_is_torchs_sgd(outer: OuterSGD) -> None:
    ours, theirs = torch.ones(50), nn.Parameter(torch.ones(50))
    optimizer = torch.optim.SGD(
        [theirs], outer.lr, momentum=outer.momentum, nesterov=outer.nesterov
    )
    velocity = torch.zeros(50)
    for step in range(5):
        mean = torch.randn(50, generator=torch.Generator().manual_seed(step))
        before = mean.clone()
        outer.step(ours, velocity if outer.momentum else None, mean)
        assert torch.equal(mean, before)
        theirs.grad = mean
        optimizer.step()
    torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": 0.0}, "above 0; use 1.0"),
        ({"lr": float("inf")}, "above 0"),
        ({"momentum": 1.0}, r"in \[0, 1\)"),
        ({"nesterov": True}, "needs momentum"),
        ({"lr": "0.7"}, "write 0.7, without quotes"),
    ],
)
def test_values_that_cannot_be(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        OuterSGD(**settings)


def test_diloco_is_the_algorithm_of_the_paper() -> None:
    """In NumPy and float64: mean of the differences, Nesterov momentum 0.9, rate 0.7."""
    lockstep = LocalLockstep(3, drawn(0), PerParameter(Identity()), outer=OuterSGD.diloco())
    theta = {n: t.double().numpy() for n, t in drawn(0).items()}
    velocity = {n: np.zeros_like(t) for n, t in theta.items()}
    for step in range(1, 20):
        moves = [drawn(100 * step + worker) for worker in range(3)]
        own = [{n: lockstep.weights[n] - 0.1 * move[n] for n in SHAPES} for move in moves]
        done = lockstep.round(own)
        for n in SHAPES:
            delta = np.mean([0.1 * move[n].double().numpy() for move in moves], 0)
            velocity[n] = 0.9 * velocity[n] + delta
            theta[n] = theta[n] - 0.7 * (delta + 0.9 * velocity[n])
            np.testing.assert_allclose(done.weights[n].numpy(), theta[n], atol=2e-6)


@pytest.mark.parametrize("outer", OUTER, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fragment_is_the_reference_in_one_flat_tensor(
    outer: OuterSGD, dtype: torch.dtype
) -> None:
    """Bit for bit, for a worker alone that sends everything."""
    params = {n: nn.Parameter(t) for n, t in drawn(0, dtype).items()}
    fragment = Fragment(params, outer)
    alone = LocalLockstep(1, params, PerParameter(Identity()), outer=outer)
    for step in range(6):
        for name, move in drawn(step + 1, dtype).items():
            params[name].data.sub_(0.01 * move)
        done = alone.round([params])
        fragment.step(fragment.distance())
        fragment.put(fragment.anchor)
        for name, kept in fragment.named(fragment.anchor).items():
            assert torch.equal(kept, done.weights[name]), name
            assert torch.equal(params[name].detach(), done.weights[name].to(dtype)), name


def test_where_nothing_has_moved_nothing_is_sent() -> None:
    """Also of weights in half precision, whose common values are finer than they are."""
    params = {n: nn.Parameter(t) for n, t in drawn(0, torch.bfloat16).items()}
    fragment = Fragment(params, OuterSGD())
    fragment.step(torch.full_like(fragment.anchor, 1e-4))
    fragment.put(fragment.anchor)
    fine = fragment.anchor.clone()
    assert not torch.equal(fine, fragment.weights())
    assert not fragment.distance().any()
    fragment.step(fragment.distance())
    assert torch.equal(fragment.anchor, fine)


def test_a_lost_round_changes_neither_weights_nor_errors() -> None:
    """One worker's weight is NaN; the next round is as if that one had not been."""
    two, other = (
        LocalLockstep(2, drawn(0), PerParameter(TopK(0.1)), ErrorFeedback()) for _ in range(2)
    )

    def moved(of: LocalLockstep, step: int) -> list[dict[str, torch.Tensor]]:
        moves = [drawn(10 * step + worker) for worker in range(2)]
        return [{n: of.weights[n] - move[n] for n in SHAPES} for move in moves]

    for both in (two, other):
        both.round(moved(both, 1))
    before = {n: t.clone() for n, t in two.weights.items()}
    bad = moved(two, 2)
    bad[1]["a"][3, 3] = float("nan")
    lost = two.round(bad)
    assert lost.lost
    assert all(torch.equal(lost.weights[n], before[n]) for n in SHAPES)
    for engine, fresh in zip(two.engines, other.engines, strict=True):
        for name, error in engine.errors().items():
            assert torch.equal(error, fresh.errors()[name]), name
    after, straight = two.round(moved(two, 3)), other.round(moved(other, 3))
    assert not after.lost
    assert all(torch.equal(after.weights[n], straight.weights[n]) for n in SHAPES)


def test_each_worker_draws_for_itself_and_all_get_the_same() -> None:
    """``Lockstep`` raises where the bits differ."""
    three = LocalLockstep(3, drawn(0), PerParameter(QSGD(2)), ErrorFeedback(decay=0.5))
    done = three.round([drawn(worker) for worker in range(3)])
    assert len({float(error["a"].sum()) for error in done.errors}) == 3
