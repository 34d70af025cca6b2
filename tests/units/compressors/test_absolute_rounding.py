"""AbsoluteRounding is its formula in NumPy; its error does not grow with what is rounded."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gc import (
    AbsoluteRounding,
    AllGather,
    AllGatherOrTwoShot,
    ErrorFeedback,
    HardThreshold,
    NoMemory,
)
from lightning_gc.core.flow import Payload
from lightning_gc.engine.compatibility import combine
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from tests.support.codecs import KINDS, apply, each_kind
from tests.units.test_golomb_rice import read

STEPS = (1e-9, 1e-3, 0.03, 0.3, 1.0, 30.0, 1e3)


def nbytes(payload: Payload) -> int:
    return sum(t.numel() * t.element_size() for t in payload)


@each_kind
@pytest.mark.parametrize("step", STEPS)
def test_neighbouring_multiples(kind: str, step: float) -> None:
    """With the same numbers u, in NumPy; beyond a limit an element is sent as it is."""
    x, unit = KINDS[kind].numpy(), float(np.float32(step))
    sent, left, payload = apply(AbsoluteRounding(step), KINDS[kind], step=3)
    seed = cases.bucket_of(KINDS[kind], step=3, workers=8).generator(shared=False).initial_seed()
    u = np.random.Generator(np.random.SFC64(seed)).random(300)
    as_it_is = np.zeros(300, bool)
    as_it_is[payload_positions(payload)] = True
    np.testing.assert_array_equal(sent[as_it_is], x[as_it_is])
    levels = np.floor(x.astype(np.float64) / unit + u)[~as_it_is]
    np.testing.assert_array_equal(sent[~as_it_is], levels.astype(np.float32) * np.float32(unit))
    limit = np.abs(x[as_it_is]).min(initial=np.inf) / unit
    assert (np.abs(x[~as_it_is]) / unit < limit).all()
    assert limit >= 16
    np.testing.assert_array_equal(left, x - sent)
    assert AbsoluteRounding(step).sent(payload, 300) == np.count_nonzero(sent)


def payload_positions(payload: Payload) -> np.ndarray:
    from lightning_gc.core import elias_fano

    return elias_fano.decode(payload[1], payload[0].numel(), 300).numpy()


def test_what_is_on_the_wire() -> None:
    """Read by a decoder of its own, bit by bit."""
    x = torch.zeros(100)
    x[[2, 3, 40, 97]] = torch.tensor([1.0, -2.0, 5.0, -1.0])
    _, _, payload = apply(AbsoluteRounding(1.0), x)
    values, positions, gaps, low_parts, high_parts, signs, last = payload
    assert values.numel() == positions.numel() == signs.numel() == 0
    assert last.tolist() == [0, 1, 0, 1]
    low = low_parts.numel()  # of four levels: a byte for each bit
    assert low == 1  # the median magnitude is 2, as a power of two
    assert [n + 1 for n in read(low_parts, high_parts, 4, low)] == [1, 2, 5, 1]
    gap_low = 4  # the mean gap is 24
    assert read(gaps[:gap_low], gaps[gap_low:], 4, gap_low) == [2, 0, 36, 56]


@pytest.mark.slow
@pytest.mark.parametrize("far", [15.9, 16.1, 1e6])
def test_unbiased_on_either_side_of_the_limit(far: float) -> None:
    """What is sent as it is must not depend on what was drawn."""
    x = torch.full((64,), 0.3)
    x[::8] = far
    codec = AbsoluteRounding(1.0)

    def draw(step: int) -> Tensor:
        return torch.from_numpy(apply(codec, x, step)[0])

    assert cases.unbiased(draw, x, 250)
    counts = {apply(codec, x, step)[2][0].numel() for step in range(20)}
    assert counts == {0 if far < 16 else 8}


def test_many_steps_are_drawn_in_double_precision() -> None:
    """Of 15,000 steps single precision has fractions of 1/1,024 only."""
    x = torch.linspace(15_000, 15_100, 100_000)
    sent, _, payload = apply(AbsoluteRounding(1.0), x)
    assert payload[0].numel() == 0
    seed = cases.bucket_of(x, workers=8).generator(shared=False).initial_seed()
    u = np.random.Generator(np.random.SFC64(seed)).random(100_000)
    np.testing.assert_array_equal(sent, np.floor(x.double().numpy() + u))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e6])
def test_its_error_does_not_grow_with_the_tensor(scale: float) -> None:
    x = KINDS["Student t, 2 degrees"] * scale
    codec = AbsoluteRounding(0.5)
    left = np.stack([apply(codec, x, step)[1].astype(np.float64) for step in range(40)])
    assert (np.abs(left) < 0.5).all()
    assert (left**2).sum(1).mean() <= codec.bound(300).allowed(0.0)
    assert codec.bound(300).v == pytest.approx(HardThreshold(0.25).bound(300).v, rel=0.01)


def test_reaches_its_bound() -> None:
    x = torch.arange(1, 300) + 0.5
    _, left, _ = apply(AbsoluteRounding(1.0), x)
    assert np.abs(left) == pytest.approx(0.5)
    assert (left**2).sum() > 0.98 * AbsoluteRounding(1.0).bound(299).allowed(0.0)


def test_no_more_bits_than_promised() -> None:
    """However small the step, or far apart the elements; and near the entropy."""
    numel = 100_000
    normal = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    powers = 2.0 ** (torch.arange(numel) % 40)
    alternating = torch.where(torch.arange(numel) % 2 == 0, 15.0, 1.0)
    for x in (normal, powers, alternating, torch.ones(numel) * 1e30):
        for step in STEPS:
            taken = nbytes(apply(AbsoluteRounding(step), x)[2])
            assert 8 * taken <= 35 * numel
    for spread, most in ((10, 6.4), (1, 2.5), (0.1, 0.6), (0.01, 0.09)):
        taken = nbytes(apply(AbsoluteRounding(1 / spread), normal)[2])
        assert 8 * taken < most * numel


@pytest.mark.slow
def test_over_many_steps_errors_are_those_of_one() -> None:
    """With feedback; without, they add up as a random walk does."""
    x, rounds = torch.full((200,), 0.3), 100
    gaps = {}
    for memory in (ErrorFeedback(), NoMemory()):
        two = Lockstep(2, AbsoluteRounding(1.0), memory, AllGather())
        sums = torch.zeros(200)
        for _ in range(rounds):
            result = two.step([{"w": x}, {"w": -0.5 * x}])
            sums += result.mean["w"]
            assert all((error["w"].abs() < 1).all() for error in result.errors)
        gaps[memory] = (sums - 0.25 * x * rounds).abs().max()
    assert gaps[ErrorFeedback()] < 1 < 3 < gaps[NoMemory()]


@pytest.mark.slow
def test_under_two_shot_mean_errors_are_two_steps_at_most() -> None:
    three = Lockstep(3, AbsoluteRounding(1.0))
    for step in range(20):
        made = [{"w": torch.randn(99, generator=cases.generator(9 * step + i))} for i in range(3)]
        errors = torch.stack([error["w"] for error in three.step(made).errors])
        assert (errors.mean(0).abs() < 2).all()
    assert (errors.abs() > 1).any()


def test_at_the_ends_of_the_range() -> None:
    """Nothing overflows: what is near the largest number is sent as it is."""
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([largest, -largest, 1e38, 2e38, 1e-45, 0.0, 1e37])
    for step in (1e-37, 1e-9, 1e37, 1e38):
        sent, left, _ = apply(AbsoluteRounding(step), x)
        assert np.isfinite(sent).all()
        assert (np.abs(left) <= step).all()
    for bad in (math.nan, math.inf, -math.inf):
        x[3] = bad
        sent, left, _ = apply(AbsoluteRounding(0.1), x)
        np.testing.assert_array_equal(sent[3], bad)


def test_double_precision() -> None:
    x = KINDS["Student t, 2 degrees"].double() * (1 + 2.0**-30)
    sent, left, _ = apply(AbsoluteRounding(0.1), x)
    np.testing.assert_allclose(sent + left, x.numpy(), rtol=1e-12)


def test_defaults_and_refusals() -> None:
    assert combine(AbsoluteRounding())[1:] == (ErrorFeedback(), AllGatherOrTwoShot())
    for step in (0.0, -1.0, math.nan, math.inf, 1e-40):
        with pytest.raises(ValueError, match=r"to whose multiples .*; use 0\.01"):
            AbsoluteRounding(step)
    _, _, payload = apply(AbsoluteRounding(0.1), KINDS["normal"])
    damaged = list(payload)
    damaged[3] = damaged[3][:-1]
    with pytest.raises(ValueError, match="their lengths should be"):
        AbsoluteRounding(0.1).decode(
            tuple(damaged), torch.zeros(300), 1.0, cases.bucket_of(KINDS["normal"])
        )
