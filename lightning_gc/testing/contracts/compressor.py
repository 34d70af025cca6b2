"""Test the laws of compressors, one test each (CompressorContract)."""

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gc.compressors import Codec, Collective, Compressor, SparseCodec
from lightning_gc.compressors.sparsifiers import sparse_codec
from lightning_gc.core import Bucket, Payload, wire
from lightning_gc.engine.compatibility import combine
from lightning_gc.engine.engine import compressor_state
from lightning_gc.memories import ErrorFeedback, NoMemory
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.cases import (
    EXCHANGE,
    apart,
    broken,
    named,
    telling,
    unequal,
)
from lightning_gc.testing.contracts.decoder import DecoderContract, codecs, with_liar
from lightning_gc.testing.contracts.recovery import RecoveryContract
from lightning_gc.testing.lockstep import Lockstep

SHAPE = (17, 13)


class CollectiveContract:
    """Tests compressors that run their own communication. Part of ``CompressorContract``.

    Attributes:
        instances: compressors to test, without the codecs among them.
        conversations: number of rounds with a worker that sends damaged payloads.
    """

    instances: tuple[Compressor, ...] = ()
    conversations: int = 25

    def pytest_generate_tests(self, metafunc: Any) -> None:
        collectives = [c for c in self.instances if isinstance(c.method, Collective)]
        cases.parametrize(metafunc, collective=collectives, several=(1, 2, 3))

    def test_collective_1_takes_and_leaves_the_rest(
        self, collective: Compressor, several: int
    ) -> None:
        """The result plus the mean error is the mean gradient."""
        if not collective.traits.conserves:
            return
        for kind in ("normal", "heavy tails", "constant", "one element", "zeros", "tiny"):
            given_ = [cases.tensors(221)[kind].roll(i).view(SHAPE) for i in range(several)]
            mean, errors = exchanged(collective, given_)
            wanted = torch.stack(given_).double().mean(0)
            left = torch.stack(errors).double().mean(0)
            scale = 1e-5 * float(torch.stack(given_).abs().max())
            total = mean.double() + left
            gap = apart(total, wanted, rtol=1e-4, atol=scale)
            what = f"the result and the mean error do not sum to the mean gradient: {gap}"
            if gap is not None and not any(error.any() for error in errors):
                what += "; no worker's buffer holds what it did not send"
            on = f"{named(kind, 221)} and {several} workers"
            assert gap is None, broken(collective, "law 1", what, on)

    def test_collective_3_keeps_its_bound(self, collective: Compressor) -> None:
        for kind, flat in cases.tensors(221).items():
            bound = collective.bound(221)
            allowed = bound.allowed(float(flat.double().square().sum()))
            errors = [
                exchanged(collective, [flat.view(SHAPE)], seed)[1][0].double().square().sum()
                for seed in range(24)
            ]
            excess, on = cases.excess(errors, allowed, 1e-4), named(kind, 221)
            assert excess is None, broken(collective, "law 3", f"{excess} by {bound!r}", on)

    def test_collective_3_unbiased_if_declared(self, collective: Compressor) -> None:
        if not collective.traits.unbiased:
            return
        flat = cases.tensors(221)["normal"]
        given_ = [flat.view(SHAPE), flat.flip(0).view(SHAPE)]
        wanted = torch.stack(given_).double().mean(0)
        mean = cases.unbiased(lambda seed: exchanged(collective, given_, seed)[0], wanted, 200)
        what = "traits say unbiased, but the mean of 200 results is not the mean gradient"
        assert mean, broken(collective, "law 3", what, f"{named('normal', 221)} and 2 workers")

    def test_collective_4_knob_moves_bytes_in_its_direction(self, collective: Compressor) -> None:
        gradient = torch.randn(64, 64, generator=cases.generator(4))

        def size(turned: Compressor) -> int:
            lockstep = Lockstep(2, turned, NoMemory())
            for _ in range(3):  # the first steps may be dense
                last = lockstep.step([{"w": gradient}] * 2)
            return last.wire_bytes[0]

        cases.turns(collective, size, 16)

    def test_collective_6_randomness_is_private(self, collective: Compressor) -> None:
        gradient = cases.tensors(221)["normal"].view(SHAPE)

        def run(seed: int) -> Sequence[Tensor]:
            mean, errors = exchanged(collective, [gradient, -2 * gradient], seed)
            return [mean, *errors]

        cases.private(collective, run)

    def test_collective_7_trusts_no_bytes(self, collective: Compressor) -> None:
        with_liar(collective, lambda: Lockstep(3, collective), self.conversations)


