"""StromThreshold, FixedProportion and AdaComp match their formulas, and code signs in few bits."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from lightning_gc import AdaComp, FixedProportion, StromThreshold
from lightning_gc.compressors.signs import sign_payload
from lightning_gc.core.elias_fano import coded_bytes
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from tests.support.codecs import KINDS, STUDENT, apply, each_kind


def sizes(c: int, numel: int = 300) -> list[int]:
    """Return the lengths of coded positions, signs and last signs."""
    return [coded_bytes(c, numel), c // 8, c % 8]


# Positions with signs.


@pytest.mark.parametrize("chosen", [0, 1, 7, 8, 9, 64, 100])
def test_lengths_tell_the_number(chosen: int) -> None:
    draw = torch.Generator().manual_seed(chosen)
    x = torch.randn(100, generator=draw)
    places = torch.randperm(100, generator=draw)[:chosen].sort().values
    buffer, levels = x.clone(), torch.tensor([-2.0, 3.0])
    payload = sign_payload.take_chosen(buffer, places, levels)
    assert [t.numel() for t in payload] == sizes(chosen, 100)
    assert sign_payload.count(payload) == chosen
    wanted = np.zeros(100, np.float32)
    wanted[places] = np.where(x.numpy()[places] < 0, -2.0, 3.0)
    out = torch.zeros(100)
    sign_payload.add_chosen(payload, levels, out, 1.0)
    np.testing.assert_array_equal(out.numpy(), wanted)
    np.testing.assert_array_equal(buffer.numpy(), x.numpy() - wanted)


def test_more_than_its_sender_may_send() -> None:
    x = torch.arange(1.0, 101)
    payload = FixedProportion(0.5).encode(x.clone(), cases.bucket_of(x))
    with pytest.raises(ValueError, match=r"shapes .* \(6,\), .* at most 1 signs, "):
        FixedProportion(0.1).whole.receive(payload, x.clone(), 1.0, cases.bucket_of(x), 0)


# StromThreshold.


@each_kind
@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_strom_threshold(kind: str, share: float) -> None:
    """The threshold is an element's own magnitude, which reaches it."""
    x = KINDS[kind].numpy()
    magnitudes = np.sort(np.abs(x))[::-1]
    tau = magnitudes[math.ceil(share * 300) - 1]
    tau = float(tau) if tau > 0 else 1.0
    sent, left, payload = apply(StromThreshold(tau), KINDS[kind])
    wanted = np.where(np.abs(x) >= np.float32(tau), np.sign(x) * np.float32(tau), 0)
    np.testing.assert_array_equal(sent, wanted)
    np.testing.assert_array_equal(left, x - wanted)
    assert (np.abs(left) <= np.abs(x)).all()  # what its bound says
    assert [t.numel() for t in payload] == sizes(int(np.count_nonzero(wanted)))


def test_strom_threshold_sends_a_large_element_step_by_step() -> None:
    one = Lockstep(1, StromThreshold(1.0))
    results = [one.step([{"w": torch.tensor([-3.5])}]).mean["w"].item()]
    results += [one.step([{"w": torch.tensor([-0.25])}]).mean["w"].item() for _ in range(5)]
    assert results == [-1, -1, -1, -1, 0, 0]


@pytest.mark.parametrize("threshold", [0.0, -0.1, float("inf"), float("nan"), 1e-60])
def test_strom_threshold_refuses(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"StromThreshold\(threshold=.*use 0\.01"):
        StromThreshold(threshold)


# FixedProportion.


@each_kind
@pytest.mark.parametrize("density", [0.001, 0.1, 1.0])
def test_fixed_proportion(kind: str, density: float) -> None:
    """Of equal elements any may be sent, so what was sent of either side is compared in order."""
    x = KINDS[kind].double().numpy()
    sent, left, payload = apply(FixedProportion(density), KINDS[kind])
    total = 0
    for sign in (-1, 1):
        side = np.sort(x[x * sign > 0] * sign)[::-1]
        k = min(len(side), max(1, round(density * len(side))))
        of_side = sent * sign > 0
        np.testing.assert_array_equal(np.sort(x[of_side] * sign)[::-1], side[:k])
        if k:
            np.testing.assert_allclose(sent[of_side], sign * side[:k].mean(), rtol=1e-5)
        total += k
    assert np.count_nonzero(sent) == total
    np.testing.assert_allclose(left, x - sent, rtol=1e-5, atol=1e-6 * np.abs(sent).max())
    assert [t.numel() for t in payload] == [2, *sizes(total)]


def test_fixed_proportion_has_the_least_error_for_two_numbers() -> None:
    """Neither mean can be moved without adding error."""
    x = STUDENT.double().numpy()
    sent = apply(FixedProportion(0.2), STUDENT)[0].astype(np.float64)
    least = ((x - sent) ** 2).sum()
    for side in (sent < 0, sent > 0):
        for factor in (0.99, 1.01):
            assert ((x - np.where(side, sent * factor, sent)) ** 2).sum() > least


@pytest.mark.parametrize("density", [0.03, 0.1, 0.5])
def test_fixed_proportion_keeps_its_bound_where_it_is_hard(density: float) -> None:
    """One large element, equal elements, few of one sign; the first two come near to the bound."""
    codec = FixedProportion(density)
    one = torch.full((100,), 1e-6)
    one[5] = 1.0
    few = torch.where(torch.arange(100) < int(1.49 / density), 1.0, 0.0)
    shares = []
    for x in (one, torch.ones(100), -few, torch.cat([few, -few])):
        left = apply(codec, x)[1].astype(np.float64)
        shares.append(1 - (left**2).sum() / (x.double().numpy() ** 2).sum())
        assert shares[-1] >= codec.bound(x.numel()).delta - 1e-6
    assert min(shares) <= 1.5 * codec.bound(100).delta + 1e-6


