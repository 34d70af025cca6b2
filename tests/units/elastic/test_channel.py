"""Channels of an elastic run: strangers, replays, floods; the rendezvous, idle and heard."""

import contextlib
import json
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_gc.elastic import channel
from lightning_gc.elastic.channel import (
    Channel,
    HandshakeError,
    Link,
    Listener,
    Seal,
    calling,
)
from lightning_gc.elastic.rendezvous import Meetings, Rendezvous, _claim, serve
from lightning_gc.elastic.roll import NEAR, Keeper, Numbered, Report, Round, Terms, line_of
from lightning_gc.elastic.roll_file import BusyError
from lightning_gc.elastic.sockets import Door, Sockets, visiting
from lightning_gc.local_steps import Elastic
from tests.support.processes import hold_port, many_files, preloaded
from tests.support.strangers import Tap, ended, idle_strangers, play

SECRET = Seal("secret")
SOON = (0.0, 0.05, ())
"""A keeper's ``now``, ``settle`` and ``file``: it looks for a running run only briefly."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keeper.__init__, "__defaults__", SOON)


def until(true: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait until something is true."""
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.002)


def side(calls: bool, seal: Seal = SECRET, place: str = "here", most: int = 1000) -> Channel:
    return Channel(seal, place, calls, most, "the caller" if not calls else "the rendezvous at h:1")


class Talk:
    """Two channels, and what each has said."""

    def __init__(self, caller: Channel, called: Channel) -> None:
        self.sides = (caller, called)
        self.said = (bytearray(), bytearray())
        self.errors: list[str] = ["", ""]

    def go_on(self) -> "Talk":
        """Bring bytes of the handshake to the other side, until nobody has more to say."""
        while any(each.out for each in self.sides):
            for index, each in enumerate(self.sides):
                said = bytes(each.out)
                each.out.clear()
                self.carry(index, said)
        return self

    def carry(self, index: int, said: bytes) -> None:
        self.said[index].extend(said)
        if self.errors[1 - index]:  # it has hung up
            return
        try:
            self.sides[1 - index].feed(said)
        except (ValueError, HandshakeError) as error:
            self.errors[1 - index] = str(error)

    def say(self, index: int, *messages: bytes) -> None:
        for message in messages:
            self.carry(index, b"".join(self.sides[index].pack(message)))


def test_messages_go_both_ways() -> None:
    talk = Talk(side(True), side(False)).go_on()
    talk.say(0, b"", b"report")
    talk.say(1, b"entry")
    assert [[*map(bytes, each.messages())] for each in talk.sides] == [[b"entry"], [b"", b"report"]]
    assert talk.errors == ["", ""]


def test_another_secret_is_named_and_learns_nothing() -> None:
    talk = Talk(side(True, Seal("other")), side(False)).go_on()
    assert talk.errors[0] == "the rendezvous at h:1 has another secret"
    assert "another secret" in talk.errors[1]
    assert not any(each.open for each in talk.sides)
    assert len(talk.said[1]) == 30 + 1  # a greeting and a no: nothing to try secrets on


def test_one_who_only_says_yes_is_not_believed() -> None:
    caller = side(True)
    talk = Talk(caller, side(False, Seal("other")))
    greeting = bytes(talk.sides[1].out)
    with pytest.raises(HandshakeError, match="another secret"):
        caller.feed(greeting + b"\1" + bytes(32))
    assert not caller.open


@pytest.mark.parametrize("calls", [False, True])
def test_another_version_is_named(calls: bool) -> None:
    greeting = side(not calls).out
    greeting[5] = 7
    with pytest.raises(HandshakeError, match=r"has version 7 of the protocol.*install one version"):
        side(calls).feed(bytes(greeting))


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH_9\r\n", b"HTTP/1.1 400", bytes(100)])
def test_another_program_is_named(said: bytes) -> None:
    with pytest.raises(HandshakeError, match="the rendezvous at h:1 is another program"):
        side(True).feed(said)


def test_another_part_of_the_run_is_named() -> None:
    talk = Talk(side(True, place="rendezvous"), side(False, place="10.0.0.1:5")).go_on()
    assert "another part of an elastic run; compare addresses" in talk.errors[0]


