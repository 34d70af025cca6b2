"""``pack`` and ``unpack``: any method as bytes, with its errors; and bytes that nobody trusts."""

import json
import math
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_gc import (
    COMPRESSORS,
    MEMORIES,
    QSGD,
    AbsoluteRounding,
    GradZip,
    GTopK,
    Identity,
    PerParameter,
    PowerSGD,
    Sender,
    TopK,
    pack,
    unpack,
)
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.per_parameter import _plan, with_levels
from lightning_gc.memories import CSER, EF21, ErrorFeedback, Memory, NoMemory
from lightning_gc.testing import Lockstep

INSTANCES = [instance for cls in COMPRESSORS.values() for instance in cls.examples()]
ALONE = [each for each in INSTANCES if type(each).__name__ not in ("GTopK", "GradiVeQ")]
SHAPES = {"weight": (40, 30), "bias": (7,), "scale": ()}


ROUNDED = PerParameter(AbsoluteRounding(0.3))
SCALED = with_levels(ROUNDED, {"weight": 2.0}, dense=False)
STATE = Sender(TopK(0.1)).state_dict()


def drawn(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def test_modes_of_the_caller_change_no_message() -> None:
    """Errors that a message leaves in inference mode are added to outside of it."""
    sender, other = Sender(TopK(0.1)), Sender(TopK(0.1))
    alone, watched = Lockstep(1, TopK(0.1)), Lockstep(1, TopK(0.1))
    for step in range(3):
        data, mean = sender.pack(drawn(step)), alone.step([drawn(step)]).mean
        with torch.inference_mode(step % 2 == 0), torch.autocast("cpu", dtype=torch.bfloat16):
            assert other.pack(drawn(step)) == data
            read, found = unpack(data, TopK(0.1)), watched.step([drawn(step)]).mean
        for name, tensor in mean.items():
            assert torch.equal(found[name], tensor)
            assert not read[name].is_inference()


@pytest.mark.parametrize("compressor", ALONE, ids=str)
def test_a_message_has_the_bits_that_a_worker_alone_would_have(compressor: Compressor) -> None:
    """The reference is a simulated worker with the same errors, over three messages."""
    sender, alone = Sender(compressor), Lockstep(1, compressor)
    for step in range(3):
        tensors = drawn(step)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        found, expected = unpack(sender.pack(tensors), compressor), alone.step([tensors]).mean
        assert list(found) == list(SHAPES)
        for name, shape in SHAPES.items():
            assert found[name].shape == shape
            assert torch.equal(found[name].view(-1), expected[name].view(-1)), (step, name)
            assert torch.equal(tensors[name], before[name])


@pytest.mark.parametrize("compressor", [TopK(0.1), QSGD(4), PowerSGD(2)], ids=str)
def test_nothing_is_lost_over_many_messages(compressor: Compressor) -> None:
    """The sum of all tensors equals what has arrived and the error that the sender still has."""
    sender, sent, arrived = Sender(compressor, ErrorFeedback()), torch.zeros(()), torch.zeros(())
    for step in range(30):
        tensors = drawn(step)
        sent = sent + tensors["weight"]
        arrived = arrived + unpack(sender.pack(tensors), compressor)["weight"]
    left = sender.state_dict()["memory"]["weight"]["error"]
    torch.testing.assert_close(arrived + left.view(40, 30), sent, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "memory", [m for cls in MEMORIES.values() for m in cls.examples()], ids=str
)
def test_what_a_sender_packs_can_be_read_or_leaves_it_as_it_was(memory: Memory) -> None:
    """Some memories also send their errors every few steps; a receiver cannot know when."""
    try:
        sender = Sender(TopK(0.1), memory)
    except ValueError as error:
        assert "Give another memory" in str(error)  # noqa: PT017
        return
    for step in range(6):
        before = sender.state_dict()
        try:
            data = sender.pack(drawn(step))
        except ValueError:
            assert "every" in repr(memory)
            assert str(sender.state_dict()) == str(before)
            return
        assert unpack(data, TopK(0.1))["weight"].count_nonzero() == 120


@pytest.mark.parametrize(
    ("one", "other"),
    [(TopK(0.5), TopK(np.float64(0.5))), (PowerSGD(2), PowerSGD(2.0))],  # type: ignore[arg-type]
    ids=str,
)
def test_equal_compressors_read_each_other(one: Compressor, other: Compressor) -> None:
    assert one == other
    assert list(unpack(pack(drawn(0), one), other)) == list(SHAPES)


def test_messages_with_ever_new_names_do_not_stay_in_memory() -> None:
    data = pack(drawn(0), TopK(0.1))
    header, payloads = opened(data)
    for message in range(12):
        named = [[f"{message}.{name}" + 400_000 * "x", list(s)] for name, s in SHAPES.items()]
        unpack(signed(header | {"shapes": named}, payloads), TopK(0.1))
    assert _plan.cache_info().currsize <= 6


def test_a_sender_goes_on_from_its_saved_state() -> None:
    first = Sender(TopK(0.1))
    first.pack(drawn(0))
    other = Sender(TopK(0.1))
    other.load_state_dict(first.state_dict())
    assert other.pack(drawn(1)) == first.pack(drawn(1))


@pytest.mark.parametrize("name", ["gtopk", "gradiveq"])
def test_methods_whose_receivers_must_know_more_are_refused(name: str) -> None:
    """At the latest when the message would not tell all."""
    for compressor in COMPRESSORS[name].examples():
        messages = map(Sender(compressor).pack, map(drawn, range(8)))
        with pytest.raises(ValueError, match="needs other workers, or what its receivers know"):
            list(messages)


def test_without_a_state_errors_are_dropped() -> None:
    assert pack(drawn(0), TopK(0.1)) == pack(drawn(0), TopK(0.1))
    sender = Sender(TopK(0.1))
    first, second = (pack(drawn(0), TopK(0.1), sender) for _ in range(2))
    assert first == pack(drawn(0), TopK(0.1))
    assert len(first) == len(second)
    assert first != second


def test_rounding_errors_of_senders_with_other_seeds_average_out() -> None:
    tensors = {"w": torch.full((64, 64), 0.3)}
    tensors["w"][0, 0] = 1.0

    def error(seeds: list[int]) -> float:
        found = [unpack(Sender(QSGD(2), NoMemory(), s).pack(tensors), QSGD(2))["w"] for s in seeds]
        return float((torch.stack(found).mean(0) - tensors["w"]).norm())

    assert error(list(range(16))) < error([0] * 16) / 2


def test_it_sends_what_the_method_says() -> None:
    data = pack({"w": torch.randn(1000, 1000)}, TopK(0.01))
    assert len(data) < 4_000_000 / 70


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: pack({}, TopK(0.1)), "has nothing to send"),
        (lambda: pack({"w": torch.ones(2, dtype=torch.float64)}, TopK(0.1)), "takes float32"),
        (lambda: pack({"w": torch.tensor([1.0, float("nan")])}, TopK(0.1)), "w is not finite"),
        (lambda: pack({"w": torch.ones(8, 8)}, GTopK(0.1)), "needs other workers, or what its"),
        (lambda: pack({"w": torch.ones(8)}, "topkk"), "did you mean"),
        (lambda: pack({1: torch.ones(2)}, TopK(0.1)), "1 is not a text"),  # type: ignore[dict-item]
        (lambda: Sender(TopK(0.1), EF21()), "an estimate that all receivers need"),
        (lambda: Sender(TopK(0.1), CSER()), "the weights of a training loop"),
        (lambda: Sender(TopK(0.1), seed=-1), "a whole number from 0"),
        (lambda: Sender(TopK(0.1), seed="a"), "a whole number from 0"),  # type: ignore[arg-type]
        (lambda: Sender(Identity(), ErrorFeedback()).pack(drawn(0)), "with its own memory"),
        (lambda: pack(drawn(0), SCALED, Sender(ROUNDED)), "The sender compresses by"),
        (lambda: unpack(pack(drawn(0), SCALED), ROUNDED), "Give unpack the sender's compressor"),
        (lambda: Sender(TopK(0.1)).load_state_dict({}), "method is missing"),
        (lambda: Sender(TopK(0.1)).load_state_dict(STATE | {"step": 1 << 63}), "no sender reaches"),
        (lambda: Sender(TopK(0.1)).load_state_dict(STATE | {"memory": {"w": 3}}), "memory.w is"),
        (lambda: Sender(TopK(0.2)).load_state_dict(STATE), "The state is of"),
        (lambda: unpack(b"", TopK(0.1)), "0 bytes were not made by"),
        (lambda: unpack(b"x" * 50, TopK(0.1)), "50 bytes were not made by"),
    ],
)
def test_what_cannot_be_is_refused(act: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        act()


def signed(header: dict[str, Any], payloads: bytes) -> bytes:
    """Return a message with the right checksum for any header and payloads."""
    text = json.dumps(header).encode()
    body = struct.pack("<I", len(text)) + text + payloads
    return b"lgc\x01" + struct.pack("<I", zlib.crc32(body)) + body


def opened(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack_from("<I", data, 8)
    return json.loads(data[12 : 12 + length]), data[12 + length :]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 99}, "payloads of format 99"),
        ({"method": "TopK"}, "Give unpack the sender's compressor"),
        ({"step": -1}, "no step or seed"),
        ({"seed": 1 << 70}, "no step or seed"),
        ({"shapes": [["w", [1 << 40]]]}, "more than most_elements"),
        ({"shapes": [["w", [2]], ["w", [2]]]}, "one twice"),
        ({"shapes": [["w", [-2]]]}, "not what pack writes"),
        ({"shapes": [["w", [2.5]]]}, "not what pack writes"),
        ({"shapes": {}}, "names no tensors"),
        ({"shapes": [["w", [0, 1 << 61]]]}, "so it is damaged"),
        ({"shapes": [["w", [0, 1 << 61, 1 << 61]]]}, "not what pack writes"),
        ({"shapes": [["w", [0] + 63 * [1 << 61]]]}, "not what pack writes"),
        ({"step": 1 << 61, "shapes": [["w", [0]]]}, "so it is damaged"),
        ({"lengths": [[1, 1, 1, 1]]}, "do not fit its tensors"),
        ({"lengths": "abc"}, "do not fit its tensors"),
    ],
)
def test_a_header_that_lies_is_refused(change: dict[str, Any], said: str) -> None:
    header, payloads = opened(pack(drawn(0), TopK(0.1)))
    with pytest.raises(ValueError, match=said):
        unpack(signed(header | change, payloads), TopK(0.1))


