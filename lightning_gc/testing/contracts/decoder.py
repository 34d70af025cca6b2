"""Test that decoders do not trust bytes from the network (DecoderContract), by damaged payloads."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gc.compressors import Codec, Compressor, Preset
from lightning_gc.core import (
    Bucket,
    Exchange,
    Gather,
    Limits,
    Mean,
    MeanShard,
    Payload,
    Reply,
    Request,
    payload_validation,
    wire,
)
from lightning_gc.core.digest import ReplicaError
from lightning_gc.core.message import as_bytes
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.cases import broken, named
from lightning_gc.testing.lockstep import Lockstep
from lightning_gc.transports.simulated import Simulated


def damaged(data: st.DataObject, payload: Payload, limits: Limits | None) -> Payload:
    """Return a copy of a payload with one to three damages.

    Bytes are overwritten, bits flipped, numbers made extreme or not finite; tensors with a limit
    get any length up to it. Dtypes and other lengths stay, as the transport ensures them.
    """
    changed = [tensor.clone() for tensor in payload]
    longest = limits or (None,) * len(payload)
    for _ in range(data.draw(st.integers(1, 3), label="damages")):
        which = data.draw(st.integers(0, len(changed) - 1), label="tensor")
        limit = longest[which]
        if limit is not None and data.draw(st.booleans(), label="resize"):
            length = data.draw(st.integers(0, limit), label="length")
            changed[which] = _resized(changed[which], length)
        elif changed[which].numel():
            _overwrite(data, changed[which])
    return tuple(changed)


def changed(request: Request, change: Callable[[Payload, Limits | None], Payload]) -> Request:
    """Return a request with all its payloads changed."""
    if isinstance(request, Mean | MeanShard):
        return type(request)(change(request.tensors, None))
    if isinstance(request, Gather):
        return request._replace(tensors=change(request.tensors, request.limits))
    payloads = tuple(change(payload, request.limits) for payload in request.payloads)
    return Exchange(payloads, request.limits)


class Lying(Simulated):
    """Simulated workers; ``liar`` sends damaged payloads, a different one to each if it can."""

    def __init__(self, workers: int, liar: int, data: st.DataObject) -> None:
        super().__init__(workers)
        self.liar = liar
        self.data = data

    def fulfil(self, requests: Sequence[Request]) -> list[Reply]:
        lies = list(requests)
        lies[self.liar] = changed(lies[self.liar], partial(damaged, self.data))
        return super().fulfil(lies)


def with_liar(who: object, made: Callable[[], Lockstep], conversations: int) -> None:
    """Assert that a worker that sends damaged payloads is named, or that all get the same bits.

    Or that all raise a ReplicaError. State stays finite, and so does the result of the next round.
    """

    @settings(max_examples=conversations, derandomize=True, database=None, deadline=None)
    @given(st.data())
    def hold(data: st.DataObject) -> None:
        lockstep = made()
        liar = data.draw(st.integers(0, 2), label="liar")
        honest, lying = lockstep.transport, Lying(3, liar, data)
        law, on = "law 7", f"damaged payloads of worker {liar} of 3"
        unclean = broken(who, law, "an error or another kept tensor is no longer finite", on)
        try:
            for step in range(2):
                lockstep.transport = honest if step else lying
                given_ = [{n: g[n] for n in ("bias", "matrix")} for g in cases.gradients(3, step)]
                result = lockstep.step(given_)
                assert cases.finite_state(lockstep), unclean
        except ReplicaError:
            pass  # all workers raised it, and none has applied anything
        except ValueError as error:
            what = f"the refusal does not name worker {liar}, who alone lied: {str(error)!r}"
            assert f"orker {liar} " in str(error), broken(who, law, what, on)  # noqa: PT017
            assert cases.finite_state(lockstep), unclean
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(broken(who, law, not_refused(error), on)) from error
        else:
            what = "the result of the next, honest round is not finite"
            finite = all(mean.isfinite().all() for mean in result.mean.values())
            assert finite, broken(who, law, what, on)

    hold()


def not_refused(error: Exception) -> str:
    """Describe an exception other than ValueError, and where it was raised."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code if last is not None else None
    where = f" in {code.co_name}" if code is not None else ""
    return (
        f"{type(error).__name__}{where}: {error}; check what arrives and raise ValueError with a "
        f"sentence, see lightning_gc.core.payload_validation"
    )


def _resized(tensor: Tensor, length: int) -> Tensor:
    """Return the tensor truncated or repeated to a length."""
    if not tensor.numel():
        return tensor.new_zeros(length)
    return tensor.repeat(-(-length // tensor.numel()))[:length]


def _overwrite(data: st.DataObject, tensor: Tensor) -> None:
    """Fill a slice with an extreme number or random bytes, or flip one bit."""
    content = as_bytes(tensor)
    how = data.draw(st.sampled_from(("numbers", "bytes", "bit")), label="damage")
    if how == "bit":
        at = data.draw(st.integers(0, content.numel() - 1), label="byte")
        content[at] ^= 1 << data.draw(st.integers(0, 7), label="bit")
        return
    if how == "numbers":
        number = data.draw(st.sampled_from(_extremes(tensor.dtype)), label="number")
        tile = as_bytes(torch.tensor([number], dtype=tensor.dtype))
    else:
        drawn = data.draw(st.binary(min_size=1, max_size=16), label="bytes")
        tile = torch.tensor(list(drawn), dtype=torch.uint8)
    size = tensor.element_size()
    start = data.draw(st.integers(0, tensor.numel() - 1), label="start") * size
    stop = data.draw(st.integers(start // size + 1, tensor.numel()), label="stop") * size
    content[start:stop] = _resized(tile, stop - start)


def _extremes(dtype: torch.dtype) -> list[float]:
    if dtype.is_floating_point:
        kind = torch.finfo(dtype)
        return [float("nan"), float("inf"), -float("inf"), kind.max, kind.min, kind.tiny, -0.0]
    if dtype == torch.bool:
        return [False, True]
    return [torch.iinfo(dtype).min, torch.iinfo(dtype).max, 0]


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
