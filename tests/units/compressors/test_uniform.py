"""Uniform sends the nearest level, as its formula in NumPy; its stochastic form is QSGD."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gc import QSGD, AllGather, AllGatherOrTwoShot, ErrorFeedback, NoMemory, Uniform
from lightning_gc.engine.compatibility import combine
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from tests.support.codecs import KINDS, apply, each_kind


def lost(codec: Uniform, x: Tensor) -> float:
    """Return ``‖x − C(x)‖² / ‖x‖²``."""
    _, left, _ = apply(codec, x)
    return float((left.astype(np.float64) ** 2).sum() / x.double().square().sum())


@each_kind
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_nearest_level(kind: str, norm: str) -> None:
    for bits, size in [*itertools.product((2, 3, 8, 9), (1, 7, 128)), (16, 1 << 24)]:
        codec = Uniform(bits, block_size=size, norm=norm)  # type: ignore[arg-type]
        sent, left, (codes, norms) = apply(codec, KINDS[kind])
        assert norms.numel() == math.ceil(300 / size)
        assert codes.numel() == 300 * (bits // 8) + math.ceil(300 * (bits % 8) / 8)
        for start in range(0, 300, size):
            part = slice(start, start + size)
            check_block(KINDS[kind][part].double().numpy(), sent[part], left[part], codec)


def check_block(block: np.ndarray, got: np.ndarray, left: np.ndarray, codec: Uniform) -> None:
    """Each element's level is the nearest, and the difference is left."""
    length = np.abs(block).max() if codec.norm == "max" else np.sqrt((block**2).sum())
    if length == 0:
        assert not got.any()
        return
    s, got = 2 ** (codec.bits - 1) - 1, got.astype(np.float64)
    grid = length / s * np.arange(-s, s + 1)
    after = np.searchsorted(grid, block).clip(1, 2 * s)  # grids are long: look at neighbours
    nearest = np.minimum(np.abs(block - grid[after - 1]), np.abs(block - grid[after]))
    ulp = 2.0**-20 * np.abs(block) + 2.0**-149
    assert (np.abs(np.abs(block - got) - nearest) <= ulp).all()
    assert (np.abs(left - (block - got)) <= ulp).all()
    assert (np.sign(got) * np.sign(block) >= 0).all()
    if codec.norm == "max":
        assert got[np.abs(block).argmax()] == block[np.abs(block).argmax()]


def test_halves_go_away_from_zero() -> None:
    x = torch.tensor([3.0, 0.5, -0.5, 1.5, -2.5, 0.49, 0.0])
    sent, _, _ = apply(Uniform(3), x)
    assert sent.tolist() == [3, 1, -1, 2, -3, 0, 0]


@pytest.mark.parametrize("arguments", [(4, 512, "max"), (9, 7, "l2"), (2, 1 << 24, "max")])
def test_stochastic_is_qsgd(arguments: tuple[int, int, str]) -> None:
    bits, size, norm = arguments
    ours = Uniform(bits, "stochastic", size, norm)  # type: ignore[arg-type]
    theirs = QSGD(bits, size, norm)  # type: ignore[arg-type]
    for kind, x in KINDS.items():
        one, other = (apply(codec, x, step=5, worker=2) for codec in (ours, theirs))
        assert all(torch.equal(a, b) for a, b in zip(one[2], other[2], strict=True)), kind
        np.testing.assert_array_equal(one[1], other[1])
    assert ours.bound(300) == theirs.bound(300)
    assert ours.traits == theirs.traits
    assert ours.wire(300) == theirs.wire(300)


def test_rounding_decides_on_the_memory() -> None:
    assert combine(Uniform())[1:] == (ErrorFeedback(), AllGatherOrTwoShot())
    assert combine(Uniform(rounding="stochastic"))[1:] == (NoMemory(), AllGatherOrTwoShot())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [2, 100, 4096])
def test_reaches_its_bound(bits: int, size: int) -> None:
    """One element on a level, the others just below or at the middle between 0 and the first."""
    s = 2 ** (bits - 1) - 1
    codec = Uniform(bits, block_size=size)
    allowed = 1 - codec.bound(size).delta  # type: ignore[union-attr]
    for middle in (0.5 / s, 0.5 / s * (1 - 1e-5)):
        x = torch.full((size,), middle)
        x[size // 2] = -1.0
        assert 0.99 * allowed < lost(codec, x) <= allowed
    assert codec.bound(1).delta == pytest.approx(1, abs=1e-9)  # type: ignore[union-attr]


def test_of_many_alike_the_length_leaves_nothing() -> None:
    """Why ``norm="l2"`` is for stochastic rounding: 4s² elements are each below half a level."""
    for bits in (2, 4, 6):
        s = 2 ** (bits - 1) - 1
        codec = Uniform(bits, block_size=1 << 20, norm="l2")
        many = torch.ones(4 * s * s + 1)
        assert lost(codec, many) == pytest.approx(1)
        assert codec.bound(many.numel()).delta == 0  # type: ignore[union-attr]
        assert lost(codec, many[: 3 * s * s]) < 1
        assert codec.bound(3 * s * s).delta > 0.2  # type: ignore[union-attr]
        assert lost(Uniform(bits, block_size=1 << 20), many) < 1e-12


def test_without_feedback_what_is_small_is_never_sent() -> None:
    """One large element sets the scale; the others are below half a level, at every step."""
    x = torch.full((100,), 0.001)
    x[0] = 1.0
    for memory, arrives in ((NoMemory(), False), (ErrorFeedback(), True)):
        alone = Lockstep(1, Uniform(8), memory)
        means = [alone.step([{"w": x}]).mean["w"] for _ in range(20)]
        assert bool(torch.stack(means)[:, 1:].any()) == arrives, memory
        assert all(mean[0] == 1 for mean in means)


def test_gathered_tensors_are_rounded_once() -> None:
    """So that the mean is that of both workers' nearest levels; the default rounds it again."""
    one, other = torch.tensor([1.0, 0.3, 0.0]), torch.tensor([0.0, 0.2, 1.0])
    codec = Uniform(2)  # levels -1, 0, 1
    mean = Lockstep(2, codec, scheme=AllGather()).step([{"w": one}, {"w": other}]).mean["w"]
    assert mean.tolist() == [0.5, 0.0, 0.5]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="use 'nearest', or 'stochastic'"):
        Uniform(rounding="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Uniform\(bits=17\)"):
        Uniform(17)
    with pytest.raises(ValueError, match=r"Uniform\(block_size=0\)"):
        Uniform(block_size=0)
    with pytest.raises(ValueError, match=r"Uniform\(norm='l1'\)"):
        Uniform(norm="l1")  # type: ignore[arg-type]


def test_equal_seeds_and_others_round_alike() -> None:
    x = cases.tensors(300)["normal"]
    first, second = (apply(Uniform(4), x, step=step, worker=step)[0] for step in (0, 9))
    np.testing.assert_array_equal(first, second)
