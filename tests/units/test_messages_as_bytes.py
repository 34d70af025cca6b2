"""``pack`` and ``unpack``: any method as bytes, with its errors; and bytes that nobody trusts."""

import json
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_gc import COMPRESSORS, QSGD, GTopK, PowerSGD, Sender, TopK, pack, unpack
from lightning_gc.compressors import Compressor
from lightning_gc.memories import EF21, NoMemory
from lightning_gc.testing import Lockstep

INSTANCES = [instance for cls in COMPRESSORS.values() for instance in cls.examples()]
ALONE = [each for each in INSTANCES if type(each).__name__ not in ("GTopK", "GradiVeQ")]
SHAPES = {"weight": (40, 30), "bias": (7,), "scale": ()}


def drawn(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


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
    from lightning_gc import ErrorFeedback

    sender, sent, arrived = Sender(compressor, ErrorFeedback()), torch.zeros(()), torch.zeros(())
    for step in range(30):
        tensors = drawn(step)
        sent = sent + tensors["weight"]
        arrived = arrived + unpack(sender.pack(tensors), compressor)["weight"]
    left = sender.state_dict()["memory"]["weight"]["error"]
    torch.testing.assert_close(arrived + left.view(40, 30), sent, rtol=1e-4, atol=1e-4)


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
        (lambda: Sender(TopK(0.1), EF21()), "an estimate that all receivers need"),
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
        ({"step": 1 << 61, "shapes": [["w", [0]]]}, "so it is damaged"),
        ({"lengths": [[1, 1, 1, 1]]}, "do not fit its tensors"),
        ({"lengths": "abc"}, "do not fit its tensors"),
    ],
)
def test_a_header_that_lies_is_refused(change: dict[str, Any], said: str) -> None:
    header, payloads = opened(pack(drawn(0), TopK(0.1)))
    with pytest.raises(ValueError, match=said):
        unpack(signed(header | change, payloads), TopK(0.1))


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