def recorded() -> Talk:
    """Return a talk in which both have said something."""
    talk = Talk(side(True), side(False)).go_on()
    talk.say(0, b"report 1", b"report 2")
    talk.say(1, b"head", b"entry")
    return talk


def played(said: bytes, calls: bool) -> tuple[Channel, str]:
    """Return a new side that is played what a side of another connection has said."""
    new = side(calls)
    try:
        new.feed(said)
    except (ValueError, HandshakeError) as error:
        return new, str(error)
    return new, ""


@pytest.mark.parametrize("index", [0, 1])
def test_what_was_said_on_another_connection_is_not_believed(index: int) -> None:
    """Reports of a worker to another rendezvous; head and log to another worker."""
    new, error = played(bytes(recorded().said[index]), calls=index == 1)
    assert "another secret" in error
    assert not new.heard
    assert not new.open


def test_a_message_is_not_believed_twice_nor_out_of_order() -> None:
    for order in ([0, 0], [1], [0, 1, 0]):
        talk = Talk(side(True), side(False)).go_on()
        packed = [b"".join(talk.sides[0].pack(b"report %d" % n)) for n in range(2)]
        for number in order:
            talk.carry(0, packed[number])
        assert "not its own" in talk.errors[1]
        assert len(talk.sides[1].heard) == len(order) - 1


def test_own_messages_are_not_believed() -> None:
    talk = Talk(side(True), side(False)).go_on()
    own = b"".join(talk.sides[0].pack(b"report"))
    with pytest.raises(ValueError, match="not its own"):
        talk.sides[0].feed(own)


def test_every_changed_byte_is_noticed() -> None:
    """Whatever byte a stranger changes on the way: nothing else than what was said is heard."""
    seal = Seal("s")
    for place in range(30 + 32 + 2 * 40 + 16):
        caller, called = side(True, seal), side(False, seal)
        talk, at = Talk(caller, called), place

        def changed(index: int, said: bytes, carry: Any = talk.carry) -> None:
            nonlocal at
            if index == 0 and 0 <= at < len(said):
                said = said[:at] + bytes([said[at] ^ 1]) + said[at + 1 :]
            at -= len(said) if index == 0 else 0
            carry(index, said)

        talk.carry = changed  # type: ignore[method-assign]
        talk.go_on()
        if caller.open:
            talk.say(0, b"report 1", b"report 2")
        heard = [*map(bytes, called.messages())]
        assert at < 0 or not caller.open
        assert heard in ([], [b"report 1"]), place


def test_a_message_that_is_too_long_is_not_read() -> None:
    talk = Talk(side(True), side(False, most=100)).go_on()
    talk.say(0, bytes(101))
    assert "101 bytes, where 100 are possible" in talk.errors[1]
    stranger = side(False, most=1 << 30)
    stranger.feed(bytes(side(True).out))
    assert stranger._wanted == 32  # of a proof; a length means nothing yet


# ----------------------------------------------------------------------------------- listening


class Echo:
    """A listener that answers each guest with its own words."""

    def __init__(self) -> None:
        self.listener = Listener((), SECRET, 1 << 20, "echo")
        self.address = ("127.0.0.1", self.listener.port)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._over.is_set():
            for guest, message in self.listener.wait(time.monotonic() + 60):
                self.listener.send(guest, bytes(message))
        self.listener.close()

    def calling(self) -> Any:
        return calling(self.address, SECRET, "echo", 1 << 20, 30.0, "the echo")

    def close(self) -> None:
        self._over.set()
        self.listener.wake()
        self._thread.join()


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.close()


def answered(link: Link, text: bytes = b"hello") -> bool:
    link.send(text)
    return link.receive() == text


def test_long_messages_pass(echo: Echo) -> None:
    with echo.calling() as link:
        assert answered(link, bytes(1 << 20))
        assert answered(link)


