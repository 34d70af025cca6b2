"""``shared=False``: a set for each worker, which all others know."""

import numpy as np
import pytest
import torch

from lightning_gc import RandomK, RandomMask
from lightning_gc.compressors import Codec
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from tests.support.codecs import KINDS, apply, each_kind

CODECS = (RandomK(0.1, shared=False), RandomMask(0.1, shared=False))
UNBIASED = RandomK(0.2, unbiased=True, shared=False)
both = pytest.mark.parametrize("codec", CODECS, ids=str)


@each_kind
@both
def test_elements_are_sent_as_they_are(kind: str, codec: Codec) -> None:
    x = KINDS[kind].numpy()
    sent, left, (values, seed) = apply(codec, KINDS[kind])
    assert seed.numel() == 1
    np.testing.assert_array_equal(sent + left, x)
    assert ((sent == 0) | (left == 0)).all()
    assert np.count_nonzero(sent) <= values.numel()


@both
def test_workers_and_steps_have_sets_of_their_own(codec: Codec) -> None:
    """Overlaps of two sets of a tenth of 10,000 are 100 ± 9 elements."""
    x = torch.ones(10_000)
    sets = [
        set(np.flatnonzero(apply(codec, x, step=step, worker=worker)[0]))
        for step, worker in ((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    for i, one in enumerate(sets):
        for other in sets[:i]:
            assert 40 < len(one & other) < 160


@pytest.mark.slow
def test_scaled_elements_are_right_on_average_and_the_more_so_the_more_workers() -> None:
    """``E‖mean − x‖²`` is ``(d/k − 1)·‖x‖²/W`` with sets of their own, W times that with one."""
    x = torch.tensor(np.random.default_rng(0).standard_normal(200), dtype=torch.float32)
    squared = float(x.square().sum())

    def means(codec: Codec, workers: int) -> torch.Tensor:
        lockstep = Lockstep(workers, codec)
        return torch.stack([lockstep.step([{"w": x}] * workers).mean["w"] for _ in range(300)])

    for codec, workers, times in (
        (UNBIASED, 1, 4.0),
        (UNBIASED, 4, 1.0),
        (RandomK(0.2, unbiased=True), 4, 4.0),
    ):
        found = means(codec, workers)
        spread = float((found - x).square().sum(1).mean()) / squared
        assert abs(spread / times - 1) < 0.15, (codec, workers)
        assert float((found.mean(0) - x).square().sum()) < 2 * times * squared / 300
    sent, left, _ = apply(UNBIASED, x)
    np.testing.assert_allclose(sent[sent != 0], 5 * x.numpy()[sent != 0], rtol=1e-6)
    np.testing.assert_allclose(sent + left, x.numpy(), atol=1e-5)
    assert np.count_nonzero(sent) == 40


def test_all_sets_are_equally_likely() -> None:
    """Each of 20 elements is sent in 6 of 20 draws, ± 4 sigma of a binomial; never fewer than k."""
    codec, counts = RandomK(0.3, shared=False), np.zeros(20)
    for step in range(1000):
        sent, _, _ = apply(codec, torch.ones(20), step=step)
        assert np.count_nonzero(sent) == 6
        counts += sent
    assert (np.abs(counts - 300) < 4 * np.sqrt(1000 * 0.3 * 0.7)).all()


def test_the_masks_size_is_binomial() -> None:
    codec = RandomMask(0.3, shared=False)
    sizes = [apply(codec, torch.ones(50), step=step)[2][0].numel() for step in range(500)]

    assert abs(np.mean(sizes) - 15) < 4 * np.sqrt(50 * 0.3 * 0.7 / 500)
    assert abs(np.var(sizes) / (50 * 0.3 * 0.7) - 1) < 0.3


@both
def test_the_mean_of_workers_has_the_elements_of_all(codec: Codec) -> None:
    lockstep = Lockstep(3, codec)
    made = cases.gradients(3, 0)
    result = lockstep.step(made)
    for name in cases.SHAPES:
        given = torch.stack([m[name] for m in made]).mean(0)
        left = torch.stack([errors[name] for errors in result.errors]).mean(0)
        np.testing.assert_allclose((result.mean[name] + left).numpy(), given.numpy(), atol=1e-6)
    filled = np.count_nonzero(result.mean["matrix"].numpy())
    assert filled > 1.5 * 0.1 * 221
