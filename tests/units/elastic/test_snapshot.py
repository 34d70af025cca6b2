"""Snapshots: bytes that run nothing, damaged ones, strangers, and a worker's error handed over."""

import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gc import ErrorFeedback, TopK
from lightning_gc.elastic import snapshot
from lightning_gc.elastic.channel import HandshakeError, Seal
from lightning_gc.elastic.roll import Round
from lightning_gc.elastic.snapshot import Inheritance, from_bytes, timely_snapshot, to_bytes
from lightning_gc.elastic.sockets import Door, visiting
from lightning_gc.engine import Engine
from lightning_gc.local_steps import Elastic
from lightning_gc.transports.interfaces import host_and_port
from lightning_gc.transports.island import ALONE
from lightning_gc.transports.simulated import Simulated

TREE = {
    "a": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "b": {"c": [1, 2.5, None, True, "text"], "d": torch.zeros(0, 3), "e": torch.tensor(3)},
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[n], other[n]) for n in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def test_a_tree_comes_back() -> None:
    assert same(from_bytes(to_bytes(TREE)), TREE)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, len(to_bytes(TREE)) - 1), st.integers(1, 255))
def test_damaged_bytes_are_a_tree_or_refused(place: int, bits: int) -> None:
    data = bytearray(to_bytes(TREE))
    data[place] ^= bits
    with contextlib.suppress(ValueError):
        assert isinstance(from_bytes(data), dict)


@pytest.mark.parametrize(
    "metadata",
    [
        *(None, {}, {"tree": ""}, {"tree": "["}, {"tree": "[" * 100_000}),
        *({"tree": '{"a": {"": ' + number + "}}"} for number in ('"1"', "0", "[]")),
    ],
)
def test_files_without_a_tree_are_refused(metadata: Any) -> None:
    with pytest.raises(ValueError, match=r"bytes are not a tree: \w+Error"):
        from_bytes(safetensors.torch.save({"0": torch.zeros(1)}, metadata))


@pytest.mark.parametrize("tree", ["{}", '{"a": [{"b": "0"}]}'])
def test_tensors_that_no_tree_has_are_refused(tree: str) -> None:
    with pytest.raises(ValueError, match="1 tensors have no place"):
        from_bytes(safetensors.torch.save({"0": torch.zeros(1)}, {"tree": tree}))


@pytest.mark.parametrize(
    "said", ['"dtype":"F32","shape":[1099511627776]', '"dtype":"F4","shape":[1]']
)
def test_prepared_shapes_and_types_are_refused(said: str) -> None:
    data = safetensors.torch.save({"0": torch.zeros(1)}, {"tree": '{"a": {"": "0"}}'})
    head = data[8:-4].replace(b'"dtype":"F32","shape":[1]', said.encode())
    with pytest.raises(ValueError, match="bytes are not a tree"):
        from_bytes(len(head).to_bytes(8, "little") + head + data[-4:])


def test_what_is_no_plain_value_is_not_sent() -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        to_bytes({"a": object()})
    with pytest.raises(ValueError, match="complex128"):
        to_bytes({"a": torch.zeros(1, dtype=torch.complex128)})
    with pytest.raises(ValueError, match="share memory"):
        to_bytes({"a": (tensor := torch.zeros(2)), "b": tensor[1:]})


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door("127.0.0.1", (), Seal("secret"), 1 << 20, 5.0, lambda asked: {"asked": asked})
    yield made
    made.close()


def test_a_visitor_with_the_secret_is_answered(door: Door) -> None:
    with visiting(door.address, Seal("secret"), 1 << 20, 5.0) as ask:
        for number in range(3):
            answer = ask({"number": number, "a": torch.zeros(1 << 17)})
            assert answer["asked"]["number"] == number


def test_a_visitor_with_another_secret_is_sent_away(door: Door) -> None:
    named = pytest.raises(HandshakeError, match=r"the worker at .* has another secret")
    with visiting(door.address, Seal("another"), 1 << 20, 5.0) as ask, named:
        ask({})


