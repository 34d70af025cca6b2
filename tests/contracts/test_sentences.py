"""What a contract says of a plug-in that breaks a law: who, which law, for what, what happened."""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import Phase, settings
from torch import Tensor

import lightning_gc.testing.contracts as contracts
from lightning_gc import AllGather, ErrorFeedback, TopK
from lightning_gc.compressors import Codec, Contraction, Knob, Traits
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Flow, Payload
from lightning_gc.core.wire import Field, Wire
from lightning_gc.memories.base import GradientExchange
from lightning_gc.testing.contracts import CompressorContract, MemoryContract, SchemeContract
from tests.contracts.test_plugins import BlockMeans


@dataclass(frozen=True)
class Largest(Codec):
    """Send the greatest element and its position; keeps all laws."""

    spare: int = 1

    @property
    def traits(self) -> Traits:
        return Traits("sparsifier", knob=Knob("spare", 1, 8, more="bytes", integer=True))

    def wire(self, numel: int) -> Wire:
        position = Field("position", torch.int64, self.spare, note="and spare ones")
        return position, Field("value", torch.float32, 1)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        at = buffer.abs().argmax().view(1)
        value = buffer[at].float()
        buffer[at] -= value
        return at.repeat(self.spare), value

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        at, value = payload
        if not 0 <= int(at[0]) < out.numel():
            raise ValueError(f"The payload names position {int(at[0])}, which is not there.")
        out[at[0]] += scale * value[0]

    def bound(self, numel: int) -> Contraction:
        return Contraction(1 / numel)


class LeavesAll(Largest):
    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        return super().encode(buffer.clone(), bucket)


class LeavesHalf(Largest):
    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        at, value = super().encode(buffer, bucket)
        buffer[at[0]] += value[0] / 2
        return at, value


class FailsAlone(Largest):
    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        assert torch.is_tensor(buffer)
        buffer[1:2].topk(1)  # nothing there where there is one element
        return super().encode(buffer, bucket)


class Unpacks(Largest):
    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        one, two = buffer[:1]  # a mistake of the author's
        return super().encode(one + two, bucket)


class Overwrites(Largest):
    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        out.zero_()
        super().decode(payload, out, scale, bucket)


class Boasts(Largest):
    def bound(self, numel: int) -> Contraction:
        return Contraction(1.0)


class WrongInMatrices(Largest):
    """Sends the smallest element where a parameter has rows."""

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        if len(bucket.shape) < 2:
            return super().encode(buffer, bucket)
        at = buffer.abs().argmin().view(1)
        value = buffer[at].float()
        buffer[at] -= value
        return at, value


class TurnsBackwards(Largest):
    @property
    def traits(self) -> Traits:
        return Traits("sparsifier", knob=Knob("spare", 1, 8, more="compression", integer=True))


class Undeclared(Largest):
    def wire(self, numel: int) -> Wire:
        position, value = super().wire(numel)
        return position, Field("value", torch.float64, value.length)


class Draws(Largest):
    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        at, value = super().encode(buffer, bucket)
        torch.rand(1)
        return at, value


class SendsOtherValues(TopK):
    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        values, coded = super().encode(buffer, bucket)
        return 2 * values, coded


class SendsElsewhere(TopK):
    def flow(self, *given: Any) -> Flow:
        yield from super().flow(*given)