def test_the_oldest_stranger_goes_first(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "STRANGERS", 3)
    monkeypatch.setattr(channel, "DEADLINE", 1000.0)  # none is dropped for being slow
    with contextlib.ExitStack() as stack:
        guest = stack.enter_context(echo.calling())
        strangers = []
        for _ in range(4):
            strangers.append(stack.enter_context(socket.create_connection(echo.address)))
            assert strangers[-1].recv(30)  # it is in the hall
        assert ended(strangers[0])
        assert len(echo.listener._strangers) == 3
        assert answered(stack.enter_context(echo.calling()))
        assert ended(strangers[1])
        assert answered(guest)


def test_a_handshake_has_a_deadline(
    echo: Echo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One who says nothing, and one who says a byte now and then."""
    monkeypatch.setattr(channel, "DEADLINE", 0.3)
    silent, slow = (socket.create_connection(echo.address) for _ in range(2))
    with silent, slow:
        with contextlib.suppress(ConnectionError):
            for byte in bytes(side(True, place="echo").out):
                slow.send(bytes([byte]))
                time.sleep(0.05)
        assert ended(slow)
        assert ended(silent)
    assert "proved nothing: 0.3 s" in caplog.text
    with echo.calling() as link:
        assert answered(link)


def test_a_process_without_files_goes_on(echo: Echo, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as caller, contextlib.ExitStack() as files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    files.enter_context(open("/dev/null"))
            caller.connect(echo.address)
            until(lambda: "accepted nobody for" in caplog.text)
        finally:
            files.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        link = Link(caller, Channel(SECRET, "echo", True, 100, "the echo"))
        link.shake(30.0)
        assert answered(link)


class Refusing:
    """A selector that fails the next calls of a method, as epoll does without memory."""

    def __init__(self, selector: Any, method: str, times: int) -> None:
        self._selector, self._method, self.left = selector, method, times

    def __getattr__(self, name: str) -> Any:
        if name == self._method and self.left:
            self.left -= 1
            return self._fail
        return getattr(self._selector, name)

    def _fail(self, link: Any, *_: Any) -> None:
        if self._method == "modify":  # as in selectors
            self._selector.unregister(link)
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("method", "times"), [("register", 1), ("register", 2), ("modify", 1)])
def test_a_selector_without_memory_ends_no_listener(method: str, times: int) -> None:
    listener = Listener((), SECRET, 1 << 20, "echo")
    listener._selector = Refusing(listener._selector, method, times)  # type: ignore[assignment]
    with contextlib.closing(listener), contextlib.ExitStack() as stack:
        address = ("127.0.0.1", listener.port)
        visitors = [stack.enter_context(socket.create_connection(address)) for _ in range(2)]
        if method == "modify":
            listener.wait(0.0)
            first, *_ = listener._strangers
            first.unsent += bytes(1 << 25)  # more than the kernel takes
            listener._attend(first, selectors.EVENT_WRITE)
            assert len(listener._strangers) == 1
        else:
            listener.wait(0.0)  # the first cannot be registered, the second waits
            if times == 2:
                listener._paused = 1e-9
                listener.wait(0.0)  # nor can the listening socket
            listener._paused = 1e-9
            listener.wait(0.0)
            listener.wait(0.0)
            assert visitors[1].recv(30)
        assert listener._selector.left == 0  # type: ignore[attr-defined]


def test_a_guest_that_takes_nothing_is_dropped(
    echo: Echo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel, "_MOST_UNSENT", 1 << 20)
    with echo.calling() as link, contextlib.suppress(ConnectionError):
        for _ in range(200):
            link.send(bytes(1 << 20))
    until(lambda: "bytes are not taken" in caplog.text)
    assert not echo.listener.guests


# ------------------------------------------------------------------------------ the rendezvous


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    made = Rendezvous(0, "secret")
    yield made
    made.close()


def told(line: Sockets) -> Any:
    """Return the next entry; wait for it."""
    entry = line.hear(60.0)
    assert entry is not None
    return entry


def line_to(port: int, secret: str | None = "secret") -> Any:
    return contextlib.closing(Sockets(Elastic(f"127.0.0.1:{port}", secret=secret)))


@contextlib.contextmanager
def answering(said: bytes) -> Iterator[int]:
    """Yield a port where every caller is told the same."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                visitor, _ = server.accept()
                with visitor, contextlib.suppress(ConnectionError):
                    visitor.sendall(said)
                    ended(visitor)

    thread = threading.Thread(target=answer)
    thread.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()


def test_reports_and_logs_of_another_run_are_not_believed(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two live runs of one secret. A stranger plays what he has read in one to the other."""
    tokens = list[str]()
    hear = Keeper.hear

    def noted(keeper: Keeper, report: Report, now: float) -> None:
        tokens.append(report.token)
        hear(keeper, report, now)

    tap = Tap(rendezvous.port)
    with line_to(tap.port) as line:
        line.report(Report("ghost"))
        assert told(line) == Numbered("ghost", 0)
    until(lambda: not rendezvous._listener.guests)
    tap.close()
    monkeypatch.setattr(Keeper, "hear", noted)
    with contextlib.closing(Rendezvous(0, "secret")) as other, line_to(other.port) as honest:
        honest.report(Report("honest"))
        play(bytes(tap.said[0]), other.port)
        assert told(honest) == Numbered("honest", 0)  # the ghost has taken no number
    assert set(tokens) == {"honest"}
    assert "a visitor has another secret" in caplog.text
    with answering(bytes(tap.said[1])) as port, line_to(port) as worker:
        worker.report(Report("worker"))
        until(lambda: "has another secret" in worker.status.trouble)
        assert worker.hear(0.0) is None
        assert not worker._term


def test_a_worker_knows_why_it_is_not_heard(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = f"127.0.0.1:{rendezvous.port}"
    with line_to(rendezvous.port, "another") as line:
        until(lambda: line.status.trouble == f"the rendezvous at {where} has another secret")
    with line_to(rendezvous.port, None) as line:
        until(lambda: line.status.trouble == f"the rendezvous at {where} has another secret")
    with line_to(rendezvous.port) as line:
        until(lambda: not line.status.trouble)
    with answering(b"SSH-2.0-OpenSSH_9.6\r\n") as port, line_to(port) as line:
        until(lambda: "is another program" in line.status.trouble)
    monkeypatch.setattr("lightning_gc.elastic.rendezvous._is_here", lambda host: False)
    with hold_port() as held, line_to(held.getsockname()[1]) as line:
        until(lambda: "Connection refused" in line.status.trouble)
        assert line.status.trouble.startswith("nobody answers at 127.0.0.1:")


def test_a_report_that_cannot_be_read_is_named(rendezvous: Rendezvous) -> None:
    with line_to(rendezvous.port) as line:
        line.report(Report("a", beat=-1, terms=Terms(min_workers=0)))
        until(lambda: "min_workers" in line.status.trouble)
        line.report(Report("a"))
        assert told(line) == Numbered("a", 0)


def test_a_line_calls_a_restarted_rendezvous_again() -> None:
    first = Rendezvous(0, "secret")
    with line_to(first.port) as line:
        line.report(Report("a", number=3))
        until(lambda: first._listener.guests)
        first.close()
        with contextlib.closing(Rendezvous(first.port, "secret")) as second:
            line.report(Report("a"))
            assert told(line) == Numbered("a", 0)
            assert second.port == first.port
        until(lambda: line.status.trouble)


def test_a_worker_that_comes_again_reads_what_it_has_missed(rendezvous: Rendezvous) -> None:
    tap = Tap(rendezvous.port)
    with line_to(rendezvous.port) as other, line_to(tap.port) as line:
        line.report(Report("a"))
        assert told(line) == told(other) == Numbered("a", 0)
        tap.cut()
        other.report(Report("b"))
        assert told(other) == Numbered("b", 1)
        tap.open = True
        assert told(line) == Numbered("b", 1)
    tap.close()


def test_connections_that_end_are_forgotten(rendezvous: Rendezvous) -> None:
    for _ in range(3):
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                line = stack.enter_context(line_to(rendezvous.port))
                line.report(Report("a"))
            until(lambda: len(rendezvous._listener.guests) == 20)
        until(lambda: not rendezvous._listener.guests)


# --------------------------------------------------------------------------------------- groups


def test_members_of_a_group_meet(rendezvous: Rendezvous) -> None:
    with line_to(rendezvous.port) as line, line._store("g", 30.0) as a, line._store("g", 30.0) as b:
        threading.Timer(0.05, a.set, ("key", b"\0\xff")).start()
        assert b.get("key") == b"\0\xff"
        assert (a.add("n", 2), b.add("n", 3), a.get("n")) == (2, 5, b"5")
        assert [a.check(["key"]), a.check(["key", "none"])] == [True, False]
        assert [a.delete_key("key"), a.delete_key("key")] == [True, False]
        assert b.compare_set("c", b"", b"1") == b"1"
        assert b.compare_set("c", b"0", b"2") == b"1"
        with line._store("another", 30.0) as c:
            assert not c.check(["n"])
        with pytest.raises(dist.DistStoreError, match="about none"):
            b.wait(["none"], timedelta(seconds=0.05))


def test_a_group_whose_rendezvous_is_gone_ends() -> None:
    rendezvous = Rendezvous(0, "secret")
    with line_to(rendezvous.port) as line:
        with line._store("g", 30.0) as store:
            threading.Timer(0.05, rendezvous.close).start()
            with pytest.raises(dist.DistStoreError, match="has hung up"):
                store.get("none")
        with pytest.raises(dist.DistStoreError), line._store("g", 1.0):
            pass


def test_old_groups_are_forgotten() -> None:
    meetings = Meetings()
    for number in range(20):
        said = {"do": "set", "in": str(number), "keys": ["a"], "values": ["00"]}
        assert meetings.answer(said) == []
    assert len(meetings._spaces) == 8
    assert meetings.answer({"do": "get", "in": "19", "keys": ["a"]}) == ["00"]


@pytest.mark.parametrize(
    "asked",
    [
        {"do": "get"},
        {"do": "get", "in": "g", "keys": []},
        {"do": "nothing", "in": "g", "keys": ["a"]},
        {"do": "add", "in": "g", "keys": ["a"]},
        {"do": "set", "in": "g", "keys": ["a"], "values": []},
    ],
)
def test_what_is_no_question_is_refused(asked: Any) -> None:
    with pytest.raises(ValueError, match=r"question|argument"):
        Meetings().answer(asked)


# --------------------------------------------------------------------------------------- floods


def _serve(pipe: Any, files: int) -> None:
    """Serve a rendezvous and a door; say how many seconds of a core that has taken, when asked."""
    Keeper.__init__.__defaults__ = SOON  # type: ignore[misc]
    if files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    rendezvous = Rendezvous(0, "secret")
    door = Door("127.0.0.1", (), SECRET, 1 << 20, 30.0, lambda asked: {"asked": asked})
    pipe.send((rendezvous.port, door.address))
    while pipe.recv():
        pipe.send(time.process_time())
    door.close()
    rendezvous.close()


class Served:
    """A process with a rendezvous and a door."""

    def __init__(self, files: int = 0) -> None:
        self._pipe, theirs = preloaded().Pipe()
        self._process = preloaded().Process(target=_serve, args=(theirs, files))
        self._process.start()
        self.port, self.address = self._pipe.recv()

    def spent(self) -> float:
        """Return seconds of a core."""
        self._pipe.send(True)
        return float(self._pipe.recv())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(False)
        self._process.join(30.0)
        self._process.kill()
        self._process.join()


@pytest.mark.processes
@pytest.mark.parametrize("target", ["rendezvous", pytest.param("door", marks=pytest.mark.nightly)])
def test_idle_strangers_shut_nobody_out(target: str) -> None:
    """600 of them, where the process may open 256 files; while they stay, and when they go."""
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(contextlib.closing(Served(256)))
        port = served.port
        if target == "door":
            port = int(served.address.rpartition(":")[2])
        first = stack.enter_context(line_to(served.port))
        first.report(Report("first"))
        assert told(first) == Numbered("first", 0)
        with idle_strangers(600, port):
            _assert_served(served, 1)
        _assert_served(served, 2)
        assert [told(first), told(first)] == [Numbered(str(n), n) for n in (1, 2)]


def _assert_served(served: Served, number: int) -> None:
    with line_to(served.port) as line:
        line.report(Report(str(number)))
        assert told(line) == Numbered(str(number), number)
    with visiting(served.address, SECRET, 1 << 20, 60.0) as ask:
        assert ask({"number": number}) == {"asked": {"number": number}}


@pytest.mark.nightly
@pytest.mark.processes
def test_an_idle_rendezvous_rests_and_hears_at_once() -> None:
    """512 members train, and say as often as they are asked that they live.

    Such reports cost the rendezvous a fraction of reports that need a decision. A report that it
    cannot read is answered at once, long before the next look is due.
    """
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(contextlib.closing(Served()))
        stack.enter_context(many_files())
        lines = [stack.enter_context(_calling(served.port)) for _ in range(512)]
        for number, line in enumerate(lines):
            _say(line, _training(number))
        pace = _pace(lines[-1])
        assert 0.25 < pace <= NEAR / 2
        _beat(lines, pace, 4.0)  # it has listened, and gone on with the run
        before = served.spent()
        _beat(lines, pace, 6.0)
        between = served.spent()
        _beat(lines, pace, 6.0, _training)
        beats, reports = between - before, served.spent() - between
        waits = []
        for number in range(41):
            time.sleep(0.017)  # at no fixed place between two looks of the rendezvous
            said = time.monotonic()
            _say(lines[number], replace(_training(number), beat=10_000, terms=Terms(min_workers=0)))
            while "trouble" not in json.loads(lines[number].receive()):
                pass
            waits.append(time.monotonic() - said)
    assert beats < 0.4 * reports
    assert sorted(waits)[20] < pace / 4


def _pace(line: Link) -> float:
    """Return the seconds between two reports that the rendezvous asks for when all have come."""
    line.send(b"")
    line.send(
        json.dumps(
            {"report": replace(_training(0), terms=Terms(min_workers=0)).in_words()}
        ).encode()
    )
    pace = 0.0
    while "trouble" not in (said := json.loads(line.receive())):
        pace = said.get("pace", pace)
    return pace


def _calling(port: int) -> Any:
    return calling(("127.0.0.1", port), SECRET, "rendezvous", 1 << 20, 60.0, "the rendezvous")


def _training(number: int) -> Report:
    return Report(f"token {number}", 1, "training", run="run", number=number, round=7)


def _say(line: Link, report: Report) -> None:
    if report.beat == 1:
        line.send(json.dumps({"term": "", "cursor": 0}).encode())
    line.send(json.dumps({"report": report.in_words()}).encode())


def _beat(lines: list[Link], pace: float, seconds: float, says: Any = None) -> None:
    """Let all say that they live, evenly in time; or what they do, if ``says`` tells it."""
    began = time.monotonic()
    for count in range(int(seconds / pace * len(lines))):
        number = count % len(lines)
        if says is None:
            lines[number].send(b"")
        else:
            _say(lines[number], replace(says(number), beat=2 + count))
        if count % 16 == 0:
            time.sleep(max(0.0, began + count * pace / len(lines) - time.monotonic()))


def test_a_worker_gives_its_port_to_who_has_the_secret_and_tells_what_the_file_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves in place of a rendezvous, without a roll, and knows rounds 0 to 5."""
    rounds = [Round(number, (0, 1), run="a") for number in range(6)]
    (tmp_path / "roll").write_text("".join(map(line_of, rounds[:3])))
    with hold_port() as held:
        port = held.getsockname()[1]
        with line_to(port) as line:
            until(lambda: not line.status.trouble)
            line._rounds.extend(rounds)
            with monkeypatch.context() as patch:
                patch.setattr("lightning_gc.elastic.rendezvous.TAKEN", 1.0)
                with pytest.raises(BusyError, match="only to a rendezvous with its secret"):
                    serve(port, "another", tmp_path / "roll")
            assert line._deputy._serving.leaves == float("inf")
            _claim(port, SECRET)
            with contextlib.closing(Rendezvous(port, "secret", tmp_path / "roll")) as restarted:
                until(lambda: len(restarted._known) == 3)
                assert [*restarted._known.values()] == rounds[3:]
                assert (line._deputy._serving, line.status.trouble) == (None, "")
