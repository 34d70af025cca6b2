"""numba's kernels match torch bit for bit; one that does not is not used."""

import pkgutil
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gc import (
    QSGD,
    AllGather,
    BinMeans,
    ChunkedTopK,
    DynamicTree,
    EFSignSGD,
    Float4,
    Float8,
    Int8,
    OneBitSGD,
    Quantised,
    SignSGD,
    TopK,
    Uniform,
)
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.base import Codec
from lightning_gc.compressors.joint import Part, joined
from lightning_gc.compressors.signs.sign_payload import mean
from lightning_gc.core import Bucket, payload_validation
from lightning_gc.core.bit_packing import packed_bytes
from lightning_gc.kernels import dispatch, host, quantise
from tests.support.bucket_kernels import KINDS, LAYOUTS, assert_same_bits, train
from tests.support.kernel_device import INTERPRETED, same, some, tensors

pytestmark = [
    pytest.mark.skipif(find_spec("numba") is None, reason="needs the extra fast: numba"),
    pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter comes first"),
]
FAMILIES = [found.name for found in pkgutil.iter_modules(host.__path__)]
SIZES = [1, 7, 8, 2047, 2048, 2 * 2048 + 13, 70_000]


@pytest.fixture(autouse=True)
def there() -> None:
    assert all(dispatch.compiled(torch.ones(1), family) for family in FAMILIES)


def without_numba(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(dispatch.host, "works", lambda family: False)
    return monkeypatch


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8, 9, 16])
def test_quantise_and_back(numel: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, (name, x) in enumerate(tensors(numel).items()):
        size = min(numel, (1, 7, 64, 512, 5000)[(i + bits) % 5])
        results = []
        for numba in (True, False):
            with monkeypatch.context() as patched:
                if not numba:
                    without_numba(patched)
                left, out = x.clone(), x.flip(0)
                norms = quantise.largest(x, size)
                noise = None if i % 3 == 0 else torch.Generator().manual_seed(i)
                packed = quantise.quantise(left, norms, size, bits, noise)
                quantise.dequantise(packed, norms, size, bits, out, 1 / 3, unchecked)
                results.append((norms, left, packed, out))
        for ours, theirs in zip(*results, strict=True):
            assert same(ours, theirs), (name, size)


def unchecked(codes: Tensor, highest: int, norms: Tensor) -> Tensor:
    return norms


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_a_code_that_no_encoder_makes_is_refused(bits: int) -> None:
    numel = 5000
    packed = torch.zeros(packed_bytes(numel, bits), dtype=torch.uint8)
    packed[-bits:] = 255  # the last eight codes, none of which exists
    norms = torch.ones(-(-numel // 64))
    with pytest.raises(ValueError, match="code"):
        quantise.dequantise(
            packed, norms, 64, bits, torch.zeros(numel), 1.0, payload_validation.codes
        )


@pytest.mark.parametrize("codec", [QSGD(4), QSGD(8, norm="l2")], ids=repr)
def test_what_a_codec_sends_does_not_depend_on_numba(
    codec: QSGD, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for numba in (True, False):
        with monkeypatch.context() as patched:
            if not numba:
                without_numba(patched)
            buffer = torch.randn(10_001, generator=torch.Generator().manual_seed(0))
            bucket = Bucket(buffer.clone(), {"weight": (10_001,)}, seed=3)
            payload, out = codec.encode(buffer, bucket), torch.zeros(10_001)
            codec.decode(payload, out, 1 / 3, bucket)
            results.append((*payload, buffer, out))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


BLOCKS: list[Codec] = [
    *(Quantised(ChunkedTopK(0.1, 256), BinMeans(2, 16)), Quantised(TopK(0.1), QSGD(4, 64))),
    *(BinMeans(1, 7), BinMeans(4, 64), Int8(), DynamicTree(7)),
    *(Float8("e4m3"), Float8("e5m2", 7), Float8("1-3-4"), Float4(), Float4("e3m0", 7)),
]


@pytest.mark.parametrize(
    "codec", [QSGD(4), QSGD(3, 7), QSGD(8, 5000), Uniform(5), *BLOCKS], ids=repr
)
@pytest.mark.parametrize("workers", some((2, 3), (3,)))
def test_a_whole_bucket(codec: Codec, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        results = []
        for numba in (True, False):
            with monkeypatch.context() as patched:
                if not numba:
                    without_numba(patched)
                results.append(train(codec, kind, LAYOUTS["some"], workers=workers))
        for ours, theirs in zip(*results, strict=True):
            assert same(ours, theirs), kind


def test_the_sender_of_a_code_that_no_encoder_makes_is_named() -> None:
    bucket = Bucket(torch.randn(100), {"a": (60,), "b": (40,)})
    joint = joined((Part(QSGD(3), "a", 0, 60, 0), Part(QSGD(3), "b", 60, 100, 1)))
    codes, norms = joint.encode(bucket.grad.clone(), bucket)
    damaged = codes.clone()
    damaged[-2:] = 255
    with pytest.raises(ValueError, match="what worker 1 sent"):
        joint.receive_all([(codes, norms), (damaged, norms)], torch.zeros(100), bucket)


def test_a_kernel_that_is_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lightning_gc.kernels.host import blocks as kernels

    def less(*arrays: Any) -> None:
        arrays[3][:] *= 0.999

    monkeypatch.setattr(kernels, "_add", less)
    monkeypatch.setattr(dispatch, "host", dispatch.HostFamilies())
    for _ in range(2):
        assert not dispatch.compiled(torch.ones(1), "blocks")
    (record,) = {each.getMessage() for each in caplog.records if each.name == dispatch.__name__}
    assert "blocks differs from torch's" in record
    assert dispatch.compiled(torch.ones(1), "low_rank")


def test_lengths_that_do_not_fit_are_left_to_torch() -> None:
    """The kernels check no index."""
    packed, norms = torch.zeros(2500, dtype=torch.uint8), torch.ones(3)
    with pytest.raises(RuntimeError):
        quantise.dequantise(packed, norms, 64, 4, torch.zeros(5000), 1.0, unchecked)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", some(LAYOUTS, ("some",)))
@pytest.mark.parametrize("compressor", [EFSignSGD(), OneBitSGD(), SignSGD()], ids=repr)
def test_whole_buckets(compressor: Compressor, layout: str, kind: str) -> None:
    assert_same_bits(compressor, kind, layout, workers=3, scheme=AllGather())


@pytest.mark.parametrize("numel", [*SIZES, 32 * 1024, 300 * 32 * 1024 + 5])
def test_mean(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for x in tensors(numel).values():
        ours = mean(x, numel)
        with monkeypatch.context() as patched:
            without_numba(patched)
            theirs = mean(x, numel)
        assert same(ours, theirs)
        if x.isfinite().all() and numel < 10**6:
            torch.testing.assert_close(ours, (x.double() / numel).sum().float())
