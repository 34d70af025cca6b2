"""IntegerQSGD and TernGrad match their formulas, and their sums never overflow."""

import math
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gc import AllReduce, ErrorFeedback, IntegerQSGD, NoMemory, TernGrad, TwoShot
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.quantisers import integer_sums
from lightning_gc.core import payload_validation
from lightning_gc.core.bit_packing import pack, packed_bytes, unpack
from lightning_gc.core.flow import Exchange, Gather, Reply, Request
from lightning_gc.schemes import Scheme
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.decoder import Lying
from lightning_gc.transports.simulated import Simulated
from tests.support.codecs import KINDS, each_kind

LARGEST = torch.finfo(torch.float32).max


def synchronised(
    compressor: Compressor, xs: Sequence[Tensor], seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all workers' tensors, what each has sent, and the mean, in float64."""
    result = Lockstep(len(xs), compressor, seed=seed).step([{"w": x} for x in xs])
    given = np.stack([x.double().numpy() for x in xs])
    left = np.stack([error["w"].double().numpy() for error in result.errors])
    return given, given - left, result.mean["w"].double().numpy()


def check_levels(x: np.ndarray, sent: np.ndarray, mean: np.ndarray, scale: float, s: int) -> None:
    """Check that all have sent a level next to their element, and that the mean is the levels'."""
    if scale == 0:
        assert not np.any([*sent, mean])
        return
    ratios, levels = s * np.abs(x) / scale, s * sent / scale
    rounded = np.rint(levels)
    slack = 1e-4 + 1e-6 * s  # float32's rounding of x − sent and of the ratio
    np.testing.assert_allclose(levels, rounded, rtol=0, atol=slack)
    assert (np.abs(rounded) >= np.floor(ratios - slack)).all()
    assert (np.abs(rounded) <= np.ceil(ratios + slack)).all()
    assert ((np.sign(rounded) == np.sign(x)) | (rounded == 0)).all()
    wanted = scale / s * (rounded.sum(0) / len(x))
    np.testing.assert_allclose(mean, wanted, rtol=1e-6, atol=1e-7 * scale)


@each_kind
@pytest.mark.parametrize("bits", [2, 4, 7, 9, 16])
@pytest.mark.parametrize("workers", [1, 3])
def test_integer_qsgd(kind: str, bits: int, workers: int) -> None:
    xs = [KINDS[kind].roll(i) * ((i + 1) / workers) for i in range(workers)]
    x, sent, mean = synchronised(IntegerQSGD(bits), xs)
    check_levels(x, sent, mean, np.abs(x).max(), 2 ** (bits - 1) - 1)


@each_kind
@pytest.mark.parametrize("clip", [0.5, 2.5, None])
@pytest.mark.parametrize("workers", [1, 3])
def test_terngrad(kind: str, clip: float | None, workers: int) -> None:
    xs = [KINDS[kind].roll(i) * ((i + 1) / workers) for i in range(workers)]
    x, sent, mean = synchronised(TernGrad(clip), xs)
    limits = [math.inf if clip is None else clip * np.sqrt((row**2).mean()) for row in x]
    clipped = np.stack([row.clip(-limit, limit) for row, limit in zip(x, limits, strict=True)])
    check_levels(clipped, sent, mean, np.abs(clipped).max(), 1)


@pytest.mark.parametrize("numel", [1, 3, 8, 9])
@pytest.mark.parametrize("workers", [2, 4, 7])
@pytest.mark.parametrize("bits", [3, 8, 12])
def test_shards_may_be_short_or_empty(numel: int, workers: int, bits: int) -> None:
    xs = list(torch.randn(workers, numel, generator=torch.Generator().manual_seed(numel)))
    x, sent, mean = synchronised(IntegerQSGD(bits), xs)
    check_levels(x, sent, mean, np.abs(x).max(), 2 ** (bits - 1) - 1)


@pytest.mark.parametrize(
    ("bits", "workers"),
    [*(pytest.param(b, 64, marks=pytest.mark.nightly) for b in (2, 4, 16)), (4, 65)],
)
def test_sums_never_overflow(bits: int, workers: int) -> None:
    """All at the highest level, or at the lowest: no sum wraps round, and nothing is infinite."""
    xs = [torch.tensor([1.0, -1.0, 0.0, (-1.0) ** i]) * LARGEST for i in range(workers)]
    x, sent, mean = synchronised(IntegerQSGD(bits), xs)
    assert mean[:3].tolist() == [LARGEST, -LARGEST, 0.0]
    assert mean[3] == pytest.approx(x[:, 3].mean(), rel=1e-6)
    assert (sent == x).all()


@pytest.mark.slow
def test_sums_of_more_workers_than_int32_holds() -> None:
    """At 16 bits 32,769 workers need 32 bits: the owner's side alone, driven by hand."""
    workers, out = 40_000, torch.zeros(1)
    bucket = replace(cases.bucket_of(out, workers=workers), wanted=False)
    highest = (pack(torch.tensor([65534]), 16),)
    flow = integer_sums.add(IntegerQSGD(16), (highest,), torch.ones(1), 16, bucket, out)
    next(flow)
    gather = flow.send([highest] * workers)
    assert isinstance(gather, Gather)
    assert unpack(gather.tensors[0], 32, 1).item() == 65534 * workers


@pytest.mark.parametrize("compressor", [IntegerQSGD(4), IntegerQSGD(2), TernGrad(None)], ids=str)
def test_rounded_up_as_often_as_it_should_be(compressor: Compressor) -> None:
    """Chi-square of the frequency of the upper level, against the element's fraction of a step."""
    s = 7 if compressor == IntegerQSGD(4) else 1
    values, trials = torch.linspace(0.013, 0.987, 97), 1500
    x = torch.cat([values.repeat(trials), torch.tensor([-1.0])])
    _, sent, _ = synchronised(compressor, [x, -x])
    levels = np.rint(sent * s)[:, :-1].reshape(2, trials, 97)
    lower = np.floor(s * values.double().numpy())
    p = s * values.double().numpy() - lower
    ups = np.stack([levels[0] - lower, -levels[1] - lower])
    for row in ups:
        assert set(np.unique(row)) == {0.0, 1.0}
        chi = ((row.sum(0) - trials * p) ** 2 / (trials * p * (1 - p))).sum()
        assert abs(chi - 97) < 4 * math.sqrt(2 * 97)
    # Two workers draw independently: of p(1 − p)/2 in the mean, nothing is common.
    together = ((ups[0] - p) * (ups[1] - p) / (p * (1 - p))).mean()
    assert abs(together) < 4 / math.sqrt(97 * trials)


def expected_error(x: np.ndarray, s: int, clip: float | None = None) -> float:
    """Return ``E‖x − C(x)‖² / ‖x‖²`` of one worker: squares of what is clipped, and variances."""
    limit = math.inf if clip is None else clip * math.sqrt((x**2).mean())
    y = x.clip(-limit, limit)
    unit = s * np.abs(y) / np.abs(y).max()
    p = unit - np.floor(unit)
    variance = (p * (1 - p)).sum() * (np.abs(y).max() / s) ** 2
    return float((((x - y) ** 2).sum() + variance) / (x**2).sum())


@pytest.mark.parametrize("numel", [1, 20, 500])
@pytest.mark.parametrize("bits", [2, 8])
def test_bound_of_integer_qsgd_is_the_worst_tensor(numel: int, bits: int) -> None:
    s, omega = 2 ** (bits - 1) - 1, IntegerQSGD(bits).bound(numel).omega
    worst = np.full(numel, s / (s + math.sqrt(s**2 + numel - 1)) / s)
    worst[0] = 1.0
    assert expected_error(worst, s) == pytest.approx(omega, abs=1e-12)
    draw = np.random.default_rng(0)
    for degrees in (1.0, 2.0, 30.0):
        for x in draw.standard_t(degrees, (50, numel)):
            assert expected_error(x, s) <= omega * (1 + 1e-9) + 1e-12
    assert TernGrad(None).inner.bound(numel).omega == IntegerQSGD(2).bound(numel).omega
    errors = []
    for seed in range(64):
        given, sent, _ = synchronised(IntegerQSGD(bits), [torch.from_numpy(worst).float()], seed)
        errors.append(((given - sent) ** 2).sum())
    slack = 4 * np.std(errors) / 8 + 1e-6
    assert abs(np.mean(errors) - omega * (worst**2).sum()) <= slack


@pytest.mark.parametrize("clip", [0.5, 1.0, 2.5, 4.0, 6.0])
def test_bound_of_terngrad(clip: float) -> None:
    """No tensor is worse; some come near: many quarters of the scale beside a huge element."""
    numel = 100_000
    omega = TernGrad(clip).inner.bound(numel).omega
    x = np.full(numel, 0.25)  # of S = c·σ = 1
    x[0] = math.sqrt(numel / clip**2 - (numel - 1) / 16) if clip < 4 else 1.0
    if clip >= 4:  # nothing is clipped, and the others are what is left
        x[1:] = math.sqrt((numel / clip**2 - 1) / (numel - 1))
    assert 0.98 * omega < expected_error(x, 1, clip) <= omega
    draw = np.random.default_rng(0)
    for degrees in (0.5, 1.0, 2.0, 30.0):
        for length in (1, 2, 5, 30, 3000):
            allowed = TernGrad(clip).inner.bound(length).omega * (1 + 1e-9) + 1e-12
            for x in draw.standard_t(degrees, (20, length)):
                assert expected_error(x, 1, clip) <= allowed


def test_terngrad_keeps_its_error_to_itself() -> None:
    """It is dropped, as in the paper, clipped or not; with a memory what was clipped comes back."""
    assert isinstance(Lockstep(1, TernGrad()).engines[0].memory, NoMemory)
    assert not TernGrad().traits.unbiased
    assert TernGrad(None).traits.unbiased
    x = torch.ones(100).index_fill(0, torch.tensor([3]), 50.0)
    limit = 2.5 * math.sqrt(float(x.square().mean()))
    result = Lockstep(1, TernGrad(), ErrorFeedback()).step([{"w": x}])
    assert result.mean["w"].max().item() == pytest.approx(limit)
    assert result.errors[0]["w"][3].item() == pytest.approx(50 - limit)


def test_terngrad_trains_what_has_no_spread() -> None:
    """About its mean a constant tensor has no deviation, and would be clipped to nothing."""
    for x in (torch.full((1,), 0.3), torch.full((50,), -7.0)):
        assert Lockstep(1, TernGrad()).step([{"w": x}]).mean["w"].tolist() == x.tolist()


@pytest.mark.parametrize("bits", [2, 3, 4, 16])
def test_wire_is_what_a_single_worker_sends(bits: int) -> None:
    """The norm, all codes, and their sums: dtypes and lengths, in the order of the messages."""
    x = torch.randn(101, generator=cases.generator(0))
    flow = IntegerQSGD(bits).rounds(cases.bucket_of(x), x.clone(), torch.zeros(101))
    norm = next(flow)
    codes = flow.send([norm.tensors])  # type: ignore[union-attr]
    sums = flow.send(list(codes.payloads))  # type: ignore[union-attr]
    sent = (*norm.tensors, *codes.payloads[0], *sums.tensors)  # type: ignore[union-attr]
    declared = [(field.dtype, (field.length,)) for field in IntegerQSGD(bits).wire(101)]
    assert [(tensor.dtype, tuple(tensor.shape)) for tensor in sent] == declared


@pytest.mark.parametrize("compressor", [IntegerQSGD(4), IntegerQSGD(9), TernGrad()], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_bytes_are_those_of_the_two_widths(compressor: Compressor, workers: int) -> None:
    numel, bits = 12_345, getattr(compressor, "bits", 2)
    result = Lockstep(workers, compressor).step([{"w": torch.ones(numel)}] * workers)
    wide = math.ceil(math.log2(2 * (2 ** (bits - 1) - 1) * workers + 1))
    size = math.ceil(numel / workers)
    wanted = (workers - 1) * (packed_bytes(size, bits) + packed_bytes(size, wide) + 8)
    for found in result.wire_bytes:  # each message is filled up to 16 bytes, and has a guard's flag
        assert wanted <= found <= wanted + 3 * 16 * (workers - 1)


class Damaging(Simulated):
    """Simulated workers of whom worker 1 puts the highest code there is into a message."""

    def __init__(self, kind: type, bits: int, numel: int) -> None:
        super().__init__(3)
        self.kind = kind
        self.codes = pack(torch.full((numel,), (1 << bits) - 1), bits)

    def fulfil(self, requests: Sequence[Request]) -> list[Reply]:
        lies = list(requests)
        lie = lies[1]
        if self.kind is Exchange and isinstance(lie, Exchange):
            lies[1] = Exchange(((self.codes,),) * 3)
        elif (
            self.kind is Gather and isinstance(lie, Gather) and lie.tensors[0].dtype == torch.uint8
        ):
            lies[1] = Gather((self.codes, *lie.tensors[1:]))
        return super().fulfil(lies)


@pytest.mark.parametrize(("kind", "bits"), [(Exchange, 4), (Gather, 6)])
def test_codes_that_no_worker_makes(kind: type, bits: int) -> None:
    """They are refused by name; where nobody may look, they spoil the mean on all."""
    for look in (True, False):
        lockstep = Lockstep(3, IntegerQSGD(4), ErrorFeedback())
        lockstep.transport = Damaging(kind, bits, 40)
        with mock.patch.object(payload_validation, "on_host", return_value=look):
            if look:
                with pytest.raises(ValueError, match=r"worker 1 sent for w\. .*codes are 0"):
                    lockstep.step([{"w": torch.randn(120)}] * 3)
                continue
            result = lockstep.step([{"w": torch.randn(120)}] * 3)
        spoiled = ~result.mean["w"].isfinite()
        assert spoiled.sum() == (120 if kind is Exchange else 40)
        assert all(error["w"].isfinite().all() for error in result.errors)


@pytest.mark.parametrize("compressor", [IntegerQSGD(4), IntegerQSGD(9), TernGrad()], ids=str)
@pytest.mark.parametrize("look", [True, False])
@pytest.mark.parametrize("examples", [15, pytest.param(300, marks=pytest.mark.nightly)])
def test_replicas_get_the_same_bits_of_a_liar(
    compressor: Compressor, look: bool, examples: int
) -> None:
    """It is named, or all get the same bits; nobody remembers what is not finite."""

    @settings(max_examples=examples)
    @given(st.data())
    def hold(data: st.DataObject) -> None:
        lockstep = Lockstep(3, compressor, ErrorFeedback())
        liar = data.draw(st.integers(0, 2), label="liar")
        lockstep.transport = Lying(3, liar, data)
        small = [{n: g[n] for n in ("bias", "smaller_than_workers")} for g in cases.gradients(3, 0)]
        said = ""
        with mock.patch.object(payload_validation, "on_host", return_value=look):
            try:
                lockstep.step(small)
            except ValueError as error:
                said = str(error)
        assert not said or (look and f"orker {liar} " in said)
        for engine in lockstep.engines:
            assert all(error.isfinite().all() for error in engine.errors().values())

    hold()


def test_only_one_worker_need_want_the_mean() -> None:
    """The others take part in all rounds and leave ``out`` alone; each counts a tensor once."""
    x = torch.randn(50)
    for wanted in (True, False):
        out, bucket = torch.full((50,), 3.0), replace(cases.bucket_of(x), wanted=wanted)
        Simulated(1).run([IntegerQSGD().rounds(bucket, x.clone(), out)])
        assert bool((out == 3.0).all()) is not wanted
        counted = bucket.tally.elements, bucket.tally.sent, bucket.tally.payload_bytes
        assert counted == (50, 50, 25 + 4)


def test_bad_arguments() -> None:
    for bits in (1, 17, 2.5):
        with pytest.raises(ValueError, match=r"2\.\.16; use 4|whole number; use 3"):
            IntegerQSGD(bits)  # type: ignore[arg-type]
    for clip in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"above 0; use the paper's 2\.5"):
            TernGrad(clip)
    assert IntegerQSGD().at(99).bits == 16
    schemes: tuple[Scheme, ...] = (AllReduce(), TwoShot())
    for scheme in schemes:
        with pytest.raises(ValueError, match="takes no scheme"):
            Lockstep(2, TernGrad(), scheme=scheme)
