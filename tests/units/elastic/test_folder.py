"""A folder as the way of meeting: one log whoever decides, rounds, questions and answers."""

import contextlib
import copy
import json
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

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
    Member,
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
        found += map(entry_of, json.loads(body)["said"])
    return found


def written(*entries: Entry) -> bytes:
    """Return an object of the log."""
    return json.dumps({"by": None, "said": [in_words(each) for each in entries]}).encode()


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
    folder._thread.join()
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
        member._take(written(each))
    assert member._called == entries[0]
    member._take(written(Verdict("run", 3, 0, None, "a peer is lost")))
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
    objects.put("log/00000300", written(*entry))
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
        said = {"box": "dead", "count": 1, "next": 0, "awaited": "worker 7", "beat": 0.3}
        dead = json.dumps(said).encode()
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
        get = one._objects._store.get
        damaged = mock.Mock(side_effect=lambda name: get(name)[:-1])
        patched = mock.patch.object(one._objects._store, "get", damaged)
        with patched, pytest.raises(ValueError, match="is damaged"):
            ask({})
        assert ask({"number": 3})["asked"]["number"] == 3
    with one.visit("nobody") as ask, pytest.raises(TimeoutError, match="nobody has not answered"):
        ask({})
    assert one._objects.names("mail") == {}


class Counted:
    """A store in memory, which counts requests by their kind and folder.

    Members' payloads come together: a listing of one is asked for when all have been written.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.counts = Counter[str]()
        self.together: list[threading.Barrier] = []
        self._lock = threading.Lock()

    def of(self, folder: Folder) -> Counter[str]:
        """Return what one worker has asked for since the last call."""
        store: Any = folder._objects._store
        made, store.counts = store.counts, Counter()
        return made

    def view(self) -> "Counted":
        """Return the store of one worker."""
        made = copy.copy(self)
        made.counts = Counter()
        return made

    def _count(self, kind: str, name: str) -> None:
        with self._lock:
            self.counts[f"{kind} {name.partition('/')[0]}"] += 1

    def put(self, name: str, data: bytes) -> None:
        self._count("put", name)
        self.objects[name] = data
        if name.startswith("rounds/"):
            self.together[-1].wait(LIMIT)

    def create(self, name: str, data: bytes) -> None:
        self._count("create", name)
        if self.objects.setdefault(name, data) is not data:
            raise FileExistsError(name)

    def get(self, name: str) -> bytes:
        self._count("get", name)
        if name not in self.objects:
            raise FileNotFoundError(name)
        return self.objects[name]

    def names(self, folder: str) -> dict[str, str]:
        self._count("list", folder)
        found = {name: data for name, data in self.objects.items() if name.startswith(folder + "/")}
        return {name.partition("/")[2]: repr(data) for name, data in found.items()}

    def remove(self, names: Sequence[str]) -> None:
        self._count("remove", names[0])
        for name in names:
            self.objects.pop(name, None)


class Script:
    """Workers of a folder in one thread. Its clock stands until the test moves it."""

    def __init__(self, workers: int, patch: pytest.MonkeyPatch) -> None:
        self.now, self.store = 1000.0, Counted()
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        patch.setattr(module, "time", clock)
        patch.setattr(Folder, "_begin", lambda self, open_to_all: None)
        patch.setattr(
            module, "Objects", lambda url, secret: Objects(url, secret, self.store.view())
        )
        patch.setattr(Objects, "enter", lambda self: 0.01)
        terms = Terms(min_workers=2, grace=0.0)
        elastic = Elastic("memory://run", min_workers=2, secret="secret", grace=0.0)
        self.here = list(range(workers))
        self.folders = [Folder(elastic) for _ in self.here]
        self.members = [Member(Report(f"token {rank}", terms=terms)) for rank in self.here]
        self.log: list[Entry] = []  # as the last worker has heard it
        self.look(0)  # takes the lease
        for each in self.members:
            each.enters(0, "mark")
        self.go_on(lambda: {each.report.phase for each in self.members} == {"training"})

    @property
    def keeper(self) -> int:
        """The worker that holds the lease."""
        (rank,) = [rank for rank in self.here if self.folders[rank]._desk is not None]
        return rank

    def go_on(self, until: Callable[[], bool]) -> None:
        """Let time pass."""
        limit = self.now + 100.0
        while not until():
            assert self.now < limit
            self.now += 1.0
            for rank in self.here:
                self.look(rank)

    def look(self, rank: int) -> list[Any]:
        """Let a worker report, read and decide once; return what it is to do."""
        folder, member, done = self.folders[rank], self.members[rank], []
        folder.report(member.report)
        folder.look(self.now)
        while (entry := folder.hear(0.0)) is not None:
            if rank == self.here[-1]:
                self.log.append(entry)
            if (do := member.read(entry)) is not None:
                done.append(do)
                if do.what == "fetch":
                    member.fetched(0, 0, "zero")
        folder._report = member.report
        return done

    def round(self) -> list[Counter[str]]:
        """Make a round in the best order; return the requests of the keeper and the others."""
        others = [rank for rank in self.here if rank != self.keeper]
        members = {rank: self.members[rank] for rank in self.here}
        order = [self.keeper, *others]
        for rank in order:
            self.store.of(self.folders[rank])
        for each in members.values():
            each.asks("mark")
        (group,) = {do.group for do in self._decided(others)}
        self.store.together.append(threading.Barrier(len(order)))

        def exchange(rank: int) -> Any:
            place = self.here.index(rank)
            with self.folders[rank].propose(group, place, len(order)) as transport:
                return transport.fulfil(Mean((torch.full((2,), float(rank)),)))

        with ThreadPoolExecutor(len(order)) as pool:
            assert len({str(each) for each in pool.map(exchange, order)}) == 1
        for rank, each in members.items():
            each.ran("digest", rank + 10.0 * each.report.round)
        assert {do.what for do in self._decided(others)} == {"commit"}
        return [self.store.of(self.folders[rank]) for rank in order]

    def _decided(self, others: list[int]) -> list[Any]:
        for rank in others:  # they report
            assert self.look(rank) == []
        return self.look(self.keeper) + [do for rank in others for do in self.look(rank)]

    def without_keeper(self) -> int:
        """Let time pass after the one who decided has gone; return its number."""
        gone = self.keeper
        self.here.remove(gone)
        self.go_on(lambda: any(self.folders[rank]._desk is not None for rank in self.here))
        for _ in range(10):  # the next one listens
            self.now += 1.0
            for rank in self.here:
                self.look(rank)
        return self.members[gone].number

    def record(self) -> Round:
        """Return the last round."""
        for rank in self.here:
            self.look(rank)
        found = [each.record for each in self.log if isinstance(each, Verdict) and each.record]
        return found[-1]


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_requests_that_a_round_needs(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits and beats cost more; nobody waits here, and no time passes."""
    script = Script(workers, monkeypatch)
    for _ in range(3):
        keeper, *others = script.round()
    assert keeper.total() <= 3 * workers + 4, keeper
    for each in others:
        assert each.total() <= workers + 5, each
    assert [name for name in script.store.objects if name.startswith("rounds/")] == []


