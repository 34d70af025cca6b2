"""Quantised sends the sparsifier's positions with the quantiser's values, and nothing else."""

import dataclasses
import math
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gc import (
    DGC,
    ECQSGD,
    QSGD,
    AllGather,
    AtomoSVD,
    Cast,
    EFSignSGD,
    GaussianK,
    HardThreshold,
    Identity,
    NaturalCompression,
    OneBitSGD,
    PerParameter,
    PowerSGD,
    Quantised,
    RandomK,
    SizeSwitch,
    SparseReduce,
    TopK,
    TwoShot,
)
from lightning_gc.compressors import Codec, Contraction, Multiple
from lightning_gc.compressors.base import Bound
from lightning_gc.compressors.sparsifiers.sparse_codec import SparseCodec
from lightning_gc.compressors.wrappers.quantised import _coded_bytes, _count
from lightning_gc.core import wire
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from tests.support.codecs import KINDS, apply, each_kind

SIGMA = 4


def largest(x: np.ndarray, k: int) -> np.ndarray:
    return np.sort(np.argsort(-np.abs(x), kind="stable")[:k])


@each_kind
@pytest.mark.parametrize("density", [0.01, 0.1, 1.0])
def test_topk_and_signs(kind: str, density: float) -> None:
    """Sign times the mean magnitude of the k largest; the others are left alone."""
    x = KINDS[kind].double().numpy()
    sent, left, _ = apply(Quantised(TopK(density), EFSignSGD()), KINDS[kind])
    k = max(1, round(300 * density))
    # Of equal ones any may be taken.
    chosen = np.flatnonzero(sent) if kind in ("constant", "one element") else largest(x, k)
    assert np.abs(x[chosen]).min() >= np.abs(np.delete(x, chosen)).max(initial=0)
    wanted = np.zeros(300)
    wanted[chosen] = np.where(x[chosen] >= 0, 1, -1) * np.abs(x[chosen]).mean()
    np.testing.assert_allclose(sent, wanted, rtol=1e-5)
    np.testing.assert_allclose(left, x - wanted, rtol=1e-4, atol=1e-6 * np.abs(x).max())
    assert len(chosen) == k


@each_kind
def test_threshold_and_two_means(kind: str) -> None:
    x = KINDS[kind].double().numpy()
    threshold = float(np.abs(x).mean()) or 1.0
    sent, _, _ = apply(Quantised(HardThreshold(threshold), OneBitSGD()), KINDS[kind])
    chosen = np.abs(KINDS[kind].numpy()) >= np.float32(threshold)
    above, below = chosen & (x >= 0), chosen & (x < 0)
    wanted = np.zeros(300)
    for side in (above, below):
        wanted[side] = x[side].mean() if side.any() else 0
    np.testing.assert_allclose(sent, wanted, rtol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "constant"])
@pytest.mark.parametrize("bits", [2, 4])
def test_topk_and_levels(kind: str, bits: int) -> None:
    """Each value is one of the two levels around it, of its block of 7 values."""
    x, s = KINDS[kind].double().numpy(), 2 ** (bits - 1) - 1
    for step in range(3):
        sent, _, _ = apply(Quantised(TopK(0.1), QSGD(bits, 7)), KINDS[kind], step)
        chosen = largest(x, 30)
        assert set(np.flatnonzero(sent)) <= set(chosen)
        for start in range(0, 30, 7):
            block = chosen[start : start + 7]
            unit = np.abs(x[block]).max() / s
            if unit == 0:
                continue
            levels = sent[block] / unit
            np.testing.assert_allclose(levels, np.round(levels), atol=1e-4)
            assert (np.abs(levels - x[block] / unit) < 1 + 1e-4).all()


