"""RandomMask and VarianceSparsifier match their formulas and sampling probabilities."""

import math

import numpy as np
import pytest
import torch

from lightning_gc import RandomMask, VarianceSparsifier
from lightning_gc.core.elias_fano import coded_bytes
from tests.support import codecs
from tests.support.codecs import STUDENT, apply

KINDS = {
    **codecs.KINDS,
    "halves": 0.5 ** torch.arange(300).clamp(max=100).float(),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def likely(squares: float, freedom: int) -> bool:
    """Return whether a chi-square statistic is within four standard deviations of its mean."""
    return abs(squares - freedom) < 4 * math.sqrt(2 * freedom)


# RandomMask.


@each_kind
@pytest.mark.parametrize("density", [0.01, 0.3, 1.0])
def test_random_mask_sends_elements_as_they_are(kind: str, density: float) -> None:
    x = KINDS[kind].numpy()
    mask = apply(RandomMask(density), torch.ones(300))[0] == 1
    sent, left, (values,) = apply(RandomMask(density), KINDS[kind], worker=3)
    np.testing.assert_array_equal(sent, np.where(mask, x, 0))
    np.testing.assert_array_equal(left, np.where(mask, 0, x))
    assert values.numel() == mask.sum()
    assert mask.all() == (density == 1)


@pytest.mark.parametrize("density", [0.04, 0.6])
def test_random_mask_is_drawn_for_each_element_on_its_own(density: float) -> None:
    """Each is as likely as the next, and their number varies as a binomial one does."""
    steps, numel = 1500, 200
    ones = torch.ones(numel)
    masks = np.stack([apply(RandomMask(density), ones, step)[0] for step in range(steps)])
    variance = density * (1 - density)
    seen = masks.sum(0)
    assert likely(((seen - steps * density) ** 2 / (steps * variance)).sum(), numel)
    numbers = masks.sum(1)
    assert likely(((numbers - numel * density) ** 2 / (numel * variance)).sum(), steps)
    together = ((masks[:, :-1] - density) * (masks[:, 1:] - density)).sum(0)  # of neighbours
    assert likely((together**2 / (steps * variance**2)).sum(), numel - 1)


def test_random_mask_may_be_empty() -> None:
    """Then nothing is sent, and everything is left; of one element the chance is its density."""
    sent, left, (values,) = apply(RandomMask(1e-5), torch.tensor([5.0]))
    assert (sent.tolist(), left.tolist(), values.numel()) == ([0], [5], 0)
    assert apply(RandomMask(0.5), torch.zeros(0))[2][0].numel() == 0
    sends = sum(apply(RandomMask(0.25), torch.ones(1), step)[2][0].numel() for step in range(2000))
    assert abs(sends - 500) < 4 * math.sqrt(2000 * 0.25 * 0.75)


def test_random_mask_changes_with_the_step() -> None:
    ones = torch.ones(300)
    first, second = (apply(RandomMask(0.5), ones, step)[0] for step in (0, 1))
    assert (first != second).any()


@pytest.mark.parametrize("density", [0.0, 1.5, float("nan")])
def test_random_mask_refuses(density: float) -> None:
    with pytest.raises(ValueError, match=r"RandomMask\(density=.*use 0\.01"):
        RandomMask(density)


# VarianceSparsifier.


def probabilities(x: np.ndarray, epsilon: float) -> tuple[np.ndarray, float]:
    """Return the paper's Algorithm 2 in float64: every p_i, and λ."""
    magnitudes = np.abs(x.astype(np.float64))
    ordered = np.sort(magnitudes)[::-1]
    total = (ordered**2).sum()
    if total == 0:
        return np.zeros_like(magnitudes), math.inf
    for k in range(len(ordered)):
        tail = ordered[k:]
        scale = tail.sum() / (epsilon * total + (tail**2).sum())
        if scale * tail[0] <= 1:
            break
    return np.minimum(1, scale * magnitudes), float(scale)


@each_kind
@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 2.0, 100.0])
@pytest.mark.parametrize("step", range(2))
def test_variance_sparsifier_sends_by_the_closed_form(kind: str, epsilon: float, step: int) -> None:
    x = KINDS[kind].double().numpy()
    p, scale = probabilities(x, epsilon)
    sent, left, payload = apply(VarianceSparsifier(epsilon), KINDS[kind], step)
    if kind == "zeros":
        assert not sent.any()
        assert [t.numel() for t in payload] == [0, 0, 1, 0, 0, 0]
        return
    m = float(payload[2])
    assert m == pytest.approx(1 / scale, rel=1e-5)
    whole = p == 1
    drawn = ~whole & (sent != 0)
    np.testing.assert_array_equal(sent[whole], KINDS[kind].numpy()[whole])
    np.testing.assert_allclose(sent[drawn], np.sign(x[drawn]) * m, rtol=1e-6)
    np.testing.assert_allclose(left, x - sent, rtol=1e-5, atol=1e-6 * np.abs(sent).max())
    k, c = int(whole.sum()), int(drawn.sum())
    sizes = [k, coded_bytes(k, 300), 1, coded_bytes(c, 300), c // 8, c % 8]
    assert [t.numel() for t in payload] == sizes


@each_kind
@pytest.mark.parametrize("epsilon", [0.02, 1.0, 30.0])
def test_variance_sparsifier_spends_its_budget_on_as_few_as_it_can(
    kind: str, epsilon: float
) -> None:
    """The second moment is what was allowed, and other ways to spend it send more."""
    x = KINDS[kind].double().numpy()
    if kind == "zeros":
        return
    m = float(VarianceSparsifier(epsilon).magnitude(KINDS[kind]))
    p = np.minimum(1, np.abs(x) / m)
    some = x != 0
    allowed = (1 + epsilon) * (x**2).sum()
    assert (x[some] ** 2 / p[some]).sum() == pytest.approx(allowed, rel=1e-5)
    noise = np.random.default_rng(0)
    for spread in (0.01, 0.1, 1.0):
        other = np.minimum(1, p[some] * np.exp(spread * noise.standard_normal(some.sum())))
        # Probabilities divided by f have f times the second moment; those cut at 1 less.
        low, high = 1e-9, 1e9
        for _ in range(100):
            factor = math.sqrt(low * high)
            needed = (x[some] ** 2 / np.minimum(1, other * factor)).sum()
            low, high = (factor, high) if needed > allowed else (low, factor)
        assert np.minimum(1, other * high).sum() >= p.sum() * (1 - 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "Student t, 2 degrees", "tiny", "huge"])