def exchanged(
    compressor: Compressor, gradients: list[Tensor], seed: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Return the mean of an exchange without a memory, and each worker's error.

    It is the first exchange that compresses; earlier ones, of the same gradients, are dense.
    """
    lockstep = Lockstep(len(gradients), compressor, NoMemory(), seed=seed)
    with telling(compressor, EXCHANGE, f"a parameter of {SHAPE} and {len(gradients)} workers"):
        for _ in range(compressor.compressing_step(0) + 1):
            result = lockstep.step([{"w": gradient} for gradient in gradients])
    return result.mean["w"], [error["w"] for error in result.errors]


class CodecContract:
    """Tests codecs, then exchanges of any compressor. Part of ``CompressorContract``."""

    # Laws of the codec's arithmetic.

    def test_1_takes_and_leaves_the_rest(self, codec: Codec, numel: int) -> None:
        """``decode(encode(x)) + x_after == x_before``."""
        for kind, x in cases.tensors(numel).items():
            on = named(kind, numel)
            if isinstance(codec, SparseCodec):
                ascending(codec, x, on)
            payload, sent, buffer = conversed(codec, x, "law 1", on)
            rounding = 1e-6 * float(sent.abs().max())  # of x − C(x) + C(x), whatever x is
            gap = apart(sent + buffer, x, rtol=1e-5, atol=rounding)
            what = f"what decode adds and what encode left in the buffer do not sum to x: {gap}"
            if torch.equal(buffer, x):
                what = "encode left in the buffer what it sent; subtract that from it, in place"
            assert gap is None, broken(codec, "law 1", what, on)
            storages = {t.untyped_storage().data_ptr() for t in payload if t.numel()}
            what = "the payload shares memory with the buffer, which is overwritten; send a copy"
            apart_from_it = buffer.untyped_storage().data_ptr() not in storages
            assert apart_from_it, broken(codec, "law 1", what, on)

    def test_2_adds(self, codec: Codec, numel: int) -> None:
        x = cases.tensors(numel)["normal"]
        bucket, on = cases.bucket_of(x), named("normal", numel)
        payload, once, _ = conversed(codec, x, "law 2", on)
        out = torch.full_like(x, 5.0)
        codec.decode(payload, out, 2.0, bucket)
        codec.decode(payload, out, 1.0, bucket)
        gap = apart(out, 5.0 + 3.0 * once, rtol=1.3e-6, atol=1e-5)
        what = f"decode does not add scale times the payload to what out holds: {gap}"
        assert gap is None, broken(codec, "law 2", what, on)

    def test_3_keeps_its_bound(self, codec: Codec, numel: int) -> None:
        draws = 64 if draws_at_all(codec) else 1
        for kind, x in cases.tensors(numel).items():
            on, bound = named(kind, numel), codec.bound(numel)
            allowed = bound.allowed(float(x.double().square().sum()))
            with telling(codec, "law 3", on):
                errors = [left(codec, x, step).double().square().sum() for step in range(draws)]
            excess = cases.excess(errors, allowed, 1e-5)
            assert excess is None, broken(codec, "law 3", f"{excess} by {bound!r}", on)

    def test_3_unbiased_if_declared(self, unbiased: Codec) -> None:
        x, on = cases.tensors(221)["normal"], named("normal", 221)

        def draw(step: int) -> Tensor:
            return conversed(unbiased, x, "law 3", f"{on} in step {step}", step)[1]

        what = "traits say unbiased, but the mean of 400 draws is not the tensor"
        mean = cases.unbiased(draw, x, 400)
        assert mean, broken(unbiased, "law 3", what, on)

    def test_3_linear_if_declared(self, linear: Codec) -> None:
        xs = [cases.tensors(221)[kind] for kind in ("normal", "heavy tails", "constant")]
        made = [conversed(linear, x, "law 3", "tensors of 221 elements") for x in xs]
        payloads = [payload for payload, _, _ in made]
        averaged = tuple(torch.stack(parts).mean(0) for parts in zip(*payloads, strict=True))
        separately = torch.stack([sent for _, sent, _ in made]).mean(0)
        gap = apart(decoded(linear, averaged, xs[0]), separately, rtol=1.3e-6, atol=1e-5)
        what = f"traits say linear, but the mean of payloads decodes to something else: {gap}"
        assert gap is None, broken(linear, "law 3", what)

    def test_3_sends_what_it_chooses(self, sparse: SparseCodec, numel: int) -> None:
        """``encode`` sends the chosen elements, as payloads of several parameters do."""
        law, own = "law 3", "parameters that share a payload do not call it; derive from Codec"
        what = f"flow is overridden, but {own}"
        assert type(sparse).flow is Codec.flow, broken(sparse, law, what)
        for kind, x in cases.tensors(numel).items():
            before, on = x.clone(), named(kind, numel)
            chosen = ascending(sparse, x, on)
            what = f"choose changed the buffer: {unequal(x, before)}"
            assert torch.equal(x, before), broken(sparse, law, what, on)
            rest, wanted = x.clone(), torch.zeros_like(x)
            _, sent, whole = conversed(sparse, x, law, on)
            sparse_codec.add(sparse_codec.take(rest, chosen, sparse.sent_dtype), wanted, 1.0)
            what = f"encode sends other values than the chosen ones: {unequal(sent, wanted)}; {own}"
            assert torch.equal(sent, wanted), broken(sparse, law, what, on)
            what = f"encode leaves another error than the chosen values: {unequal(whole, rest)}"
            assert torch.equal(whole, rest), broken(sparse, law, what, on)

    def test_4_knob_moves_bytes_in_its_direction(self, codec: Codec) -> None:
        """Measured on a matrix of 64 x 64."""
        x = cases.tensors(4096)["normal"]

        def size(turned: Codec) -> int:
            payload = turned.encode(x.clone(), cases.bucket_of(x))
            return sum(t.numel() * t.element_size() for t in payload)

        cases.turns(codec, size)

    def test_5_payloads_are_as_declared(self, codec: Codec, numel: int) -> None:
        """Number, dtypes and lengths of tensors are as ``wire`` declares, for all values.

        A class may choose by the step, so each tensor is encoded in two steps.
        """
        for other, (kind, x) in enumerate(cases.tensors(numel).items(), 1):
            for step in (0, other):
                on = f"{named(kind, numel)} in step {step}"
                with telling(codec, "law 5", on):
                    payload = codec.encode(x.clone(), cases.bucket_of(x, step=step))
                as_declared(codec, payload, numel, on)

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
            what = f"in step {step} workers send lengths {sorted(seen)}; say varies='worker'"
            assert len(seen) == 1, broken(codec, "law 5", what, f"{numel} elements")

    def test_5_tensors_of_no_elements(self, codec: Codec) -> None:
        """A payload of an empty tensor is as declared, and decodes to nothing."""
        for shape in cases.EMPTY:
            x, on = torch.zeros(0), f"a tensor of shape {shape}"
            bucket = Bucket(x.clone(), {"w": shape}, step=0, seed=1, worker=0, workers=1)
            with telling(codec, "law 5", on):
                payload, declared = codec.encode(x, bucket), codec.wire(0)
                codec.decode(payload, torch.zeros(0), 1.0, bucket)
                codec.bound(0)
            lengths = [tensor.numel() for tensor in payload]
            what = f"encode returned {lengths} elements, not {declared!r}"
            is_so = len(payload) == len(declared) and all(
                n <= field.length and (field.varies != "no" or n == field.length)
                for n, field in zip(lengths, declared, strict=True)
            )
            assert is_so, broken(codec, "law 5", what, on)

    def test_6_randomness_is_private(self, codec: Codec) -> None:
        x = cases.tensors(221)["normal"]
        cases.private(codec, lambda step: codec.encode(x.clone(), cases.bucket_of(x, step=step)))

    # Laws of the whole synchronisation.

    def test_nothing_is_lost(
        self, conserving: Compressor, workers: int, dtype: torch.dtype
    ) -> None:
        """Conservation over 20 steps, while the order of the bucket changes at every step.

        With the compressor's default memory; if that does not conserve, with ``ErrorFeedback`` for
        biased and ``NoMemory`` for unbiased compressors.
        """
        compressor = conserving
        _, memory, _ = combine(compressor)
        if memory.buffers and not memory.conserves:
            memory = NoMemory() if compressor.traits.unbiased else ErrorFeedback()
        lockstep, on = Lockstep(workers, compressor, memory), f"{workers} workers in {dtype}"
        with telling(compressor, EXCHANGE, f"{on}, parameters of shapes {cases.SHAPES}"):
            lost = cases.lost(lockstep, 20, dtype)
        what = f"after 20 steps {lost:.2g} of the gradient is neither applied nor in {memory!r}"
        kept = lost < cases.TOLERANCE[dtype]
        assert kept, broken(compressor, EXCHANGE, what, on)

    def test_zeros_stay_zeros(self, compressor: Compressor, workers: int) -> None:
        zeros = [{n: torch.zeros(s) for n, s in cases.SHAPES.items()} for _ in range(workers)]
        with telling(compressor, EXCHANGE, f"zeros of {workers} workers"):
            result = Lockstep(workers, compressor).step(zeros)
        for flat, said in (
            (cases.flat(result.mean), "the mean of zeros is not zero"),
            (cases.mean(result.errors), "zeros leave an error"),
        ):
            what = f"{said}: up to {float(flat.abs().max()):.2g}"
            assert not flat.any(), broken(compressor, EXCHANGE, what, f"{workers} workers")

    def test_parameters_of_no_elements(self, compressor: Compressor, workers: int) -> None:
        """Alone, and with another parameter."""
        for shape in cases.EMPTY:
            for others in ((), ("matrix",)):
                lockstep, on = Lockstep(workers, compressor), f"{workers} workers, shape {shape}"
                for step in range(2):
                    given = [
                        {"empty": torch.zeros(shape)} | {name: made[name] for name in others}
                        for made in cases.gradients(workers, step)
                    ]
                    with telling(compressor, EXCHANGE, on):
                        result = lockstep.step(given)
                    what = f"the mean of it has the shape {tuple(result.mean['empty'].shape)}"
                    same = result.mean["empty"].shape == shape
                    assert same, broken(compressor, EXCHANGE, what, on)

    def test_absent_gradient_leaves_its_error_alone(
        self, compressor: Compressor, workers: int
    ) -> None:
        lockstep = Lockstep(workers, compressor)
        if not lockstep.engines[0].memory.buffers:
            return
        on = f"a parameter without a gradient and {workers} workers"
        with telling(compressor, EXCHANGE, on):
            lockstep.step(cases.gradients(workers, 0))
        before = [engine.errors()["matrix"].clone() for engine in lockstep.engines]
        following = cases.gradients(workers, 1)
        for gradient in following:
            gradient["matrix"] = torch.zeros(cases.SHAPES["matrix"])
        with telling(compressor, EXCHANGE, on):
            result = lockstep.step(following)
        what = "it sends something of it, which DDP may throw away"
        assert not result.mean["matrix"].any(), broken(compressor, EXCHANGE, what, on)
        for engine, kept in zip(lockstep.engines, before, strict=True):
            gap = unequal(engine.errors()["matrix"], kept)
            what = f"its error is not what it was: {gap}"
            assert gap is None, broken(compressor, EXCHANGE, what, on)

    def test_non_finite_is_seen_by_all_and_remembered_by_none(
        self, compressor: Compressor, workers: int
    ) -> None:
        """One non-finite element on one worker makes all results non-finite, but no error."""
        for bad in (float("nan"), float("inf"), float("-inf")):
            lockstep, on = Lockstep(workers, compressor), f"{bad} on one of {workers} workers"
            spoiled = cases.gradients(workers, 1)
            spoiled[-1]["prime"][50] = bad
            with telling(compressor, EXCHANGE, on):
                lockstep.step(cases.gradients(workers, 0))
                result = lockstep.step(spoiled)
            what = "all means are finite: nobody sees it"
            seen = not all(mean.isfinite().all() for mean in result.mean.values())
            assert seen, broken(compressor, EXCHANGE, what, on)
            for engine in lockstep.engines:
                for name, error in engine.errors().items():
                    what = f"the error of {name} is no longer finite"
                    assert error.isfinite().all(), broken(compressor, EXCHANGE, what, on)
            with telling(compressor, EXCHANGE, on):
                after = lockstep.step(cases.gradients(workers, 2))
            what = "the mean of the step after it is not finite"
            assert cases.flat(after.mean).isfinite().all(), broken(compressor, EXCHANGE, what, on)

    def test_3_keeps_what_it_declares(self, compressor: Compressor) -> None:
        """``bucket.state`` has, per parameter and level, what ``keeps`` declares."""
        lockstep, knob = Lockstep(2, compressor), compressor.knob
        for step in range(8):
            on = f"2 workers in step {step}"
            if knob is not None and step in (3, 6):
                for engine in lockstep.engines:
                    engine.levels.set(knob.low if step == 3 else knob.high)
            given = cases.gradients(2, step)
            with telling(compressor, EXCHANGE, on):
                lockstep.step(given)
            shapes = {name: tuple(grad.shape) for name, grad in given[0].items()}
            structure = compressor_state(compressor, shapes)
            for engine in lockstep.engines:
                try:
                    structure.check(engine.state_dict()["compressor"], "bucket.state")
                except ValueError as error:
                    what = f"{error}; let `keeps(shape)` return what is kept"
                    raise AssertionError(broken(compressor, "law 3", what, on)) from error

    def test_configuration_is_a_value(self, compressor: Compressor) -> None:
        copy = pickle.loads(pickle.dumps(compressor))  # noqa: S301 - our own bytes
        kind = type(compressor).__name__
        what = f"a pickled copy, {copy!r}, is not equal to it; {kind} must be a dataclass"
        assert copy == compressor, broken(compressor, "what configurations keep", what)
        what = "a pickled copy has another hash"
        assert hash(copy) == hash(compressor), broken(compressor, "what configurations keep", what)
        frozen = type(compressor).__dataclass_params__.frozen  # type: ignore[attr-defined]
        what = f"{kind} can be changed; decorate it with @dataclass(frozen=True)"
        assert frozen, broken(compressor, "what configurations keep", what)


class CompressorContract(RecoveryContract, DecoderContract, CollectiveContract, CodecContract):
    """Tests compressors against their declarations.

    Pytest takes the last base class first, so laws are tested in the order of their numbers.

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


def conversed(
    codec: Codec, x: Tensor, law: str, on: str, step: int = 0
) -> tuple[Payload, Tensor, Tensor]:
    """Return a tensor's payload, what decodes from it, and what ``encode`` left in the buffer."""
    buffer = x.clone()
    with telling(codec, law, on):
        payload = codec.encode(buffer, cases.bucket_of(x, step=step))
        as_declared(codec, payload, x.numel(), on)  # else the decoder calls it damaged
        return payload, decoded(codec, payload, x, step), buffer


def as_declared(codec: Codec, payload: Payload, numel: int, on: str) -> None:
    """Assert law 5 for a payload."""
    declared = codec.wire(numel)
    what = f"encode returned {len(payload)} tensors, wire declares {len(declared)}"
    assert len(payload) == len(declared), broken(codec, "law 5", what, on)
    for tensor, field in zip(payload, declared, strict=True):
        sent = tensor.numel()
        is_so = tensor.dim() == 1 and tensor.dtype == field.dtype and sent <= field.length
        is_so = is_so and (field.varies != "no" or sent == field.length)
        what = f"{field.name!r} is {tuple(tensor.shape)} {tensor.dtype}, not {field!r}"
        if isinstance(codec, SparseCodec):
            what += (
                f": choose returned {payload[0].numel()} positions, where most({numel}) is "
                f"{codec.most(numel)} and ragged is {codec.ragged}"
            )
        assert is_so, broken(codec, "law 5", what, on)


def ascending(sparse: SparseCodec, x: Tensor, on: str) -> Tensor:
    """Return the positions that are chosen; assert that they ascend."""
    with telling(sparse, "law 3", on):
        chosen = sparse.choose(x, cases.bucket_of(x))
    what = f"choose returned positions that do not ascend: {chosen.tolist()[:20]}"
    assert (chosen[1:] > chosen[:-1]).all(), broken(sparse, "law 3", what, on)
    return chosen


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