@pytest.mark.slow
def test_the_mean_of_what_is_sent_is_what_was_selected() -> None:
    """With an unbiased quantiser: each selected value to 4 sigma."""
    x = KINDS["Student t, 2 degrees"]
    chosen = largest(x.numpy(), 30)
    for quantiser in (QSGD(2, 8), NaturalCompression()):
        codec = Quantised(TopK(0.1), quantiser)
        draws = np.stack([apply(codec, x, i)[0].astype(np.float64) for i in range(1000)])
        gap = np.abs(draws.mean(0)[chosen] - x.double().numpy()[chosen])
        # 30 at once: 4.5 sigma of one; those that are a level are always sent alike.
        assert (gap <= 4.5 * draws.std(0)[chosen] / 1000**0.5 + 1e-5).all()


def test_random_numbers_differ_between_workers_tensors_and_steps() -> None:
    x = KINDS["normal"]
    codec = Quantised(TopK(0.5), QSGD(2))

    def codes(name: str, **where: Any) -> bytes:
        bucket = dataclasses.replace(cases.bucket_of(x), shapes={name: (300,)}, **where)
        return bytes(codec.encode(x.clone(), bucket)[0].tolist())

    all_of_them = [codes("w"), codes("v"), codes("w", step=1), codes("w", worker=1)]
    assert len({*all_of_them, codes("w", phase=1)}) == 5
    assert codes("w") == all_of_them[0]


@pytest.mark.parametrize("numel", [*range(1, 40), 100, 257, 1000])
def test_lengths_tell_the_number(numel: int) -> None:
    for count in range(numel + 1):
        payload = (torch.zeros(_coded_bytes(count, numel)), torch.zeros(count % 16))
        assert _count(payload, numel, numel) == count
        if count:
            with pytest.raises(ValueError, match="shapes"):
                _count(payload, numel, count - 1)


def test_lengths_tell_the_number_of_large_tensors() -> None:
    """Where the width of coded positions changes, and anywhere."""
    draw = random.Random(0)
    for _ in range(200):
        numel = draw.randrange(1000, 1 << 30)
        near = (numel >> draw.randrange(20)) + draw.randrange(-40, 40)
        for count in (min(max(near, 0), numel), draw.randrange(numel)):
            coded = torch.empty(_coded_bytes(count, numel), device="meta")
            rest = torch.empty(count % 16, device="meta")
            assert _count((coded, rest), numel, numel) == count


def test_bytes() -> None:
    """5 of 500 values at 4 bits, a norm, positions, and 15 bytes for their number."""
    x = torch.randn(500, generator=cases.generator(0))
    payload = Quantised(TopK(0.01), QSGD(4, 64)).encode(x, cases.bucket_of(x))
    assert [t.numel() * t.element_size() for t in payload] == [3, 4, 4 + 2 + 10, 5]


@pytest.mark.parametrize(
    ("codec", "bound"),
    [
        (Quantised(TopK(0.1), QSGD(4, 49)), Contraction(0.075)),  # ω = 49/(4·49)
        (Quantised(TopK(0.1), QSGD(2, 100)), Multiple(25)),
        (Quantised(TopK(0.1), EFSignSGD()), Contraction(0.1 / 100)),
        (Quantised(TopK(0.1), NaturalCompression()), Contraction(0.0875)),
        (Quantised(HardThreshold(1.0), NaturalCompression()), Contraction(0)),
    ],
)
def test_bounds(codec: Codec, bound: Bound) -> None:
    """Of 1000 elements; as the paper's lemmas have them for Top-k."""
    found = codec.bound(1000)
    assert type(found) is type(bound)
    assert math.isclose(found.allowed(1.0), bound.allowed(1.0), rel_tol=1e-12)


@each_kind
def test_the_bound_of_levels_holds(kind: str) -> None:
    """A contraction that is one, for 300 elements in blocks of 64 at 3 bits: ω = 0.75 of 30."""
    codec, x = Quantised(TopK(0.1), QSGD(3, 64)), KINDS[kind]
    errors = [(apply(codec, x, step)[1].astype(np.float64) ** 2).sum() for step in range(64)]
    allowed = codec.bound(300).allowed(float((x.double() ** 2).sum()))
    assert codec.bound(300).allowed(1.0) < 1
    assert np.mean(errors) <= allowed * (1 + 1e-5) + SIGMA * np.std(errors) / 8