def test_a_door_that_can_start_no_thread_answers_the_next_visitor(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    visit = visiting(door.address, Seal("secret"), 1 << 20, 5.0)
    with monkeypatch.context() as patched, visit as ask:
        patched.setattr(threading.Thread, "start", full)
        with pytest.raises(ConnectionError):
            ask({})
    assert "can't start new thread" in caplog.text
    with visiting(door.address, Seal("secret"), 1 << 20, 5.0) as ask:
        assert ask({}) == {"asked": {}}


def test_no_free_port_is_named() -> None:
    first = Door("127.0.0.1", (), Seal(None), 100, 1.0, dict)
    port = int(first.address.rpartition(":")[2])
    with pytest.raises(OSError, match=r"Elastic\(ports=...\)"):
        Door("127.0.0.1", (port,), Seal(None), 100, 1.0, dict)
    first.close()


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:x", "host:70000"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="give host and port"):
        host_and_port(address, "Elastic", "rendezvous")


def test_a_folder_begins_as_a_path() -> None:
    """Else a name with a slash would be made into a folder, or looked for as a host."""
    assert Elastic("./meeting/run").in_folder
    for text in ("meeting/run", "10.0.0.1:29400/run"):
        with pytest.raises(ValueError, match=r"or a folder that begins with /, \./ or ~"):
            Elastic(text)


def test_a_worker_lets_go_of_no_lock_that_its_door_holds() -> None:
    """The door copies a snapshot while the training thread ends a round that it never began."""
    inheritance = object.__new__(Inheritance)
    inheritance._still, inheritance._changing = threading.Lock(), False
    with inheritance._still:
        inheritance.release()
        assert inheritance._still.locked()


@pytest.mark.parametrize(
    ("committed", "members"), [((), ()), ((5,), (0, 1)), ((5,), (0, 2)), ((6,), (0, 1))]
)
def test_a_snapshot_ends_an_attempt_whose_verdict_was_not_read(
    committed: tuple[int, ...], members: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 keeps the error that the attempt has left only if the attempt was committed."""
    engine, place = (
        Engine(TopK(0.1), ErrorFeedback(), seed=0),
        {"round": 6, "position": 0, "steps": 42},
    )
    engine.begin_fit(revocable=True)

    def exchange() -> Tensor:
        Simulated(1).run([engine.flow(torch.randn(30), {"a": (30,)})])
        return engine.errors()["a"].clone()

    workers: Any = mock.MagicMock(names={}, first=engine)
    memberships: Any = [mock.MagicMock(island=ALONE, elastic=Elastic("host:1")) for _ in range(2)]
    memberships[0].member.roll = [Round(number, members) for number in committed]
    memberships[1].member.number = 1
    host, undo = torch.device("cpu"), partial(engine.undo, {})
    donor, worker = (Inheritance(workers, host, each, undo) for each in memberships)
    memberships[1].visit = lambda address: contextlib.nullcontext(donor.answer)
    monkeypatch.setattr(snapshot, "timely_snapshot", lambda *_: {"round": 6, "place": place})
    monkeypatch.setattr(snapshot, "place_of", lambda ask: place)
    monkeypatch.setattr(snapshot, "load_snapshot", lambda *_, **__: engine.loss_scaling.settle())
    worker.place = snapshot.Place(mock.MagicMock(), mock.MagicMock(), 0, True, False)

    engine.rounds.step = 4
    before = exchange()
    engine.advance()
    worker.hold()  # as the common weights are about to change
    after = exchange()
    assert worker.take("") == (6, 0, "kept")
    assert not worker._still.locked()
    assert not torch.equal(before, after)
    kept = after if committed == (5,) and 1 in members else before
    assert torch.equal(engine.errors()["a"], kept)


class Donor:
    """Who is asked: so many of its rounds end while a snapshot is on its way."""

    def __init__(self, late: int) -> None:
        self.late, self.round, self.asked = late, 5, list[str]()

    def __call__(self, said: Any) -> Any:
        self.asked.append(said["ask"])
        found = {"round": self.round}
        self.round += self.late > 0
        self.late -= 1
        return found

    def is_over(self, number: int) -> bool:
        return number < self.round


@pytest.mark.parametrize("late", [0, 1, 3])
def test_a_snapshot_of_a_round_that_is_over_is_asked_for_again(late: int) -> None:
    donor: Any = Donor(late)
    tree = timely_snapshot(donor, lambda tree: None, donor.is_over, 60.0, lambda: None)
    assert tree["round"] == 5 + late
    assert donor.asked == ["snapshot"] * (late + 1)


def test_a_round_that_is_shorter_than_a_snapshot_is_named() -> None:
    donor: Any = Donor(1000)
    with pytest.raises(RuntimeError, match="raise every"):
        timely_snapshot(donor, lambda tree: None, donor.is_over, 0.0, lambda: None)


@pytest.mark.parametrize(("silent", "heirs"), [("place", [2]), ("error", [1]), ("", [1])])
def test_an_error_is_given_once(
    silent: str, heirs: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Worker 1 takes so long for an answer that the one who leaves gives up."""
    engine = Engine(TopK(0.1), ErrorFeedback(), seed=0)
    engine.begin_fit(revocable=True)
    Simulated(1).run([engine.flow(torch.randn(30), {"a": (30,)})])
    took: list[int] = []

    def visit(address: str) -> Any:
        def ask(said: Any) -> Any:
            if said["ask"] == "error":
                took.append(int(address))
            if (said["ask"], address) == (silent, "1"):
                raise TimeoutError("it does not answer")
            place = {"round": 1, "position": 0, "steps": 4}
            return {"taken": True} if said["ask"] == "error" else place

        return contextlib.nullcontext(ask)

    membership: Any = mock.MagicMock(visit=visit, neighbours={0: "0", 2: "2", 1: "1"})
    membership.member = mock.MagicMock(number=0)
    workers: Any = mock.MagicMock(first=engine)
    Inheritance(workers, torch.device("cpu"), membership, lambda: None).bequeath()
    assert took == heirs
    assert ("Worker 1 was given its error" in caplog.text) == (silent == "error")


@pytest.mark.parametrize(("position", "expected"), [(0, 0), (3, 3), (4, 0)])
def test_who_joins_at_the_end_of_the_last_round_makes_its_steps(
    position: int, expected: int
) -> None:
    """Else its loop would end with the weights before that round."""
    rounds: Any = mock.MagicMock(position=position, length=4)
    workers: Any = mock.MagicMock()
    workers.first.step = 29
    worker = Inheritance(workers, torch.device("cpu"), mock.MagicMock(), lambda: None)
    worker.place = snapshot.Place(rounds, mock.MagicMock(), 116, True, False)
    said = {"round": 29, "position": expected, "steps": 116 + expected}
    assert worker.answer({"ask": "place"}) == said
