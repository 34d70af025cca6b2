"""A folder as the way of meeting: one log whoever decides, rounds, questions and answers."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gc import Elastic
from lightning_gc.core import Exchange, Gather, Mean, Request
from lightning_gc.core.digest import ReplicaError
from lightning_gc.elastic import folder as module
from lightning_gc.elastic.folder import Folder
from lightning_gc.elastic.objects import Objects
from lightning_gc.elastic.roll import (
    Called,
    Entry,
    Numbered,
    Refused,
    Report,
    Round,
    Terms,
    Verdict,
    entry_of,
    in_words,
)
from lightning_gc.transports.peer_error import PeerError
from lightning_gc.transports.simulated import Simulated

LIMIT = 60.0


@pytest.fixture
def meet(tmp_path: Path) -> Iterator[Callable[..., Folder]]:
    """Return what makes members of one folder, with a short settling time."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(module, "_SETTLE", 1)

        def make(**settings: Any) -> Folder:
            given: dict[str, Any] = {"secret": "secret", "timeout": 3.0} | settings
            return stack.enter_context(
                contextlib.closing(Folder(Elastic(str(tmp_path / "run"), **given)))
            )

        yield make


def until(true: Callable[[], Any]) -> None:
    limit = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.01)


def told(folder: Folder) -> Any:
    entry = folder.hear(LIMIT)
    assert entry is not None
    return entry


def log(folder: Folder) -> list[Any]:
    """Return the log as the folder has it."""
    objects = folder._objects
    found: list[Any] = []
    for name in sorted(objects.names("log")):
        body = objects.get(f"log/{name}")
        assert body is not None
        found += map(entry_of, json.loads(body))
    return found


def test_all_hear_one_log_and_one_decides(meet: Callable[..., Folder]) -> None:
    members = [meet() for _ in range(3)]
    for number, each in enumerate(members):
        each.report(Report(f"token {number}"))
    heard = [[told(each) for _ in range(3)] for each in members]
    assert heard[0] == heard[1] == heard[2]
    assert {entry.token for entry in heard[0]} == {"token 0", "token 1", "token 2"}
    assert sum(each._desk is not None for each in members) == 1


def stopped(folder: Folder) -> Folder:
    """Return a member that decides; the test goes on in place of its thread."""
    folder._closed.set()
    folder._woken.set()
    folder._threads[0].join()
    folder._desk = module._Desk(folder, time.monotonic())
    return folder


