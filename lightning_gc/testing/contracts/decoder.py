"""DecoderContract: decoders do not trust bytes from the network."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding import payload_validation, wire
from lightning_gc.compressors import Codec, Compressor, Preset
from lightning_gc.flow import Payload
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.damaged_payloads import damaged
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
            assert same(first, decoded(codec, payload, x, cases.bucket_of(x, worker=1, workers=2)))
            with mock.patch.object(payload_validation, "on_host", return_value=False):
                unread = decoded(codec, payload, x, cases.bucket_of(x))
            if isinstance(first, Tensor):
                assert same(first, unread)
            elif isinstance(unread, Tensor):
                assert not unread.isfinite().all(), f"a step would be made, although {first}"

        hold()


def decoded(codec: Codec, payload: Payload, x: Tensor, bucket: Bucket) -> Tensor | str:
    """Add a payload to a copy of ``x``; return that, or the message of a refusal.

    Memory around the copy, and the payload, must not change.
    """
    memory = torch.full((FENCE + x.numel() + FENCE,), 7.0)
    out = memory[FENCE:-FENCE]
    out.copy_(x)
    before = [tensor.clone() for tensor in payload]
    result: Tensor | str = out
    try:
        payload_validation.fields(payload, codec.wire(out.numel()))  # as schemes do
        codec.decode(payload, out, 0.5, bucket)
    except ValueError as error:
        result = str(error)
        assert len(result.split()) >= 5, f"{result!r} does not say what is wrong"
    assert (memory[:FENCE] == 7.0).all()
    assert (memory[-FENCE:] == 7.0).all()
    assert out.shape == x.shape
    for tensor, copy in zip(payload, before, strict=True):
        assert torch.equal(as_bytes(tensor), as_bytes(copy)), "decode changed the payload"
    return result


def same(first: Tensor | str, second: Tensor | str) -> bool:
    """Return whether both are bit-equal tensors, or equal messages."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(as_bytes(first), as_bytes(second))
    return isinstance(first, str) and first == second


def codecs(instances: tuple[Compressor, ...]) -> list[Codec]:
    """Return the codecs among compressors, including those in presets."""
    found = [c.method if isinstance(c, Preset) else c for c in instances]
    return [codec for codec in found if isinstance(codec, Codec)]