@pytest.mark.parametrize("values", [(0.0, 3e38, 3e38, math.nan), (0.0, math.inf, 3e38, math.nan)])
def test_factors_that_cannot_be_solved_for_are_numbers_or_refused(values: Any) -> None:
    compressor = GradZip(4, min_ratio=0.0)
    header, _ = opened(pack({"w": torch.randn(33, 17)}, compressor))
    data = np.array([*values, *(200 * [0.0])], np.float32).tobytes()
    assert unpack(signed(header, data), compressor)["w"].shape == (33, 17)


def test_damage_is_noticed() -> None:
    data = pack(drawn(0), TopK(0.1))
    for place in (4, 9, 40, len(data) - 1):
        broken = bytearray(data)
        broken[place] ^= 1
        with pytest.raises(ValueError, match="damaged"):
            unpack(bytes(broken), TopK(0.1))
    with pytest.raises(ValueError, match="has version 2"):
        unpack(b"lgc\x02" + data[4:], TopK(0.1))
    header, payloads = opened(data)
    for wrong, said in ((payloads[:-16], "shorter"), (payloads + bytes(16), "longer")):
        with pytest.raises(ValueError, match=said):
            unpack(signed(header, wrong), TopK(0.1))


EXTREME = (0.0, 1.0, 3e38, 1e-45, math.inf, -math.inf, math.nan)