@pytest.mark.parametrize("sparsifier", [TopK(0.1), HardThreshold(0.5), GaussianK(0.1)])
@pytest.mark.parametrize(
    "quantiser", [QSGD(4), EFSignSGD(), OneBitSGD(), NaturalCompression(), Cast("float16")]
)
@pytest.mark.parametrize(
    "scheme", [pytest.param(AllGather(), marks=pytest.mark.nightly), TwoShot()], ids=repr
)
def test_nothing_is_lost_in_any_pair(
    sparsifier: SparseCodec, quantiser: Codec, scheme: Any
) -> None:
    codec = Quantised(sparsifier, quantiser)
    assert all((field.varies == "worker") == sparsifier.ragged for field in codec.wire(221))
    assert cases.lost(Lockstep(3, codec, scheme=scheme), 5) < 1e-5


def test_long_payloads_stay_within_limits() -> None:
    x = torch.randn(10_007, generator=cases.generator(0))
    for quantiser in (QSGD(3, 1000), EFSignSGD(), NaturalCompression(), Cast()):
        for threshold in (0.0, 1.0, 9.0):
            codec = Quantised(HardThreshold(threshold), quantiser)
            payload = codec.encode(x.clone(), cases.bucket_of(x))
            limits = wire.limits(codec.wire(10_007))
            assert limits is not None
            for tensor, limit in zip(payload, limits, strict=True):
                assert limit is not None
                assert tensor.numel() <= limit


def test_it_takes_the_sparsifiers_part() -> None:
    codec = Quantised(HardThreshold(0.5), EFSignSGD())
    assert codec.level == 0.5
    assert codec.at(2.0) == Quantised(HardThreshold(2.0), EFSignSGD())
    assert codec.knob == HardThreshold().knob
    assert Quantised() == Quantised(TopK(0.01), QSGD(4, 64))
    assert Quantised(quantiser=Cast()) == Quantised(TopK(0.01), Cast())
    assert pickle.loads(pickle.dumps(codec)) == codec  # noqa: S301 - our own bytes
    wrapped = SizeSwitch(PerParameter(codec)).at(1.0)
    assert wrapped.level == 1.0
    x = cases.tensors(221)["normal"]
    payload = Quantised(TopK(0.1)).encode(x.clone(), cases.bucket_of(x))
    assert Quantised(TopK(0.1)).sent(payload, 221) == 22


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Quantised(QSGD(4), QSGD(4)), r"sparsifier=QSGD.*a SparseCodec.*use TopK"),  # type: ignore[arg-type]
        (lambda: Quantised(RandomK(0.1), QSGD(4)), r"sparsifier=RandomK.*use TopK"),  # type: ignore[arg-type]
        (lambda: Quantised(DGC(0.1), QSGD(4)), "sparsifier=DGC"),  # type: ignore[arg-type]
        (lambda: Quantised(SizeSwitch(TopK(0.1)), QSGD(4)), "Wrappers go around"),  # type: ignore[arg-type]
        (lambda: Quantised("topk", QSGD(4)), "sparsifier='topk'"),  # type: ignore[arg-type]
        (lambda: Quantised(TopK(0.1), TopK(0.1)), r"quantiser=TopK.*use QSGD"),
        (lambda: Quantised(TopK(0.1), RandomK(0.1)), "quantiser=RandomK"),
        (lambda: Quantised(TopK(0.1), Quantised()), "quantiser=Quantised"),
        (lambda: Quantised(TopK(0.1), Identity()), "quantiser=Identity"),
        (lambda: Quantised(TopK(0.1), AtomoSVD()), "quantiser=AtomoSVD"),
        (lambda: Quantised(TopK(0.1), PowerSGD()), "quantiser=PowerSGD"),  # type: ignore[arg-type]
        (lambda: Quantised(TopK(0.1), ECQSGD()), "quantiser=ECQSGD"),  # type: ignore[arg-type]
        (lambda: Quantised(TopK(0.1), 4), "quantiser=4"),  # type: ignore[arg-type]
        (lambda: Lockstep(2, Quantised(), scheme=SparseReduce()), "does not select"),
    ],
)
def test_refusals(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