def test_fixed_proportion_sends_what_is_not_a_number() -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not np.isfinite(apply(FixedProportion(0.3), torch.tensor([1.0, bad, -2.0]))[0]).all()


def test_fixed_proportion_of_nothing() -> None:
    assert [t.numel() for t in apply(FixedProportion(), torch.zeros(0))[2]] == [2, 0, 0, 0]


@pytest.mark.parametrize("density", [0.0, 1.5, float("nan")])
def test_fixed_proportion_refuses(density: float) -> None:
    with pytest.raises(ValueError, match=r"FixedProportion\(density=.*use 0\.01"):
        FixedProportion(density)


# AdaComp.


def adacomp(total: np.ndarray, newest: np.ndarray, size: int) -> np.ndarray:
    """Return what the paper's algorithm sends of error plus gradient; float32, as it compares."""
    bins = [slice(i, i + size) for i in range(0, len(total), size)]
    greatest = [np.abs(total[b]).max() for b in bins]
    scale = np.mean(np.array(greatest, np.float64))
    sent = np.zeros(len(total))
    for b, most in zip(bins, greatest, strict=True):
        chosen = np.abs(total[b] + newest[b]) >= most
        sent[b] = np.where(chosen, np.sign(total[b]) * scale, 0)
    return sent


@each_kind
@pytest.mark.parametrize("size", [1, 7, 50, 1000])
@pytest.mark.parametrize("old", [0.0, 1.0, 30.0])
def test_adacomp(kind: str, size: int, old: float) -> None:
    """With no error before, and with errors like the gradient, in another order, and larger."""
    newest = KINDS[kind]
    total = newest + old * newest.roll(17).flip(0)
    wanted = adacomp(total.numpy(), newest.numpy(), size)
    sent, left, payload = apply(AdaComp(size), total, bucket=cases.bucket_of(newest))
    np.testing.assert_allclose(sent, wanted, rtol=1e-5)
    most = np.abs(wanted).max()
    np.testing.assert_allclose(left, total.double().numpy() - sent, rtol=1e-5, atol=1e-6 * most)
    assert [t.numel() for t in payload] == [1, *sizes(int(np.count_nonzero(wanted)))]


def test_adacomp_sends_one_of_a_bin_or_none_where_nothing_is_new() -> None:
    """The greatest of a bin is sent if the gradient still has its sign."""
    total = torch.tensor([8.0, 1.0, 2.0, -4.0, 3.0, 1.0])
    newest = torch.tensor([0.1, 0.2, 0.3, 0.1, 0.2, 0.3])
    sent = apply(AdaComp(3), total, bucket=cases.bucket_of(newest))[0]
    assert sent.tolist() == [6, 0, 0, 0, 0, 0]


def test_adacomp_where_the_gradient_is_not_what_is_encoded() -> None:
    """In a second encoding the mean itself is new; a shard that is padded has no gradient there."""
    x, other = KINDS["normal"], KINDS["bfloat16"]
    again = replace(cases.bucket_of(other), phase=1)
    wanted = adacomp(x.numpy(), x.numpy(), 20)
    np.testing.assert_allclose(apply(AdaComp(20), x, bucket=again)[0], wanted, rtol=1e-5)
    short = np.concatenate([other.numpy()[:200], np.zeros(100, np.float32)])
    wanted = adacomp(x.numpy(), short, 20)
    sent = apply(AdaComp(20), x, bucket=cases.bucket_of(other[:200]))[0]
    np.testing.assert_allclose(sent, wanted, rtol=1e-5)
    sent = apply(AdaComp(20), x, bucket=cases.bucket_of(other.bfloat16()))[0]
    np.testing.assert_allclose(sent, adacomp(x.numpy(), other.numpy(), 20), rtol=1e-5)


@pytest.mark.parametrize("bins", [1, 4])
def test_adacomp_keeps_its_bound_where_it_is_hard(bins: int) -> None:
    """One large element that waits, and small ones that are sent as if they were large."""
    total, newest = torch.full((bins, 50), 1e-6), torch.ones(bins, 50)
    total[:, 0], newest[:, 0] = 1.0, -0.5
    x = total.view(-1)
    left = apply(AdaComp(50), x, bucket=cases.bucket_of(newest.view(-1)))[1].astype(np.float64)
    share = (left**2).sum() / (x.double().numpy() ** 2).sum()
    assert 49.9 < share <= AdaComp(50).bound(x.numel()).omega


def test_adacomp_sends_what_is_not_a_number_and_of_nothing_nothing() -> None:
    for bad in (float("nan"), float("inf")):
        assert not np.isfinite(apply(AdaComp(2), torch.tensor([1.0, bad, -2.0]))[0]).all()
    assert [t.numel() for t in apply(AdaComp(), torch.zeros(0))[2]] == [1, 0, 0, 0]


@pytest.mark.parametrize("bin_size", [0, -1, 2.5, float("inf"), float("nan")])
def test_adacomp_refuses(bin_size: float) -> None:
    with pytest.raises(ValueError, match=r"AdaComp\(bin_size=.*(500|use 3)"):
        AdaComp(bin_size)  # type: ignore[arg-type]