def fuzz(times: int, seed: int) -> int:
    """Read messages whose bytes were changed and whose checksums were made right again.

    Each ends in a ValueError or in finite or infinite numbers of the right shapes. Return how many
    were read.
    """
    draw, read = random.Random(seed), 0
    known = [(c, *opened(pack(drawn(0), c))) for c in ALONE]
    for _ in range(times):
        compressor, header, payloads = draw.choice(known)
        broken = bytearray(payloads)
        if len(broken) >= 64 and draw.random() < 0.2:
            at = 4 * draw.randrange(len(broken) // 4 - 4)
            broken[at : at + 16] = struct.pack("<4f", *draw.choices(EXTREME, k=4))
        for _ in range(draw.randint(1, 4)):
            if broken:
                broken[draw.randrange(len(broken))] = draw.randrange(256)
        if draw.random() < 0.2:
            header = json.loads(json.dumps(header))
            rows = header["lengths"]
            row = draw.choice(rows)
            if row:
                row[draw.randrange(len(row))] += draw.choice([-1, 1, 1 << 20])
        try:
            found = unpack(signed(header, bytes(broken)), compressor)
        except ValueError:
            continue
        read += 1
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == SHAPES
    return read


def test_prepared_messages_end_in_an_error_or_in_tensors() -> None:
    assert 0 < fuzz(600, 0) < 600


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 5))
def test_very_many_prepared_messages(seed: int) -> None:
    assert 0 < fuzz(50_000, seed) < 50_000


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    body = data + bytes(8)
    with pytest.raises(ValueError, match=r"damaged|not what pack writes|of format"):
        unpack(b"lgc\x01" + struct.pack("<I", zlib.crc32(body)) + body, TopK(0.1))
