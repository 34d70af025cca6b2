"""Rendezvous: where the keeper of an elastic run is heard, in a process or in a worker's."""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import logging
import math
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lightning_gc.core import TEXT, Listed, Record
from lightning_gc.core.notices import AGAIN, FIRST, say
from lightning_gc.core.saved_state import INTEGER
from lightning_gc.elastic.channel import Guest, Listener, Seal, calling
from lightning_gc.elastic.roll import (
    BEAT,
    NEAR,
    Begun,
    Ended,
    Enter,
    Entry,
    Keeper,
    Numbered,
    Refused,
    Report,
    Round,
    Verdict,
    in_words,
    legible,
    workers_in_words,
)
from lightning_gc.elastic.roll_file import BusyError, RollFile
from lightning_gc.local_steps.round_plan import check_secret
from lightning_gc.transports.interfaces import is_bindable

_log = logging.getLogger(__name__)
KEPT = 4096
"""Number of entries of the log that a worker can still be told."""
_PULSE = 5.0
"""Seconds between two signs of life of a rendezvous."""
MOST = 1 << 24
"""Most bytes of a report, an entry or an address of a group."""
_CROWD = 680
"""Most reports in a second that a rendezvous asks for, as long as workers stay near."""
_NAP = 2.8e-5
"""Seconds for each worker that a rendezvous waits between two looks, up to 14 ms."""
_SPACES = 8
"""Groups whose members may still be looking for each other."""
PLACE = "rendezvous"
"""Name of the rendezvous in the handshake of a line to it."""
PAUSE = 3.0
"""Seconds without an answer, after which a worker serves in place of a rendezvous that has died."""
TAKEN = 10.0
"""Seconds in which ``lightning-gc rendezvous`` takes a port over from a worker."""
_LAST_READ = 0.5
"""Seconds in which others read what a rendezvous has decided last, before it ends."""