class SendsOthersNext(TopK):
    """Takes turns, and forgets that the number of elements then varies with the step."""

    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        return torch.arange(buffer.numel())[bucket.step % 10 :: 10]

    def most(self, numel: int) -> int:
        return -(-numel // 10)


class Unsorted(SendsOthersNext):
    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        return torch.arange(0, buffer.numel(), 10).flip(0)


class PartsReplicas(BlockMeans):
    def rounds(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        yield from super().rounds(bucket, buffer, out)
        out.add_(bucket.worker)


class Trusts(Largest):
    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        at, value = payload
        out[at[0]] += scale * value[0]


class Mumbles(Largest):
    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        if not 0 <= int(payload[0][0]) < out.numel():
            raise ValueError("bad")
        super().decode(payload, out, scale, bucket)


class KeepsNaN(BlockMeans):
    kept: ClassVar[Tensor] = torch.zeros(())

    def rounds(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        yield from super().rounds(bucket, buffer, out)
        self.kept.add_(out.sum() * 0)
        out.add_(self.kept)


class LosesErrors(BlockMeans):
    def rounds(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        yield from super().rounds(bucket, buffer, out)
        buffer.zero_()


class Forgets(ErrorFeedback):
    def flow(self, bucket: Bucket, state: Mapping[str, Tensor], exchange: GradientExchange) -> Flow:
        yield from exchange(state["error"].copy_(bucket.grad))


class Adds(ErrorFeedback):
    def flow(self, bucket: Bucket, state: Mapping[str, Tensor], exchange: GradientExchange) -> Flow:
        bucket.grad.add_(state["error"])
        yield from exchange(state["error"].copy_(bucket.grad))


class Pushes(ErrorFeedback):
    def flow(self, bucket: Bucket, state: Mapping[str, Tensor], exchange: GradientExchange) -> Flow:
        yield from exchange(state["error"].add_(bucket.grad).add_(0.5))


class Twice(ErrorFeedback):
    def flow(self, bucket: Bucket, state: Mapping[str, Tensor], exchange: GradientExchange) -> Flow:
        yield from exchange(state["error"].add_(bucket.grad))
        yield from exchange(state["error"])


class Sums(AllGather):
    def flow(self, codec: Any, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        yield from super().flow(codec, bucket, buffer, out)
        out.mul_(2)


law = CompressorContract()
memory = MemoryContract()
TOP_K = TopK(0.1)

BROKEN: dict[Callable[[], None], str] = {
    lambda: law.test_1_takes_and_leaves_the_rest(LeavesAll(), 19): (
        r"LeavesAll\(spare=1\) breaks law 1 for 'normal' of 19 elements: encode left in the buffer "
        r"what it sent"
    ),
    lambda: law.test_1_takes_and_leaves_the_rest(LeavesHalf(), 19): (
        r"law 1 for 'normal' of 19 .* do not sum to x: element \d+ is .* where it should be"
    ),
    lambda: law.test_2_adds(Overwrites(), 19): "law 2 .* decode does not add scale times",
    lambda: law.test_3_keeps_its_bound(Boasts(), 19): (
        r"law 3 for 'normal' of 19 elements: the squared error is .*, where bound\(\) allows 0 by "
        r"Contraction\(delta=1.0\)"
    ),
    lambda: law.test_3_keeps_its_bound(WrongInMatrices(), 221): (
        "law 3 for 'normal' of 221 elements, 17 x 13: the squared error"
    ),
    lambda: law.test_3_sends_what_it_chooses(SendsOtherValues(0.1), 19): (
        "law 3 for 'normal' of 19 elements: encode sends other values than the chosen ones: element"
    ),
    lambda: law.test_3_sends_what_it_chooses(SendsElsewhere(0.1), 19): (
        "law 3: flow is overridden, but parameters that share a payload do not call it"
    ),
    lambda: law.test_4_knob_moves_bytes_in_its_direction(TurnsBackwards()): (
        r"law 4: Knob\('spare', more='compression'\) .* of 12, .*, 68 bytes: the other direction"
    ),
    lambda: law.test_5_payloads_are_as_declared(Undeclared(), 19): (
        r"law 5 .*'value' is \(1,\) torch.float32, not Field"
    ),
    lambda: law.test_5_payloads_are_as_declared(SendsOthersNext(0.1), 101): (
        "law 5 for 'normal' of 101 elements in step 1: 'values' .* choose returned 10 positions, "
        r"where most\(101\) is 11 and ragged is False"
    ),
    lambda: law.test_nothing_is_lost(SendsOthersNext(0.1), 2, torch.float32): (
        "breaks a law of exchanges for 2 workers .* nothing has damaged is refused: .* shapes"
    ),
    lambda: law.test_8_recovers_from_finite_spikes(SendsOthersNext(0.1)): (
        "law 8 for one element of 1e38 on 1 of 2 workers.* nothing has damaged is refused"
    ),
    lambda: law.test_1_takes_and_leaves_the_rest(Unsorted(0.1), 19): (
        r"law 3 for 'normal' of 19 elements: choose returned positions that do not ascend: \[10, 0"
    ),
    lambda: law.test_2_adds(Unsorted(0.1), 101): "law 2 for .* nothing has damaged is refused",
    lambda: law.test_6_randomness_is_private(Draws()): "law 6: it drew from torch's global",
    lambda: law.test_7_trusts_no_bytes(Trusts()): (
        "law 7 for a damaged payload .*: IndexError in decode: .* raise ValueError with a sentence"
    ),
    lambda: law.test_7_trusts_no_bytes(Mumbles()): "law 7 .*'bad', does not say what is wrong",
    lambda: law.test_nothing_is_lost(LosesErrors(), 2, torch.float32): (
        "breaks a law of exchanges for 2 workers .*: after 20 steps .* neither applied nor in"
    ),
    lambda: law.test_collective_1_takes_and_leaves_the_rest(LosesErrors(), 2): (
        "law 1 for 'normal' of 221 elements, 17 x 13 and 2 workers: .* holds what it did not send"
    ),
    lambda: law.test_8_recovers_from_a_liar(KeepsNaN()): "law 8 for nan in all of message 0 .*:",
    lambda: memory.test_1_nothing_is_lost(Forgets(), TOP_K, 2, torch.float32): (
        "law 1 for TopK.* and 2 workers .*: after 20 steps .* of the gradient is neither"
    ),
    lambda: memory.test_2_gradient_is_left_alone(Adds()): "law 2: flow changed the gradient",
    lambda: memory.test_2_gradient_is_left_alone(Twice()): "law 2: flow calls exchange 2 times",
    lambda: memory.test_3_zeros_stay_zeros(Pushes()): "law 3 .*: it exchanges up to 0.5",
    lambda: SchemeContract().test_1_what_a_scheme_rounds_away_is_booked(Sums(), TOP_K, 2): (
        r"Sums\(\) breaks law 1 for TopK"
    ),
    lambda: SchemeContract().test_2_without_compression_it_is_the_mean(Sums(), 2): (
        "law 2 .*: the result is not the mean: element"
    ),
}


@pytest.fixture(autouse=True)
def _first_find_will_do() -> Iterator[None]:
    """Hypothesis looks for the smallest payload that breaks a law, for seconds."""
    settings.register_profile("first find", phases=[Phase.generate])
    settings.load_profile("first find")
    yield
    settings.load_profile("default")


@pytest.mark.parametrize(("break_it", "sentence"), BROKEN.items(), ids=range(len(BROKEN)))
def test_a_broken_law_is_a_sentence(break_it: Callable[[], None], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence) as caught:
        break_it()
    first, *_ = str(caught.value).splitlines()
    assert first.endswith("."), first


def test_a_value_error_of_the_plug_in_is_no_refused_message() -> None:
    with pytest.raises(ValueError, match=r"^not enough values to unpack") as caught:
        law.test_1_takes_and_leaves_the_rest(Unpacks(), 19)
    (note,) = caught.value.__notes__
    assert "while law 1 was tested for 'normal' of 19 elements" in note


def test_an_exception_of_the_plug_in_says_for_which_input() -> None:
    with pytest.raises(RuntimeError) as caught:
        law.test_1_takes_and_leaves_the_rest(FailsAlone(), 1)
    assert caught.value.__notes__ == [
        "Raised by FailsAlone(spare=1) while law 1 was tested for 'normal' of 1 element."
    ]


def test_laws_are_tested_in_their_order() -> None:
    """Else an author first meets a late law, with a message that looks damaged."""
    order = [each.__name__ for each in reversed(CompressorContract.__mro__[1:-1])]
    assert order[0] == "CodecContract"
    assert order[-1] == "RecoveryContract"


def test_parted_replicas_say_which_law_was_tested() -> None:
    with pytest.raises(AssertionError, match="Worker 1's mean differs") as caught:
        law.test_zeros_stay_zeros(PartsReplicas(), 2)
    (note,) = caught.value.__notes__
    assert "a law of exchanges was tested for zeros of 2 workers" in note


def test_every_assertion_of_a_contract_speaks() -> None:
    """Assertions outside of test files are not rewritten by pytest, and say nothing themselves."""
    for file in Path(contracts.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            silent = isinstance(node, ast.Assert) and node.msg is None
            assert not silent, f"{file.name}:{getattr(node, 'lineno', 0)} says nothing"


@pytest.mark.nightly
class TestLargest(CompressorContract):
    """The unbroken one keeps them all."""

    instances = (Largest(),)
