"""DecoderContract: decoders do not trust bytes from the network."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gc.compressors import Codec, Compressor, Preset
from lightning_gc.core import payload_validation, wire
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Payload
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.cases import broken, named
from lightning_gc.testing.contracts.damaged_payloads import damaged, not_refused
from lightning_gc.transports.base import as_bytes

FENCE = 64
"""Elements on either side of the output that must not change."""


class DecoderContract:
    """Feeds damaged payloads to decoders. Part of ``CompressorContract``; needs hypothesis.

    Attributes:
        instances: compressors to test.
        examples: payloads per decoder.
        repeatable: use the same payloads in every run.
    """

    instances: tuple[Compressor, ...] = ()
    examples: int = 200
    repeatable: bool = True

    def pytest_generate_tests(self, metafunc: Any) -> None:
        cases.parametrize(metafunc, codec=codecs(self.instances))

    def test_7_trusts_no_bytes(self, codec: Codec) -> None:
        """A damaged payload is refused, or changes ``out`` only, equally on all workers.

        Where reading values would make the host wait for a device, a payload that is refused on the
        host may be decoded, but then the result is not finite.
        """
        repeatable, most = self.repeatable, self.examples

        @settings(max_examples=most, derandomize=repeatable, database=None, deadline=None)
        @given(st.data())
        def hold(data: st.DataObject) -> None:
            numel = data.draw(st.sampled_from((1, 2, 19, 101)), label="numel")
            kind = data.draw(st.sampled_from(("normal", "one element", "zeros")), label="kind")
            x = cases.tensors(numel)[kind]
            payload = codec.encode(x.clone(), cases.bucket_of(x))
            payload = damaged(data, payload, wire.limits(codec.wire(numel)))
            first = decoded(codec, payload, x, cases.bucket_of(x, workers=2))
            other = decoded(codec, payload, x, cases.bucket_of(x, worker=1, workers=2))
            on = f"a damaged payload of {named(kind, numel)}"
            what = f"worker 0 gets {shown(first)} of it, worker 1 {shown(other)}"
            assert same(first, other), broken(codec, "law 7", what, on)
            with mock.patch.object(payload_validation, "on_host", return_value=False):
                unread = decoded(codec, payload, x, cases.bucket_of(x))
            if isinstance(first, Tensor):
                what = f"where values cannot be read, it gets {shown(unread)}, not {shown(first)}"
                assert same(first, unread), broken(codec, "law 7", what, on)
            elif isinstance(unread, Tensor):
                what = f"where values cannot be read, a finite result hides this: {first}"
                assert not unread.isfinite().all(), broken(codec, "law 7", what, on)

        hold()


def decoded(codec: Codec, payload: Payload, x: Tensor, bucket: Bucket) -> Tensor | str:
    """Add a payload to a copy of ``x``; return that, or the message of a refusal.

    Memory around the copy, and the payload, must not change.
    """
    memory = torch.full((FENCE + x.numel() + FENCE,), 7.0)
    out = memory[FENCE:-FENCE]
    out.copy_(x)
    before = [tensor.clone() for tensor in payload]
    on = f"a damaged payload of a tensor of {x.numel()}"
    result: Tensor | str = out
    try:
        payload_validation.fields(payload, codec.wire(out.numel()))  # as schemes do
        codec.decode(payload, out, 0.5, bucket)
    except ValueError as error:
        result = str(error)
        what = f"its refusal, {result!r}, does not say what is wrong"
        assert len(result.split()) >= 5, broken(codec, "law 7", what, on)
    except Exception as error:
        raise AssertionError(broken(codec, "law 7", not_refused(error), on)) from error
    fenced = bool((memory[:FENCE] == 7.0).all() and (memory[-FENCE:] == 7.0).all())
    assert fenced, broken(codec, "law 7", "decode wrote outside the tensor", on)
    what = f"decode changed the shape of out to {tuple(out.shape)}"
    assert out.shape == x.shape, broken(codec, "law 7", what, on)
    for tensor, copy in zip(payload, before, strict=True):
        unchanged = torch.equal(as_bytes(tensor), as_bytes(copy))
        assert unchanged, broken(codec, "law 7", "decode changed the payload", on)
    return result


def shown(result: Tensor | str) -> str:
    """Return a decoder's result in a few words."""
    if isinstance(result, str):
        return f"the refusal {result!r}"
    return f"{[float(f'{number:.4g}') for number in result[:4].tolist()]} and so on"


def same(first: Tensor | str, second: Tensor | str) -> bool:
    """Return whether both are bit-equal tensors, or equal messages."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(as_bytes(first), as_bytes(second))
    return isinstance(first, str) and first == second


def codecs(instances: tuple[Compressor, ...]) -> list[Codec]:
    """Return the codecs among compressors, including those in presets."""
    found = [c.method if isinstance(c, Preset) else c for c in instances]
    return [codec for codec in found if isinstance(codec, Codec)]