def test_a_second_keeper_loses(
    meet: Callable[..., Folder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both believe that they hold the lease. Who writes a number of the log first has decided."""
    members = one, other = stopped(meet()), stopped(meet())
    number = one._next = other._next = max(one._next, other._next)
    for place, each in enumerate(members):
        assert each._desk is not None
        said = [Refused("ghost", f"decided by {place}")]
        monkeypatch.setattr(each._desk.keeper, "tick", lambda now, said=said: said)
    assert one._decide()
    assert not other._decide()
    assert [vars(each)["_desk"] is None for each in members] == [False, True]
    assert one.hear(0.0) == Refused("ghost", "decided by 0")
    assert other.hear(0.0) is None
    assert log(one) == [Refused("ghost", "decided by 0")]
    assert (one._next, other._next) == (number + 1, number)  # the latter reads it next


def test_a_verdict_that_is_said_again_ends_no_later_attempt(meet: Callable[..., Folder]) -> None:
    """A keeper that takes over says the last one again."""
    member = stopped(meet())
    entries: list[Entry] = [
        Called("run", 3, 0, (0, 1), "g"),
        Verdict("run", 2, 0, Round(2, (0, 1), run="run")),
    ]
    for each in entries:
        member._take(json.dumps([in_words(each)]).encode())
    assert member._called == entries[0]
    member._take(json.dumps([in_words(Verdict("run", 3, 0, None, "a peer is lost"))]).encode())
    assert member._called is None


def test_a_store_that_is_slow_for_the_timeout_is_named(
    meet: Callable[..., Folder], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Objects, "enter", lambda self: 0.1)
    meet(timeout=5.0)
    assert "takes 0.1 s, so workers report every 1 s" in caplog.text
    assert "With Elastic(timeout=5) they are taken for dead; give 6 or more." in caplog.text


def test_a_store_that_fails_for_a_while_only_costs_time(
    meet: Callable[..., Folder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the disk were full, or the folder read-only."""
    member = meet()
    until(lambda: member._desk is not None)

    def full(name: str, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        for name in ("put", "create"):
            patch.setattr(member._objects._store, name, full)
        member.report(Report("token"))
        until(lambda: "No space left on device" in member.status.trouble)
        assert member.hear(0.5) is None
    assert told(member) == Numbered("token", 0)
    until(lambda: not member.status.trouble)


def test_a_keeper_that_was_away_longer_than_the_log_is_kept_decides_nothing(
    meet: Callable[..., Folder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number is free again, because the log's old objects were removed."""
    keeper = stopped(meet())
    objects, entry = keeper._objects, [Refused("ghost", "it was away")]
    objects.put("log/00000300", json.dumps([in_words(each) for each in entry]).encode())
    create = objects.create

    def late(name: str, body: bytes) -> bool:
        monkeypatch.setattr(module, "_LEASE", 0.0)  # as if it had taken long
        return create(name, body)

    monkeypatch.setattr(objects, "create", late)
    assert keeper._desk is not None
    monkeypatch.setattr(keeper._desk.keeper, "tick", lambda now: entry)
    assert not keeper._decide()
    assert vars(keeper)["_desk"] is None
    assert [*objects.names("log")] == ["00000300"]
    assert keeper.hear(0.0) is None


def test_a_lease_that_nobody_renews_is_taken_over(
    meet: Callable[..., Folder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LEASE", 2)
    with Objects_of(meet) as objects:
        dead = json.dumps({"box": "dead", "count": 1, "next": 0, "awaited": "worker 7"}).encode()
        assert objects.create("keeper", dead)
        member = meet()
        until(lambda: member.status.awaited == "worker 7")
        member.report(Report("token"))
        assert told(member) == Numbered("token", 0)
        assert objects.get("keeper") != dead


@contextlib.contextmanager
def Objects_of(meet: Callable[..., Folder]) -> Iterator[Objects]:
    first = meet()
    first.close()
    objects = Objects(first._objects.url, "secret")
    objects.enter()
    yield objects
    objects.close()


def test_reports_of_the_dead_and_of_another_secret_are_not_heard(
    meet: Callable[..., Folder], caplog: pytest.LogCaptureFixture
) -> None:
    with Objects_of(meet) as objects:
        said = {"report": Report("dead").in_words(), "beat": 0.25}
        objects.put("reports/dead", json.dumps(said).encode())
        objects._seal = type(objects._seal)("another")
        said = {"report": Report("stranger").in_words(), "beat": 0.25}
        member = meet()
        until(lambda: member._desk is not None)
        objects.put("reports/stranger", json.dumps(said).encode())
        member.report(Report("token", terms=Terms()))
        assert told(member) == Numbered("token", 0)
        assert {each.token for each in log(member)} == {"token"}
    assert "reports/stranger" in caplog.text


def requests(rank: int) -> list[Request]:
    draw = torch.Generator().manual_seed(rank)
    ragged = torch.randn(3 + rank, generator=draw)
    return [
        Mean((torch.randn(5, generator=draw), torch.randn(2, 2, generator=draw).bfloat16())),
        Gather((ragged, torch.randn(4, generator=draw)), (9, None)),
        Exchange(tuple((torch.randn(2, generator=draw),) for _ in range(3))),
    ]


def test_replies_have_the_bits_of_a_replay(meet: Callable[..., Folder]) -> None:
    member, simulated = meet(), Simulated(3)
    member._called = Called("run", 0, 0, (0, 1, 2), "g")

    def run(rank: int) -> list[Any]:
        with member.propose("g", rank, 3) as transport:
            return [transport.fulfil(each) for each in requests(rank)]

    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(run, range(3)))
    for place, each in enumerate(zip(*map(requests, range(3)), strict=True)):
        for rank, reply in enumerate(simulated.fulfil(each)):
            assert str(made[rank][place]) == str(reply)


def test_a_member_that_does_not_come_ends_the_attempt(meet: Callable[..., Folder]) -> None:
    member = meet(timeout=1.0)
    member._called = Called("run", 0, 0, (0, 1), "g")
    request = Mean((torch.zeros(2),))
    with (
        member.propose("g", 0, 2) as transport,
        pytest.raises(PeerError, match="Nothing has come from members 1 in 1 s"),
    ):
        transport.fulfil(request)
    member._called = None  # as the verdict says
    with member.propose("g", 0, 2) as transport, pytest.raises(PeerError, match="was ended"):
        transport.fulfil(request)


def test_members_with_other_layouts_are_named(meet: Callable[..., Folder]) -> None:
    member = meet()
    member._called = Called("run", 0, 0, (0, 1), "g")

    def run(rank: int) -> Any:
        with member.propose("g", rank, 2) as transport:
            return transport.fulfil(Mean((torch.zeros(2 + rank),)))

    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(run, rank) for rank in range(2)]:
            with pytest.raises(ReplicaError, match=r"asks for Mean.*Give all workers the same"):
                each.result()


def test_a_question_is_answered_and_a_silent_worker_is_named(meet: Callable[..., Folder]) -> None:
    one, other = meet(timeout=1.0), meet()
    where = other.serve(lambda asked: {"asked": asked, "thread": threading.current_thread().name})
    with one.visit(where) as ask:
        for number in range(2):
            answer = ask({"number": number, "tensor": torch.arange(3)})
            assert answer["asked"]["number"] == number
            assert answer["thread"] == "mail"
    with one.visit("nobody") as ask, pytest.raises(TimeoutError, match="nobody has not answered"):
        ask({})
    assert one._objects.names("mail") == {}