class Chronicle:
    """Tells in sentences what a rendezvous decides, and for whom workers wait.

    Rounds that differ in nothing but their number are told together, each half minute.

    Example:
        >>> chronicle = Chronicle()
        >>> chronicle.tell(Numbered("token", 2, "10.0.0.3:41234"), now=0.0)
        ['Worker 2 has come from 10.0.0.3:41234.']
        >>> chronicle.tell(Refused("token", "every is 8 here, and 16 in the run"), now=1.0)
        ['Worker 2 is refused: every is 8 here, and 16 in the run.']
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # token -> number
        self._members: tuple[int, ...] = ()
        self._untold: list[int] = []  # rounds
        self._due = -math.inf  # when rounds are told next
        self._awaited, self._waits_from, self._waits_until = "", 0.0, 0.0

    def tell(self, entry: Entry, now: float) -> list[str]:
        """Return the sentences on an entry of the log."""
        match entry:
            case Numbered(token, number, address):
                self._numbers[token] = number
                return [
                    f"{self._who(token)} has come from {legible(address) or 'an unknown address'}."
                ]
            case Refused(token, why):
                return [f"{self._who(token)} is refused: {why}."]
            case Enter(token, donor=donor):
                return [f"{self._who(token)} begins at the weights of worker {donor}."]
            case Begun(workers=workers):
                return [f"A run begins, with {workers} worker{'s' if workers > 1 else ''}."]
            case Verdict(record=None):
                return [*self._rounds(), f"Round {entry.round} is repeated: {entry.why}."]
            case Verdict(record=Round() as record):
                return self._round(record, now)
            case Ended():
                return [*self._rounds(), f"The run has ended, before round {entry.round}."]
        return []

    def wait(self, awaited: str, now: float) -> list[str]:
        """Return the sentence on a wait that is long, and again each half minute."""
        if awaited != self._awaited:
            self._awaited, self._waits_from, self._waits_until = awaited, now, now + FIRST
        if not awaited or now < self._waits_until:
            return []
        self._waits_until = now + AGAIN
        return [
            *self._rounds(),
            f"Workers wait for {awaited} ({now - self._waits_from:.0f} s so far).",
        ]

    def _round(self, record: Round, now: float) -> list[str]:
        said = [f"Worker {number} has left." for number in record.left]
        said += [f"Worker {number} is silent." for number in record.lost]
        before = []
        if record.members != self._members or said:
            before, self._members, self._due = self._rounds(), record.members, now
        self._untold.append(record.round)
        if now < self._due:
            return [*before, *said]
        self._due = now + AGAIN
        return [*before, *said, *self._rounds()]

    def _rounds(self) -> list[str]:
        untold, self._untold = self._untold, []
        if not untold:
            return []
        first, last = untold[0], untold[-1]
        rounds = f"Rounds {first} to {last} are" if last > first else f"Round {last} is"
        return [f"{rounds} committed, by {workers_in_words(self._members)}."]

    def _who(self, token: str) -> str:
        return f"Worker {self._numbers[token]}" if token in self._numbers else "A worker"


class Rendezvous:
    """Hears workers, and decides on rounds, in one thread of this process.

    It pushes entries of the log when they are said, and hears a report when it comes. It forgets a
    connection when that ends. Idle it costs next to nothing: it looks at the clock so rarely that
    this takes a hundredth of a core, and asks crowds to report less often.

    It may be stopped and started again: the file and the members' reports hold all that it needs to
    know.

    Args:
        port: on which it listens, on all interfaces. 0: any free one.
        secret: that members share; None: everybody may take part.
        roll: file to which a line is added for every committed round, before members are told, as
            by ``RollFile``. A rendezvous that starts with it again continues its run. None: no
            file. A rendezvous that starts again then knows only the commits that a living member
            has read.

    Attributes:
        port: on which it listens.
        leaves: time at which a worker that serves it gives the port to ``lightning-gc rendezvous``.

    Raises:
        RuntimeError: the port cannot be used, or another process writes the file.
        ValueError: the file is not a roll.
    """

    def __init__(self, port: int, secret: str | None = None, roll: Path | None = None) -> None:
        check_secret(secret, "Rendezvous")
        try:
            self._listener = Listener((port,), Seal(secret), MOST, PLACE)
        except OSError as error:
            raise RuntimeError(f"Port {port} cannot be used ({error}). Give another one.") from (
                error
            )
        self.port = self._listener.port
        self._term, self._said = secrets.token_hex(4), deque[str](maxlen=KEPT)
        self._oldest = 0  # number of the oldest entry that is kept
        self._ended = threading.Event()
        self._awaited = ""  # as members are told
        self._meetings, self._chronicle = Meetings(), Chronicle()
        self._known: dict[tuple[str, int], Round] = {}  # told by members
        self.leaves = math.inf
        try:
            self._roll = None if roll is None else RollFile(roll)
        except BaseException:
            self._listener.close()
            raise
        keeper = Keeper(time.monotonic(), file=() if self._roll is None else self._roll.found)
        self._thread = threading.Thread(
            target=self._keep, args=(keeper,), name="rendezvous", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Stop the keeper, and hang up; again does nothing."""
        atexit.unregister(self.close)
        self._ended.set()
        self._listener.wake()
        self._thread.join()

    def _keep(self, keeper: Keeper) -> None:
        due = rest = pulse = 0.0
        while not self._ended.is_set():
            heard = self._listener.wait(min(due, pulse))
            now, began = time.monotonic(), time.thread_time()
            for guest, message in heard:
                if message:
                    self._hear(keeper, guest, message, now)
                    due = min(due, rest)
                elif isinstance(guest.note, str):
                    keeper.hear_again(guest.note, now)
            if now >= due:
                said = keeper.tick(now)
                for entry in said:
                    self._say(entry, now)
                took = time.thread_time() - began
                rest = now + took
                due = now if said else now + min(max(0.02, 400 * took), NEAR / 2)
            if now >= pulse:
                pulse = now + _PULSE
                self._awaited = keeper.awaited(now)
                self._tell(self._listener.guests, pace=self._pace(), awaited=self._awaited)
                for sentence in self._chronicle.wait(self._awaited, now):
                    say(sentence)
            # Reports of a crowd are read together: a wake-up costs more than ten of them.
            self._ended.wait(min(len(self._listener.guests) * _NAP, 0.014))
        self._listener.close()
        if self._roll is not None:
            self._roll.close()

    def _pace(self) -> float:
        """Return the seconds between two reports that workers are asked for."""
        return min(max(BEAT, len(self._listener.guests) / _CROWD), NEAR / 2)

    def _tell(self, guests: Iterable[Guest], **message: Any) -> None:
        data = json.dumps(message).encode()
        for guest in [*guests]:
            if isinstance(guest.note, str):
                self._listener.send(guest, data)

    def _hear(self, keeper: Keeper, guest: Guest, message: bytearray, now: float) -> None:
        """Take a message of a worker: a report, or a question."""
        try:  # a line's note is the token of its reports, a group's store has its question
            match guest.note, json.loads(message):
                case str(), {"report": str(text)}:
                    report = Report.read(text)
                    guest.note = report.token
                    keeper.hear(report, now)
                case str(), {"round": dict(known)}:
                    self._learn(Round.of(known))
                case None, {"wanted": "port"}:
                    self.leaves = min(self.leaves, now + _LAST_READ)
                    self._listener.drop(guest)
                case None, {"term": str(term), "cursor": int(cursor)}:
                    guest.note = ""
                    self._catch_up(guest, term, cursor)
                case None, {"do": _} as asked:
                    self._meet(guest, asked)
                case _, other:
                    raise ValueError(f"{str(other)[:60]} is not a message of a worker.")
        except (ValueError, TypeError) as error:
            self._listener.note("ignored", f"ignored a message: {error}")
            if isinstance(guest.note, str):
                self._tell([guest], trouble=f"the rendezvous has ignored a report: {error}")
            else:
                self._listener.drop(guest)

    def _learn(self, known: Round) -> None:
        """Keep a round of another rendezvous for the file, among the last ones."""
        self._known[known.run, known.round] = known
        if len(self._known) > KEPT:
            del self._known[next(iter(self._known))]

    def _catch_up(self, guest: Guest, term: str, cursor: int) -> None:
        """Let a worker go on in the same log, or begin in a new one; say where the file ends."""
        end = self._oldest + len(self._said)
        if term != self._term:
            # A restarted keeper speaks to those who were there before.
            cursor = 0 if term else end
        at = min(max(cursor, self._oldest), end)
        file = None if self._roll is None else self._roll.end
        known = {"pace": self._pace(), "awaited": self._awaited, "file": file}
        self._tell([guest], term=self._term, at=at, **known)
        for text in [*self._said][at - self._oldest :]:
            self._tell([guest], entry=text)

    def _meet(self, guest: Guest, asked: Any) -> None:
        """Answer a ``MeetingStore``, or note what it waits for."""
        answer = self._meetings.answer(asked)
        guest.note = asked if answer is None else None
        if answer is not None:
            self._listener.send(guest, json.dumps(answer).encode())
            waiting = [g for g in self._listener.guests if isinstance(g.note, dict)]
            for other in waiting if asked["do"] in ("set", "add", "swap") else ():
                if other.note["in"] == asked["in"]:
                    self._meet(other, other.note)

    def _say(self, entry: Entry, now: float) -> None:
        decided = entry.record if isinstance(entry, Verdict) else entry
        if isinstance(decided, Round | Ended) and self._roll is not None:
            self._roll.append(decided, self._known.values)
        _log.debug("%s", entry)
        for sentence in self._chronicle.tell(entry, now):
            say(sentence)
        self._oldest += len(self._said) == KEPT
        self._said.append(in_words(entry))
        self._tell(self._listener.guests, entry=self._said[-1])