def test_who_waits_looks_more_and_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats of the others do not count as news."""
    script = Script(3, monkeypatch)
    keeper = script.folders[script.keeper]
    for rank in (*script.here, *script.here):  # that the others train
        script.now += 2.0
        script.look(rank)
    script.members[script.keeper].asks("mark")
    script.look(script.keeper)
    since = keeper._since
    for _ in range(6):
        script.now += 2.0
        for rank in script.here:
            script.look(rank)
    assert keeper._since == since
    assert keeper._pause(since) == keeper._beat
    other = next(rank for rank in script.here if rank != script.keeper)
    script.members[other].asks("mark")
    for rank in (other, script.keeper):
        script.look(rank)
    assert keeper._since == script.now


def test_a_keeper_that_dies_is_named_with_its_last_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes no reports: the log has its last one, beside what it has decided."""
    script = Script(4, monkeypatch)
    for _ in range(2):
        script.round()
    gone = script.without_keeper()
    script.round()
    assert (script.record().left, script.record().lost) == ((), {gone: gone + 10.0})
    other = script.without_keeper()  # also the second one
    assert other != gone
    script.round()
    assert script.record().lost == {other: other + 20.0}


def test_a_keeper_that_leaves_is_named_as_a_leaver(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(3, monkeypatch)
    script.round()
    leaver = script.keeper
    script.members[leaver].leaves()
    script.folders[leaver].report(script.members[leaver].report)
    script.folders[leaver]._give_back()
    assert "keeper" not in script.store.objects
    script.folders[leaver]._desk = module._Desk(script.folders[leaver], script.now)
    gone = script.without_keeper()
    script.round()
    assert (script.record().left, script.record().lost) == ((gone,), {})


def test_a_store_that_becomes_slow_keeps_its_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of 0.4 s: one look of the keeper takes longer than its lease was before."""
    script = Script(3, monkeypatch)
    keeper, names = script.keeper, Counted.names

    def slow(store: Counted, folder: str) -> dict[str, str]:
        script.now += 8.0 if store is script.folders[keeper]._objects._store else 0.4
        return names(store, folder)

    monkeypatch.setattr(Counted, "names", slow)
    began = script.folders[keeper]._beat
    for _ in range(20):
        for rank in script.here:
            script.now += 0.4
            script.look(rank)
    assert script.folders[keeper]._beat == module._SLOWEST > began
    assert script.keeper == keeper
    for each in script.members:
        each.asks("mark")
    for rank in (*script.here, keeper, *script.here):
        script.look(rank)
    assert any(isinstance(each, Called) for each in script.log)
