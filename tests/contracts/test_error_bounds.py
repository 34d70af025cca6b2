"""Compressors keep the error bounds they declare, on random and on 50 adversarial tensors."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from lightning_gc.compressors import Codec, Collective, Compressor
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.compressor import exchanged
from tests.support.instances import ALL, each_instance

RANDOM, DRAWS = 1000, 32
SIZES = (1, 2, 3, 7, 16, 33, 64, 100, 257)


def random_tensors() -> Iterator[Tensor]:
    """Normal, Laplace, Student t and sparse ones, of magnitudes from 1e-20 to 1e20."""
    g = torch.Generator().manual_seed(11)
    for number in range(RANDOM):
        numel = SIZES[number % len(SIZES)]
        normal = torch.randn(numel, generator=g)
        uniform = torch.rand(numel, generator=g)
        kinds = (
            normal,
            normal.sign() * -uniform.clamp_min(1e-9).log(),
            normal / torch.randn(2, numel, generator=g).norm(dim=0).clamp_min(1e-6),
            normal * (uniform < 0.1),
        )
        scale = 10.0 ** (40 * float(torch.rand((), generator=g)) - 20)
        yield kinds[number % 4] * scale


def adversarial_tensors() -> list[Tensor]:
    """What methods round, split, clip and estimate worst."""
    n = 128
    ramp = torch.linspace(-1, 1, n)
    steps = torch.arange(n, dtype=torch.float32)
    one = torch.zeros(n)
    one[77] = 1.0
    largest = torch.finfo(torch.float32).max
    shapes: list[Tensor] = [
        one,
        -one,
        torch.ones(n),
        -torch.ones(n),
        ramp,
        ramp.abs(),
        ramp**9,
        (-1.0) ** steps,
        (-1.0) ** steps * (1 + 1e-6 * steps),
        2.0**-steps,
        2.0 ** -(steps / 4),
        1 / (1 + steps),
        1 / (1 + steps) ** 0.5,
        torch.where(steps < 64, 1.0, 1e-3),
        torch.where(steps < 1, 1.0, 1e-3),
        torch.where(steps < 1, 1.0, 0.5),
        torch.where(steps < 1, 1.0, 0.49999),
        torch.where(steps < 1, 1.0, 0.25),
        torch.where(steps < 127, 1.0, 100.0),
        torch.where(steps % 2 == 0, 1.0, 0.0),
        torch.where(steps % 10 == 0, 5.0, 0.01),
        torch.full((n,), 1.5),  # the middle between two powers of two
        1.5 * 2.0 ** (steps % 5),
        torch.where(steps < 1, 7.0, 0.5),  # the middle between levels of 4 bits
        torch.where(steps < 1, 7.0, 3.5),
        torch.where(steps < 1, 127.0, 0.5),
        torch.where(steps < 1, 1.0, 0.0883),  # s / (s + √(s² + d − 1)) of 2 bits
        torch.cat([torch.full((64,), 3.0), torch.full((64,), -0.1)]),
        torch.cat([torch.full((127,), -0.1), torch.tensor([3.0])]),
        torch.ones(1),
        -torch.ones(1),
        torch.tensor([1.0, -1.0]),
        torch.tensor([1.0, 1e-20]),
        torch.full((n,), 0.7) + 1e-7 * steps,
        torch.ones(n) * 1000 + ramp,
        torch.sin(steps),
        torch.sin(steps) ** 15,
        torch.exp(ramp * 20),
    ]
    shapes += [ramp * 1e-30, ramp * 1e30, one * 1e-38, torch.ones(n) * 1e-40, one * 1e30]
    shapes += [shape * 3e-15 for shape in (ramp, 2.0**-steps, (-1.0) ** steps)]
    shapes += [torch.where(steps < 1, 1e30, 1e-30), torch.where(steps < 64, 1e15, -1e-15)]
    shapes += [ramp * largest / 1e9, torch.zeros(n)]
    assert len(shapes) == 50
    return shapes


def errors_of(compressor: Compressor) -> Callable[[Tensor, int], float]:
    """Return a function of tensor and step: ``‖x − C(x)‖²`` of one draw."""

    def coded(x: Tensor, step: int) -> float:
        assert isinstance(compressor, Codec)
        buffer = x.clone()
        compressor.encode(buffer, cases.bucket_of(x, step=step))
        return float(buffer.double().square().sum())

    def conversed(x: Tensor, step: int) -> float:
        _, (left,) = exchanged(compressor, [matrix(x)], seed=step)
        return float(left.double().square().sum())

    return coded if isinstance(compressor, Codec) else conversed


def matrix(x: Tensor) -> Tensor:
    """Return a tensor's elements as nearly a square: methods of low rank send vectors whole."""
    rows = next(r for r in range(math.isqrt(x.numel()), 0, -1) if x.numel() % r == 0)
    return x.view(rows, -1)


@pytest.mark.parametrize(
    "compressor", [c for c in ALL if isinstance(c.method, Collective)], ids=cases.label
)
def test_conversations_are_tried_where_they_leave_an_error(compressor: Compressor) -> None:
    """Not in steps that are sent whole: a bound of these says nothing."""
    x = torch.randn(256, generator=cases.generator(0))
    assert errors_of(compressor)(x, 0) > 0 or compressor.level == 1.0


at_length = pytest.param(1.0, marks=pytest.mark.nightly)
"""The share of draws that a test takes: all of them at night."""


@pytest.mark.parametrize("share", [0.25, at_length])
@each_instance
def test_random_tensors(compressor: Compressor, share: float) -> None:
    """A draw of each: what exceeds a bound must be made up for by others, up to 4 sigma.

    Bounds are of expectations. The excess is relative to the tensor, or one would decide for all.
    """
    error, excess = errors_of(compressor), []
    chosen = list(random_tensors())[: int(RANDOM * share)]
    every = 1 if isinstance(compressor, Codec) else 10  # conversations take longer
    for step, x in enumerate(chosen[::every]):
        squared = float(x.double().square().sum())
        allowed = compressor.bound(x.numel()).allowed(squared)
        if squared and allowed < float("inf"):
            excess.append((error(x, step) - allowed * (1 + 1e-5)) / max(squared, allowed))
    if excess:
        found = torch.tensor(excess, dtype=torch.float64)
        assert float(found.mean()) <= 4 * float(found.std()) / len(excess) ** 0.5


@pytest.mark.parametrize("share", [0.5, at_length])
@each_instance
def test_adversarial_tensors(compressor: Compressor, share: float) -> None:
    """The mean of 32 draws of each, up to 4 sigma; what is not drawn must keep it outright."""
    error = errors_of(compressor)
    ramp = torch.linspace(-1, 1, 100)
    most = DRAWS if isinstance(compressor, Codec) else 16  # conversations take longer
    draws = int(most * share) if len({error(ramp, step) for step in range(5)}) > 1 else 1
    for number, x in enumerate(adversarial_tensors()):
        squared = float(x.double().square().sum())
        allowed = compressor.bound(x.numel()).allowed(squared) * (1 + 1e-5) + 1e-76
        measured = torch.tensor([error(x, step) for step in range(draws)], dtype=torch.float64)
        slack = 4 * float(measured.std()) / draws**0.5 if draws > 1 else 0.0
        assert float(measured.mean()) <= allowed + slack, f"tensor {number}"