_ASKED = Record(
    {"do": TEXT, "in": TEXT, "keys": Listed(TEXT)}, {"values": Listed(TEXT), "number": INTEGER}
)


class Meetings:
    """Keeps keys and values by which members of a group find each other, for the last groups.

    Example:
        >>> meetings = Meetings()
        >>> meetings.answer({"do": "get", "in": "group", "keys": ["a"]})
        >>> meetings.answer({"do": "set", "in": "group", "keys": ["a"], "values": ["00ff"]})
        []
        >>> meetings.answer({"do": "get", "in": "group", "keys": ["a"]})
        ['00ff']
    """

    def __init__(self) -> None:
        self._spaces: dict[str, dict[str, str]] = {}

    def answer(self, asked: Any) -> list[Any] | None:
        """Return the answer to a question; None if it waits for a key that nobody has set."""
        _ASKED.check(asked, "question")
        if not asked["keys"]:
            raise ValueError("a question without keys")
        space = self._spaces.setdefault(asked["in"], {})
        if len(self._spaces) > _SPACES:
            del self._spaces[next(iter(self._spaces))]
        keys = asked["keys"]
        match asked:
            case {"do": "get"}:
                return [space[key] for key in keys] if all(key in space for key in keys) else None
            case {"do": "check"}:
                return [key in space for key in keys]
            case {"do": "set", "values": values}:
                space.update(zip(keys, values, strict=True))
                return []
            case {"do": "add", "number": number}:
                total = int(bytes.fromhex(space.get(keys[0], "30"))) + number
                space[keys[0]] = str(total).encode().hex()
                return [total]
            case {"do": "swap", "values": [expected, wanted]}:
                if space.get(keys[0], "") == expected:
                    space[keys[0]] = wanted
                return [space.get(keys[0], expected)]
            case {"do": "drop"}:
                return [space.pop(keys[0], None) is not None]
        raise ValueError(f"{str(asked)[:60]} is not a question of a group.")