def test_variance_sparsifier_sends_as_often_as_it_should(kind: str) -> None:
    """Chi-square over all elements that are drawn; the number sent; and the variance."""
    x, trials, epsilon = KINDS[kind], 600, 1.0
    p, _ = probabilities(x.numpy(), epsilon)
    seen = np.zeros(300)
    errors, numbers = [], []
    for step in range(trials):
        sent, _, payload = apply(VarianceSparsifier(epsilon), x, step)
        seen += sent != 0
        errors.append(((sent.astype(np.float64) - x.double().numpy()) ** 2).sum())
        numbers.append(VarianceSparsifier(epsilon).sent(payload, 300))
    drawn = (p < 1) & (p * trials > 5)
    variance = trials * p * (1 - p)
    squares = ((seen - trials * p)[drawn] ** 2 / variance[drawn]).sum()
    assert likely(squares, int(drawn.sum()))
    assert (seen[p == 1] == trials).all()
    assert abs(np.sum(numbers) - trials * p.sum()) < 4 * math.sqrt(variance.sum())
    allowed = epsilon * (x.double().numpy() ** 2).sum()
    assert abs(np.mean(errors) - allowed) < 4 * np.std(errors) / math.sqrt(trials)


def test_variance_sparsifier_at_the_ends_of_the_range() -> None:
    """What is made larger stays finite; workers draw apart; the least elements can be sent."""
    sent, left, payload = apply(VarianceSparsifier(1000.0), torch.tensor([3e38, -3e38] * 50))
    assert np.isfinite(sent).all()
    assert np.isfinite(left).all()
    assert float(payload[2]) == torch.finfo(torch.float32).max
    least = torch.tensor([2.0**-149, 0.0, -(2.0**-149)])
    assert set(apply(VarianceSparsifier(1e-4), least)[0].tolist()) <= {2.0**-149, 0, -(2.0**-149)}
    one, other = (apply(VarianceSparsifier(), STUDENT, worker=worker)[0] for worker in (0, 1))
    assert (one != other).any()
    assert apply(VarianceSparsifier(), torch.zeros(0))[0].size == 0


def test_variance_sparsifier_sends_what_is_not_a_number() -> None:
    sent = apply(VarianceSparsifier(), torch.tensor([1.0, float("nan"), 0.0]))[0]
    assert np.isnan(sent[1])


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("inf"), float("nan")])
def test_variance_sparsifier_refuses(epsilon: float) -> None:
    with pytest.raises(ValueError, match=r"VarianceSparsifier\(epsilon=.*use 1\.0"):
        VarianceSparsifier(epsilon)
