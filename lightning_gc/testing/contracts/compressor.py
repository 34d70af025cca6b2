"""CompressorContract: the laws of compressors, one test each."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor

from lightning_gc.coding import wire
from lightning_gc.compressors import Codec, Compressor, SparseCodec
from lightning_gc.compressors.sparsifiers import sparse_codec
from lightning_gc.engine.compatibility import combine
from lightning_gc.flow import Payload
from lightning_gc.memories import NoMemory, Residual
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.collective import CollectiveContract
from lightning_gc.testing.contracts.decoder import DecoderContract, codecs
from lightning_gc.testing.contracts.recovery import RecoveryContract
from lightning_gc.testing.lockstep import Lockstep


class CompressorContract(DecoderContract, CollectiveContract, RecoveryContract):
    """Tests compressors against their declarations.

    Attributes:
        instances: compressors to test; several configurations find more faults.
        examples: damaged payloads per decoder.

    Example:
        >>> from lightning_gc import TopK
        >>> from lightning_gc.testing.contracts import CompressorContract
        >>> class TestMine(CompressorContract):
        ...     instances = (TopK(0.05),)
    """

    def pytest_generate_tests(self, metafunc: Any) -> None:
        found = codecs(self.instances)
        cases.parametrize(
            metafunc,
            compressor=self.instances,
            codec=found,
            unbiased=[codec for codec in found if codec.traits.unbiased],
            linear=[codec for codec in found if codec.traits.linear],
            sparse=[codec for codec in found if isinstance(codec, SparseCodec)],
            conserving=[c for c in self.instances if c.traits.conserves],
            numel=[1, 2, 19, 101, 221],
            workers=cases.WORKERS,
            dtype=cases.DTYPES,
        )
        CollectiveContract.pytest_generate_tests(self, metafunc)

    # Laws of the codec's arithmetic.

    def test_1_takes_and_leaves_the_rest(self, codec: Codec, numel: int) -> None:
        """``decode(encode(x)) + x_after == x_before``."""
        for kind, x in cases.tensors(numel).items():
            buffer = x.clone()
            payload = codec.encode(buffer, cases.bucket_of(x))
            sent = decoded(codec, payload, x)
            rounding = 1e-6 * float(sent.abs().max())  # of x − C(x) + C(x), whatever x is
            torch.testing.assert_close(sent + buffer, x, rtol=1e-5, atol=rounding, msg=kind)
            storages = {t.untyped_storage().data_ptr() for t in payload if t.numel()}
            assert buffer.untyped_storage().data_ptr() not in storages

    def test_2_adds(self, codec: Codec, numel: int) -> None:
        x = cases.tensors(numel)["normal"]
        bucket = cases.bucket_of(x)
        payload = codec.encode(x.clone(), bucket)
        once = decoded(codec, payload, x)
        out = torch.full_like(x, 5.0)
        codec.decode(payload, out, 2.0, bucket)
        codec.decode(payload, out, 1.0, bucket)
        torch.testing.assert_close(out, 5.0 + 3.0 * once)

    def test_3_keeps_its_bound(self, codec: Codec, numel: int) -> None:
        draws = 64 if draws_at_all(codec) else 1
        for kind, x in cases.tensors(numel).items():
            allowed = codec.bound(numel).allowed(float(x.double().square().sum()))
            errors = [left(codec, x, step).double().square().sum() for step in range(draws)]
            assert cases.within(errors, allowed, 1e-5), kind

    def test_3_unbiased_if_declared(self, unbiased: Codec) -> None:
        x = cases.tensors(221)["normal"]

        def draw(step: int) -> Tensor:
            payload = unbiased.encode(x.clone(), cases.bucket_of(x, step=step))
            return decoded(unbiased, payload, x, step)

        assert cases.unbiased(draw, x, 400)

    def test_3_linear_if_declared(self, linear: Codec) -> None:
        xs = [cases.tensors(221)[kind] for kind in ("normal", "heavy tails", "constant")]
        payloads = [linear.encode(x.clone(), cases.bucket_of(x)) for x in xs]
        averaged = tuple(torch.stack(parts).mean(0) for parts in zip(*payloads, strict=True))
        apart = torch.stack([decoded(linear, p, xs[0]) for p in payloads]).mean(0)
        torch.testing.assert_close(decoded(linear, averaged, xs[0]), apart)

    def test_3_sends_what_it_chooses(self, sparse: SparseCodec, numel: int) -> None:
        """``encode`` sends the elements that ``choose`` names; ``take`` by parts sends the same."""
        for kind, x in cases.tensors(numel).items():
            bucket, before = cases.bucket_of(x), x.clone()
            chosen = sparse.choose(x, bucket)
            assert torch.equal(x, before), kind
            assert (chosen[1:] > chosen[:-1]).all(), kind
            whole = x.clone()
            sent = decoded(sparse, sparse.encode(whole, bucket), x)
            parts, out = x.clone(), torch.zeros_like(x)
            for start, stop in ((0, numel // 3), (numel // 3, numel)):
                mine = chosen[(chosen >= start) & (chosen < stop)] - start
                payload = sparse.take(parts[start:stop], mine)
                assert payload[0].numel() == mine.numel()
                sparse_codec.add(payload, out[start:stop], 1.0)
            assert torch.equal(out, sent), kind
            assert torch.equal(parts, whole), kind

    def test_4_knob_moves_bytes_in_its_direction(self, codec: Codec) -> None:
        x = cases.tensors(4096)["normal"]

        def size(turned: Codec) -> int:
            payload = turned.encode(x.clone(), cases.bucket_of(x))
            return sum(t.numel() * t.element_size() for t in payload)

        cases.turns(codec, size)

    def test_5_payloads_are_as_declared(self, codec: Codec, numel: int) -> None:
        """Number, dtypes and lengths of tensors are those of ``wire``, whatever the values."""
        declared = codec.wire(numel)
        assert (wire.limits(declared) is None) == all(f.varies != "worker" for f in declared)
        for kind, x in cases.tensors(numel).items():
            payload = codec.encode(x.clone(), cases.bucket_of(x))
            assert len(payload) == len(declared), kind
            for tensor, field in zip(payload, declared, strict=True):
                assert tensor.dim() == 1, field
                assert tensor.dtype == field.dtype, field
                assert tensor.numel() <= field.length, (kind, field)
                assert field.varies != "no" or tensor.numel() == field.length, (kind, field)

    def test_5_lengths_vary_with_the_step_alone(self, codec: Codec, numel: int) -> None:
        """Unless a field varies with the worker, all workers send the same lengths in a step."""
        if wire.limits(codec.wire(numel)) is not None:
            return
        for step in range(3):
            seen = {
                tuple(t.numel() for t in codec.encode(x.clone(), bucket))
                for worker, x in enumerate(cases.tensors(numel).values())
                for bucket in [cases.bucket_of(x, step=step, worker=worker, workers=9)]
            }
            assert len(seen) == 1

    def test_6_randomness_is_private(self, codec: Codec) -> None:
        x = cases.tensors(221)["normal"]
        cases.private(lambda step: codec.encode(x.clone(), cases.bucket_of(x, step=step)))

    # Laws of the whole synchronisation.

    def test_nothing_is_lost(
        self, conserving: Compressor, workers: int, dtype: torch.dtype
    ) -> None:
        """Conservation over 20 steps, while the order of the bucket changes at every step.

        With the compressor's default memory; if that does not conserve, with ``Residual`` for
        biased and ``NoMemory`` for unbiased compressors.
        """
        compressor = conserving
        _, memory, _ = combine(compressor)
        if memory.buffers and not memory.conserves:
            memory = NoMemory() if compressor.traits.unbiased else Residual()
        lockstep = Lockstep(workers, compressor, memory)
        assert cases.lost(lockstep, 20, dtype) < cases.TOLERANCE[dtype]

    def test_zeros_stay_zeros(self, compressor: Compressor, workers: int) -> None:
        zeros = [{n: torch.zeros(s) for n, s in cases.SHAPES.items()} for _ in range(workers)]
        result = Lockstep(workers, compressor).step(zeros)
        assert not cases.flat(result.mean).any()
        assert not cases.mean(result.errors).any()

    def test_absent_gradient_leaves_its_error_alone(
        self, compressor: Compressor, workers: int
    ) -> None:
        lockstep = Lockstep(workers, compressor)
        if not lockstep.engines[0].memory.buffers:
            return
        lockstep.step(cases.gradients(workers, 0))
        before = [engine.errors()["matrix"].clone() for engine in lockstep.engines]
        following = cases.gradients(workers, 1)
        for named in following:
            named["matrix"] = torch.zeros(cases.SHAPES["matrix"])
        result = lockstep.step(following)
        assert not result.mean["matrix"].any()
        for engine, kept in zip(lockstep.engines, before, strict=True):
            assert torch.equal(engine.errors()["matrix"], kept)

    def test_non_finite_is_seen_by_all_and_remembered_by_none(
        self, compressor: Compressor, workers: int
    ) -> None:
        """One non-finite element on one worker makes all results non-finite, but no error."""
        for bad in (float("nan"), float("inf"), float("-inf")):
            lockstep = Lockstep(workers, compressor)
            lockstep.step(cases.gradients(workers, 0))
            spoiled = cases.gradients(workers, 1)
            spoiled[-1]["prime"][50] = bad
            result = lockstep.step(spoiled)
            assert not all(mean.isfinite().all() for mean in result.mean.values())
            for engine in lockstep.engines:
                assert all(error.isfinite().all() for error in engine.errors().values())
            after = lockstep.step(cases.gradients(workers, 2))
            assert cases.flat(after.mean).isfinite().all()

    def test_configuration_is_a_value(self, compressor: Compressor) -> None:
        copy = pickle.loads(pickle.dumps(compressor))  # noqa: S301 - our own bytes
        assert copy == compressor
        assert hash(copy) == hash(compressor)
        assert type(compressor).__dataclass_params__.frozen  # type: ignore[attr-defined]


def left(codec: Codec, x: Tensor, step: int) -> Tensor:
    """Return the compression error of a tensor."""
    buffer = x.clone()
    codec.encode(buffer, cases.bucket_of(x, step=step))
    return buffer


def draws_at_all(codec: Codec) -> bool:
    """Return whether the error of one tensor differs between steps, that is, is random."""
    errors = [left(codec, cases.tensors(221)["normal"], step) for step in range(4)]
    return not all(torch.equal(errors[0], other) for other in errors)


def decoded(codec: Codec, payload: Payload, like: Tensor, step: int = 0) -> Tensor:
    """Return the decoded payload."""
    out = torch.zeros_like(like)
    codec.decode(payload, out, 1.0, cases.bucket_of(like, step=step))
    return out