class Deputy:
    """Serves the rendezvous from a worker's process, while nobody else does at its address."""

    def __init__(self, host: str, port: int, secret: str | None, roll: Path | None) -> None:
        self._host, self._port, self._secret, self._roll = host, port, secret, roll
        self._serving: Rendezvous | None = None
        self._from: float | None = None  # it serves, if nobody answers by then

    def step_in(self, again: bool) -> None:
        """Serve if nobody answers, ``again`` or not; ConnectionError if somebody else is to."""
        try:
            socket.create_connection((self._host, self._port), 5.0).close()
            self._from = None
        except OSError as error:
            if self._from is None and _is_here(self._host):
                # If a rendezvous is restarted, it comes first.
                self._from = time.monotonic() + (PAUSE if again else 0.0)
            if self._from is None or time.monotonic() < self._from:
                raise ConnectionError(
                    f"nobody answers at {self._host}:{self._port} ({error})"
                ) from error
            # Another process of this machine may be quicker. Then this one fails, and connects.
            self._serving = Rendezvous(self._port, self._secret, self._roll)
            (_log.warning if again else say)(
                "Nobody answers at %s:%d, so this worker serves the rendezvous, and %s. "
                "lightning-gc rendezvous takes its port over at any time.",
                *(self._host, self._port),
                f"continues {self._roll}" if self._roll else "keeps no roll",
            )

    def gives_back(self) -> bool:
        """Return whether ``lightning-gc rendezvous`` wants the port, and close the rendezvous."""
        if self._serving is None or time.monotonic() < self._serving.leaves:
            return False
        self._serving.close()
        self._serving, self._from = None, time.monotonic() + TAKEN
        _log.warning("This worker gives port %d to lightning-gc rendezvous.", self._port)
        return True

    def close(self) -> None:
        """Serve no more, once others have read what was decided last."""
        if self._serving is not None:
            time.sleep(_LAST_READ)
            self._serving.close()


def _is_here(host: str) -> bool:
    """Return whether a host's address is one of this machine's."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError:
        return False
    return is_bindable(family, place)


def serve(
    port: int,
    secret: str | None,
    roll: Path | None,
    until: Callable[[], bool] = lambda: False,
    began: Callable[[int], None] = lambda _: None,
) -> None:
    """Serve a rendezvous until ``until`` is true, or Ctrl-C.

    Args:
        port: as for ``Rendezvous``. A worker that serves there gives it back.
        secret: that members share, or None.
        roll: as for ``Rendezvous``.
        until: when it ends.
        began: called with the port once it listens.

    Raises:
        BusyError: another program listens at the port.
    """
    _claim(port, Seal(secret))
    served = Rendezvous(port, secret, roll)
    began(served.port)
    try:
        while not until():
            time.sleep(0.2)
    finally:
        served.close()


def _claim(port: int, seal: Seal) -> None:
    """Return once the port is free; ask a worker that serves there for it."""
    limit = time.monotonic() + TAKEN
    while not _is_free(port, seal):
        if time.monotonic() > limit:
            raise BusyError(
                f"Port {port} is in use by {_holder(port)}. Stop it, or give another --port. "
                f"A worker gives the port back only to a rendezvous with its secret."
            )
        with (
            contextlib.suppress(OSError, ValueError),  # another program, or another secret
            calling(("127.0.0.1", port), seal, PLACE, MOST, 2.0, "the program there") as link,
        ):
            link.send(json.dumps({"wanted": "port"}).encode())
            link.hang_up()
        time.sleep(0.2)


def _is_free(port: int, seal: Seal) -> bool:
    try:
        Listener((port,), seal, MOST, PLACE).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise BusyError(f"Port {port} cannot be used: {error.strerror}.") from error
        return False
    return True


def _holder(port: int) -> str:
    """Return the process that listens at a port, as far as the system tells it."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if str(link.readlink()) in sockets:
                words = (link.parents[1] / "cmdline").read_text().split("\0")
                return f"process {link.parts[2]} ({' '.join(words)[:80].strip()})"
    return "another program"
