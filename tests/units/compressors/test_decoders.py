"""Decoders refuse malformed payloads by name, and never read numbers on a device."""

import pytest
import torch
from torch import Tensor

from lightning_gc import (
    COMPRESSORS,
    QSGD,
    AbsoluteRounding,
    Cast,
    CodedQSGD,
    HardThreshold,
    Identity,
    Lossless,
    RandomK,
    RandomMask,
    SVDThreshold,
    TopK,
)
from lightning_gc.compressors import Codec
from lightning_gc.core import payload_validation
from lightning_gc.core.bit_packing import unpack
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.elias_fano import encode
from lightning_gc.core.flow import Payload
from lightning_gc.core.settings import short
from lightning_gc.kernels import dispatch
from lightning_gc.testing.contracts import cases

METHODS = [c.method for cls in COMPRESSORS.values() for c in cls.examples()]
CODECS = list(dict.fromkeys(c for c in METHODS if isinstance(c, Codec)))
X = cases.tensors(100)["normal"]


def payload_of(codec: Codec) -> Payload:
    return codec.encode(X.clone(), cases.bucket_of(X))


def decode(codec: Codec, payload: Payload) -> Tensor:
    out = X.clone()
    try:
        codec.whole.receive(payload, out, 1.0, cases.bucket_of(X), 0)
    except ValueError:
        assert torch.equal(out, X)
        raise
    return out


@pytest.mark.parametrize("codec", CODECS, ids=cases.label)
def test_tensors_too_short_too_long_too_many(codec: Codec) -> None:
    """A transport lets none of these through; torch would repeat a tensor of one element."""
    payload = payload_of(codec)
    with pytest.raises(ValueError, match="shapes"):
        decode(codec, (*payload, payload[0]))
    with pytest.raises(ValueError, match="shapes"):
        decode(codec, payload[:-1])
    for i, tensor in enumerate(payload):
        for length in {0, 1, tensor.numel() - 1, tensor.numel() + 1, 1000} - {tensor.numel()}:
            if isinstance(codec, AbsoluteRounding) and (i, length) == (3, 0):
                continue  # no low bits: other numbers, but such as might have been sent
            if isinstance(codec, CodedQSGD) and i == 4 and length <= 1:
                continue  # likewise; a byte has the low bits of the four that are sent with 1 level
            if isinstance(codec, SVDThreshold) and (i, length) == (1, 0):
                continue  # likewise: no triplet
            unused = (i, length) == (0, tensor.numel() + 1)  # an exponent that no element has
            if isinstance(codec, Lossless) and (unused or (i in (1, 4) and length == 0)):
                continue  # other numbers again, without low bits
            if codec == RandomMask(0.3, shared=False) and i == 0 and length <= X.numel():
                continue  # likewise: their number is drawn
            said = r"shapes|bitmap|positions of"
            if isinstance(codec, Lossless):
                said += "|exponents, and mantissas|mantissas for|but codes are"
            if length >= 0:
                other = torch.zeros(length, dtype=tensor.dtype)
                with pytest.raises(ValueError, match=said):
                    decode(codec, (*payload[:i], other, *payload[i + 1 :]))


@pytest.mark.parametrize(
    ("codec", "places", "words"),
    [
        (TopK(0.03), [3, 50, 127], "position 127 of a tensor of 100 elements.* 0..99"),
        (TopK(0.03), [3, 3, 50], "position 3 after 3, but positions ascend"),
        (TopK(0.03), [3, 2, 60], "position 2 after 3, but positions ascend"),
        (TopK(0.03), [50, 3, 60], "bitmap marks 2 positions, but should mark 3"),
        (HardThreshold(9.0), [100], "position 100 of a tensor of 100 elements"),
        (HardThreshold(9.0), [0, 0], "position 0 after 0"),
        (HardThreshold(9.0), [*range(100), 99], r"shapes \(\(101,\), .*at most 100 values"),
    ],
)
def test_positions(codec: Codec, places: list[int], words: str) -> None:
    packed = encode(torch.tensor(places), 100) if len(places) <= 100 else torch.zeros(26).byte()
    with pytest.raises(ValueError, match=words):
        decode(codec, (torch.ones(len(places)), packed))


def test_a_code_that_qsgd_does_not_make() -> None:
    """4 bits have 16 patterns and 15 levels."""
    packed, norms = payload_of(QSGD(4))
    with pytest.raises(ValueError, match=r"code 15, but codes are 0\.\.14"):
        decode(QSGD(4), (torch.full_like(packed, 255), norms))


def test_a_dtype_that_is_too_narrow() -> None:
    with pytest.raises(ValueError, match=r"Codes of 9 bits do not fit into torch\.uint8"):
        unpack(torch.zeros(9, dtype=torch.uint8), 9, 8, torch.uint8)
    assert unpack(torch.tensor([255], dtype=torch.uint8), 8, 1, torch.uint8).tolist() == [255]
    with pytest.raises(ValueError, match=r"32 bits do not fit into torch\.int32"):
        unpack(torch.zeros(4, dtype=torch.uint8), 32, 1, torch.int32)


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS, ids=cases.label)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_no_error_and_not_lost(codec: Codec, bad: float) -> None:
    """It may come of honest sums; the result shows it."""
    payload = payload_of(codec)
    spoilt = tuple(
        torch.full_like(t, bad) if t.is_floating_point() and t.numel() else t for t in payload
    )
    if any(t.is_floating_point() and t.numel() for t in payload):
        assert not decode(codec, spoilt).isfinite().all()


def test_hard_threshold_sends_what_is_not_a_number() -> None:
    """What it kept would stay in the error for ever."""
    buffer = torch.tensor([0.1, float("nan"), 5.0, -float("inf")])
    values, _ = HardThreshold(1.0).encode(buffer, cases.bucket_of(buffer))
    assert values.numel() == 3
    assert buffer.tolist() == pytest.approx([0.1, 0, 0, 0])


def test_on_a_device_the_result_is_spoilt_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """There nothing can be raised without waiting: indices are moved, values become NaN."""
    monkeypatch.setattr(payload_validation, "on_host", lambda tensor: False)
    monkeypatch.setattr(dispatch.host, "works", lambda family: False)
    for places in ([3, 50, 127], [3, 3, 50], [3, 2, 60], [50, 3, 60]):
        out = decode(TopK(0.03), (torch.ones(3), encode(torch.tensor(places), 100)))
        assert out.isnan().any()
        assert out.isfinite().sum() >= 97
    packed, norms = payload_of(QSGD(4))
    assert decode(QSGD(4), (torch.full_like(packed, 255), norms)).isnan().all()


@pytest.mark.parametrize("codec", CODECS, ids=cases.label)
def test_decoding_reads_no_number_on_a_device(codec: Codec) -> None:
    """A meta tensor has no numbers: reading one is an error, as waiting for a GPU should be."""
    if isinstance(codec, RandomK | RandomMask):
        return  # it draws positions itself, and there is no generator for this device
    payload = tuple(tensor.to("meta") for tensor in payload_of(codec))
    out = X.to("meta")
    codec.decode(payload, out, 1.0, cases.bucket_of(X))
    assert out.shape == X.shape


@pytest.mark.parametrize("codec", [Identity(), Cast(), RandomK(0.1)], ids=cases.label)
def test_an_error_names_codec_sender_and_parameter(codec: Codec) -> None:
    bucket = Bucket(X, {"body.weight": (100,), "x" * 90: (0,)})
    with pytest.raises(
        ValueError, match=r"cannot decode what worker 3 sent for body.weight.*"
    ) as e:
        codec.whole.receive((torch.ones(7),), X.clone(), 1.0, bucket, 3)
    assert str(e.value).startswith(short(codec))
    assert "..." in str(e.value)
    with pytest.raises(ValueError, match="the mean of all payloads"):
        codec.whole.receive((torch.ones(7),), X.clone(), 1.0, bucket, None)
