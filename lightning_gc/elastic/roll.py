"""Keeper and Roll: who takes part in which round of an elastic run; pure, without sockets.

Members report what they do, the keeper answers with entries of a log. Every member reads the same
log, so the keeper's decisions are the only ones: who gets which number, who begins from whose
weights, who is called to a round, and whether the round is committed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise, repeat
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from lightning_gc.core import COUNT, NUMBER, TEXT, WHOLE, Each, Leaf, Listed, Optional, Pair, Record

BEAT = 0.25
"""Seconds between two reports of a member that has nothing new to say."""
NEAR = 6 * BEAT
"""Seconds of silence after which a member is not called to a round."""
AWAITED = range(3, 6)
"""Rounds wait for a worker that was sent to a snapshot so often, and has not been in time yet."""

Phase = Literal[
    "coming", "entering", "ready", "training", "asking", "running", "done", "failed", "left"
]


@cache
def _structure(kind: Any) -> Any:
    """Return the ``Structure`` of a type's values in JSON. Whole numbers are at least 0."""
    parts = get_args(kind)
    if _fields(kind):
        return Record({name: _structure(each) for name, each in _fields(kind)})
    made: dict[Any, Callable[[], Any]] = {
        UnionType: lambda: Optional(_structure(parts[0])),
        Literal: lambda: Leaf(f"one of {parts}", parts.__contains__),
        dict: lambda: Each(_structure(parts[1])),
        tuple: lambda: (
            Listed(_structure(parts[0])) if ... in parts else Pair(*map(_structure, parts))
        ),
        Annotated: lambda: parts[1],
        None: lambda: {int: WHOLE, float: NUMBER, str: TEXT}[kind],
    }
    return made[get_origin(kind)]()


def _read(kind: Any, said: Any) -> Any:
    """Return the value of ``dataclasses.asdict`` after JSON; ValueError if it is none."""
    _structure(kind).check(said, kind.__name__.lower())
    return _made(kind, said)


def _made(kind: Any, said: Any) -> Any:
    parts, origin, fields = get_args(kind), get_origin(kind), _fields(kind)
    if fields:
        return kind(**{name: _made(each, said[name]) for name, each in fields})
    if said is None or not parts:
        return said
    if origin is tuple:
        return tuple(map(_made, repeat(parts[0]) if ... in parts else parts, said))
    if origin is dict:
        return {parts[0](name): _made(parts[1], value) for name, value in said.items()}
    return said if origin is Literal else _made(parts[0], said)


@cache
def _fields(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Return names and types of a dataclass's fields; of any other type none."""
    known = dataclasses.is_dataclass(kind)
    return tuple(get_type_hints(kind, include_extras=True).items()) if known else ()


@dataclass(frozen=True)
class Entrance:
    """How a worker has come into a round.

    Attributes:
        round: its first round.
        position: steps of the round that the others had done.
        donor: number of the worker whose snapshot it has; its own if it began the run.
        error: ``"kept"`` if it has its own error of before, ``"zero"`` if it begins without.
    """

    round: int = 0
    position: int = 0
    donor: int = 0
    error: Literal["kept", "zero"] = "zero"


@dataclass(frozen=True)
class Terms:
    """A worker's settings and address, equal in all its reports.

    Attributes:
        wanted: the number that it would like to have.
        address: where it serves snapshots.
        settings: name -> text of what must be equal on all workers.
        min_workers, grace, timeout: as for ``Elastic``.
    """

    wanted: int | None = None
    address: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    min_workers: Annotated[int, COUNT] = 2
    grace: float = 5.0
    timeout: float = 30.0


@dataclass(frozen=True)
class Report:
    """A worker's description of itself. Each report holds all of it, so that the last one suffices.

    Attributes:
        token: a random name of the process.
        beat: number of this report.
        phase: ``"coming"`` needs a number, ``"entering"`` a snapshot. ``"ready"`` waits for the run
            to begin, ``"training"`` makes its steps, ``"asking"`` waits to be called. ``"running"``
            is in an exchange, ``"done"`` has its result, ``"failed"`` has lost a peer. ``"left"``
            has said goodbye.
        run: random name of the run; empty before the worker has entered one.
        sought: the run whose snapshot it needs, of a worker that has been sent to one.
        number: the worker's number; None before the keeper has given one.
        free: the least number that no worker has had, as far as it has read.
        request: counts how often it has asked for a snapshot.
        round: number of the round.
        attempt: of the round.
        mark: digest of the common weights before the round.
        digest: of the round's result.
        last: digest of the result of the round before.
        norm: of its error after the last committed round.
        members: of the attempt that is done or has failed.
        entrance: how it came in last.
        inherited: pairs of a round, and the number of a leaver whose error it has added to its own
            before that round. The latest ones only.
        terms: what it never changes.
    """

    token: str
    beat: int = 0
    phase: Phase = "coming"
    run: str = ""
    sought: str = ""
    number: int | None = None
    free: int = 0
    request: int = 0
    round: int = 0
    attempt: int = 0
    mark: str = ""
    digest: str = ""
    last: str = ""
    norm: float = 0.0
    members: tuple[int, ...] = ()
    entrance: Entrance | None = None
    inherited: tuple[tuple[int, int], ...] = ()
    terms: Terms = field(default_factory=Terms)

    def in_words(self) -> str:
        """Return it as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str) -> Report:
        """Return the report of ``in_words()``; ValueError if it is not one."""
        made: Report = _read(cls, json.loads(text))
        return made


@dataclass(frozen=True)
class Round:
    """A committed round: what a replay needs to know of it.

    Attributes:
        round: its number.
        members: numbers of the workers that have taken part, ascending.
        attempt: how often it was repeated.
        entered: number -> how it came in, of those whose first round this is.
        inherited: number -> numbers of leavers whose errors it has added to its own before.
        left: workers that have left since the last round, by a goodbye.
        lost: number -> norm of the error that is lost with it, of workers of a round before that
            are silent. One that was only frozen may enter a later round with its error.
        digest: of its result.
        run: name of the run.
    """

    round: int
    members: tuple[int, ...]
    attempt: int = 0
    entered: dict[int, Entrance] = field(default_factory=dict)
    inherited: dict[int, tuple[int, ...]] = field(default_factory=dict)
    left: tuple[int, ...] = ()
    lost: dict[int, float] = field(default_factory=dict)
    digest: str = ""
    run: str = ""

    @classmethod
    def of(cls, said: Any) -> Round:
        """Return the round of ``dataclasses.asdict``, also after JSON; ValueError if it is none."""
        made: Round = _read(cls, json.loads(json.dumps(said)))  # with texts as keys
        return made


@dataclass(frozen=True)
class Ended:
    """A run has no members any more; its last committed round is ``round - 1``."""

    run: str
    round: int


class Roll:
    """The committed rounds of a run, in order: a file with one line of JSON for each.

    Args:
        rounds: in order; numbers ascend by one.

    Raises:
        ValueError: rounds that do not follow each other.

    Example:
        >>> roll = Roll([Round(0, (0, 1)), Round(1, (0, 1, 2), entered={2: Entrance(round=1)})])
        >>> roll.numbers
        (0, 1, 2)
    """

    def __init__(self, rounds: Iterable[Round] = ()) -> None:
        self._rounds = list(rounds)
        for before, after in pairwise(self._rounds):
            if after.round != before.round + 1:
                raise ValueError(
                    f"A roll has round {after.round} after round {before.round}; use the roll of "
                    f"the rendezvous, or of a worker that was there from the beginning."
                )

    def __iter__(self) -> Iterator[Round]:
        return iter(self._rounds)

    def __len__(self) -> int:
        return len(self._rounds)

    def __getitem__(self, index: int) -> Round:
        return self._rounds[index]

    def append(self, record: Round) -> None:
        """Add the next round."""
        Roll([*self._rounds[-1:], record])
        self._rounds.append(record)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of all workers that have been members, ascending."""
        return tuple(sorted({number for each in self._rounds for number in each.members}))

    def save(self, path: Path | str) -> None:
        """Write the file; ValueError if another file than a roll has this name."""
        check_roll(Path(path))
        Path(path).write_text("".join(line_of(each) for each in self._rounds))

    @classmethod
    def read(cls, path: Path | str) -> Roll:
        """Return the roll in a file; ValueError, with the line, if one cannot be read.

        A file may have several runs, each resumed from a checkpoint of the one before. Rounds
        after that checkpoint do not count: their weights are lost. A rendezvous that was restarted
        without its file may have written a round twice.
        """
        rounds: list[Round] = []
        for found in read_lines(Path(path).read_text(), str(path)):
            if isinstance(found, Ended):
                continue
            if rounds and rounds[-1].run != found.run:
                rounds = [each for each in rounds if each.round < found.round]
            same = [each for each in rounds if each.round == found.round][-1:]
            if not same or same[0].digest != found.digest:
                rounds.append(found)
        return cls(rounds)


def line_of(record: Round | Ended) -> str:
    """Return a round, or the end of a run, as a line of a roll's file."""
    return json.dumps(dataclasses.asdict(record)) + "\n"


def read_lines(text: str, name: str) -> Iterator[Round | Ended]:
    """Yield what ``line_of`` wrote; ValueError, with the line, if one cannot be read.

    A last line without its end is left out: the rendezvous died before it told a member of it.
    """
    *lines, _ = text.split("\n")
    for number, line in enumerate(lines, 1):
        try:
            said = json.loads(line)
            if isinstance(said, dict) and set(said) == {"run", "round"}:
                yield _read(Ended, said)
            else:
                yield Round.of(said)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name}, line {number}, is not a round: {error}") from error


def check_roll(path: Path) -> None:
    """Raise a ValueError if a file exists that is not a roll."""
    if not path.exists():
        return
    if not path.is_file():
        raise ValueError(f"The roll {path} is not a file. Give the name of a file.")
    judged(path.read_bytes(), path)


def judged(content: bytes, path: Path) -> tuple[list[Round | Ended], Round | Ended | bytes]:
    """Return the records of complete lines, and the last line if it has no end.

    The latter is a record, half a one as bytes, or empty.

    Raises:
        ValueError: the content is not a roll's.
    """
    advice = "The file was not changed. Give the roll of this run, or the name of a new file."
    whole, newline, tail = content.rpartition(b"\n")
    try:
        found = list(read_lines((whole + newline).decode(), str(path)))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a roll, because it is not text. {advice}") from error
    except ValueError as error:
        raise ValueError(f"{str(error).rstrip('.')}. {advice}") from error
    with contextlib.suppress(ValueError):
        return found, next(read_lines(f"{tail.decode()}\n", "")) if tail else b""
    if found and _begins_a_line(tail):
        return found, tail
    raise ValueError(f"{path} is not a roll: its last line is not half a round. {advice}")


def _begins_a_line(tail: bytes) -> bool:
    lines = (line_of(each).encode() for each in (Round(0, ()), Ended("", 0)))
    return any(tail[:9] == line[:9][: len(tail)] for line in lines)


# ------------------------------------------------------------------------------ the log's entries


@dataclass(frozen=True)
class Numbered:
    """A process, which serves snapshots at ``address``, gets the number of a worker."""

    token: str
    number: int
    address: str = ""


@dataclass(frozen=True)
class Refused:
    """A process cannot take part."""

    token: str
    why: str


@dataclass(frozen=True)
class Founded:
    """A run is to begin: ``tokens`` take the founder's snapshot."""

    run: str
    founder: str
    address: str
    number: int
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class Begun:
    """All founders have the snapshot. The run has this number of workers."""

    run: str
    tokens: tuple[str, ...]
    workers: int = 0


@dataclass(frozen=True)
class Enter:
    """A worker takes a member's snapshot and continues from there; its own steps are dropped.

    The run then has this number of workers.
    """

    token: str
    request: int
    run: str
    donor: int
    address: str
    workers: int = 0


@dataclass(frozen=True)
class Called:
    """The roll of an attempt at a round is closed."""

    run: str
    round: int
    attempt: int
    members: tuple[int, ...]
    group: str
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """An attempt is committed, with the record of its round, or it is to be repeated."""

    run: str
    round: int
    attempt: int
    record: Round | None
    why: str = ""


Entry = Numbered | Refused | Founded | Begun | Enter | Called | Verdict | Ended
_ENTRIES: dict[str, Any] = {cls.__name__: cls for cls in get_args(Entry)}


def in_words(entry: Entry) -> str:
    """Return an entry as JSON."""
    return json.dumps([type(entry).__name__, dataclasses.asdict(entry)])


def entry_of(text: str) -> Entry:
    """Return the entry of ``in_words``; ValueError if it is none."""
    try:
        kind, said = json.loads(text)
        made: Entry = _read(_ENTRIES[kind], said)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an entry of the keeper's log: {error}") from error
    return made


# ------------------------------------------------------------------------------------- a member


@dataclass(frozen=True)
class Do:
    """An action that an entry of the log demands of a worker.

    Attributes:
        what: ``"number"``: it has a number. ``"fetch"``: take the snapshot at ``address``;
            ``"fetched"``: that is done.
            ``"begin"``: train. ``"run"``: exchange with ``members`` in ``group``. ``"commit"``:
            take over the result. ``"repeat"``: restore errors. ``"refused"``: stop.
        address: of the donor.
        donor: its number.
        group: name of the process group.
        why: of a repetition or a refusal.
        workers: number of workers of the run that it begins with.
    """

    what: Literal["number", "fetch", "fetched", "begin", "run", "commit", "repeat", "refused"]
    address: str = ""
    donor: int = 0
    group: str = ""
    why: str = ""
    workers: int = 0


class Member:
    """A worker's part of the protocol: it reads the log in order, and reports.

    Args:
        report: what it says at first.

    Attributes:
        report: what it says now.
        roll: the rounds that it has seen committed.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        self.roll: list[Round] = []
        self._run = ""  # of the snapshot that it is to fetch
        self._donor = 0
        self._founding = False

    @property
    def number(self) -> int:
        """The worker's number, which it has by now."""
        return _number(self.report)

    def _say(self, **changes: Any) -> None:
        self.report = replace(self.report, **changes)

    def read(self, entry: Entry) -> Do | None:
        """Take an entry; return what is to be done, if anything."""
        me = self.report
        match entry:
            case Numbered(token, number):
                self._say(free=max(me.free, number + 1))
                if token == me.token:
                    self._say(number=number)
                    return Do("number")
            case Refused(token, why) if token == me.token:
                return Do("refused", why=why)
            case Founded() if me.token in entry.tokens and me.phase in ("entering", "ready"):
                if entry.founder == me.token:
                    own = Entrance(me.round, 0, entry.number, "kept")
                    self._say(phase="ready", run=entry.run, entrance=own)
                    return None
                return self._fetch(entry.run, entry.number, entry.address, founding=True)
            case Begun(run) if run == me.run and me.phase == "ready":
                self._say(phase="training")
                return Do("begin", workers=entry.workers)
            case Enter() if (entry.token, entry.request) == (me.token, me.request):
                fetch = self._fetch(entry.run, entry.donor, entry.address, founding=False)
                return replace(fetch, workers=entry.workers)
            case Called() if self._is_mine(entry) and me.phase == "asking":
                if me.number not in entry.members:
                    return None
                self._say(phase="running", attempt=entry.attempt, members=entry.members)
                return Do("run", group=entry.group)
            case Verdict() if self._is_mine(entry) and me.phase in ("done", "failed"):
                if entry.attempt == me.attempt:
                    return self._take(entry)
        return None

    def _is_mine(self, entry: Called | Verdict) -> bool:
        return (entry.run, entry.round) == (self.report.run, self.report.round)

    def _fetch(self, run: str, donor: int, address: str, founding: bool) -> Do:
        self._run, self._donor, self._founding = run, donor, founding
        self._say(phase="entering", run="", sought="" if founding else run)
        return Do("fetch", address=address, donor=donor)

    def _take(self, verdict: Verdict) -> Do:
        me, record = self.report, verdict.record
        if record is None:
            self._say(phase="asking", attempt=verdict.attempt + 1)
            return Do("repeat", why=verdict.why)
        recent = tuple(pair for pair in me.inherited if pair[0] >= me.round)
        self._say(
            phase="training", round=me.round + 1, attempt=0, last=record.digest, inherited=recent
        )
        self.roll.append(record)
        return Do("commit")

    def enters(self, round_: int, mark: str) -> None:
        """Ask for a run, at this round with these common weights."""
        self._say(phase="entering", round=round_, mark=mark, request=self.report.request + 1)

    def fetched(self, round_: int, position: int, error: Literal["kept", "zero"]) -> None:
        """Begin with the snapshot that was to be fetched.

        Args:
            round_: number of the round that is under way.
            position: steps of it that the donor has made.
            error: whether the worker keeps its error.
        """
        self._say(
            phase="ready" if self._founding else "training",
            run=self._run,
            sought="",
            round=round_,
            attempt=0,
            request=self.report.request + (not self._founding),
            entrance=Entrance(round_, position, self._donor, error),
        )
        self.roll.clear()

    def not_fetched(self) -> None:
        """Ask for a snapshot again: none could be had."""
        # ``sought`` stays: this worker begins no other run with the weights that it has now.
        self._say(phase="entering", run="", request=self.report.request + 1)

    def asks(self, mark: str, inherited: Iterable[int] = ()) -> None:
        """Ask to be called, with the digest of the common weights."""
        new = tuple((self.report.round, number) for number in inherited)
        self._say(phase="asking", mark=mark, inherited=(*self.report.inherited, *new))

    def ran(self, digest: str, norm: float) -> None:
        """Say that the exchange has ended, with the digest of its result."""
        self._say(phase="done", digest=digest, norm=norm)

    def failed(self) -> None:
        """Say that the exchange has failed."""
        self._say(phase="failed")

    def leaves(self) -> None:
        """Say goodbye."""
        self._say(phase="left")


# ------------------------------------------------------------------------------------- the keeper


@dataclass
class _Process:
    """A process that reports."""

    report: Report
    at: float  # when it was heard
    answered: int = -1  # the request for a snapshot that is answered next; -1: it has no number
    sent: int = 0  # how often to a snapshot, since its last round
    begun: bool = False  # whether it has been told to begin


_NAMED = 3
"""Most settings that a refusal names."""


def legible(text: str) -> str:
    """Return a text that another process has sent as a terminal may show it: on one short line."""
    shown = "".join(each if each.isprintable() else "?" for each in text[:300])
    return shown if len(text) <= 300 else f"{shown}..."


def differing(own: Mapping[str, str], others: Mapping[str, str]) -> str:
    """Return a clause that names the settings in which a worker differs from the run.

    Example:
        >>> differing({"every": "8"}, {"every": "16"})
        'every is 8 here, and 16 in the run. Give all workers the same settings'
    """
    names = [n for n in {**own, **others} if own.get(n) != others.get(n)]
    said = [
        f"{legible(name)} is {legible(own.get(name, 'not known'))} here, and "
        f"{legible(others.get(name, 'not known'))} in the run"
        for name in names[:_NAMED]
    ]
    more = f", and {len(names) - _NAMED} more differ" if len(names) > _NAMED else ""
    return f"{'; '.join(said)}{more}. Give all workers the same settings"


class Rounds:
    """The rounds of one run after the other: members are called, and attempts judged.

    Attributes:
        now: the keeper's time, which it moves on.
        near: seconds of silence after which a member is not called; more where reports are rare.
        heard: token -> process, of those that report and are not refused.
        run: name of the run; empty before one has begun.
        round: number of the round that is under way.
        attempt: of the round.
        called: the attempt that members are in; None: they are between two.
        judged: the attempts that this keeper has looked at.
        since: when enough workers had come or asked; NaN: they have not.
        last: number -> token, of the last round and those since.
        before: last reports of members of the last round, which a keeper before this one has heard.
        roll: the rounds committed by this keeper.
    """

    def __init__(self, now: float) -> None:
        self.now, self.near, self.heard = now, NEAR, dict[str, _Process]()
        self.run, self.round, self.attempt = "", 0, 0
        self.called: Called | None = None
        self.judged: set[tuple[str, int, int]] = set()
        self.since = math.nan
        self.roll: list[Round] = []
        self._serial, self._term = 0, secrets.token_hex(3)
        self.last: dict[int, str] = {}
        self.before: list[Report] = []
        self._norms: dict[int, float] = {}
        self._differing = 0

    def living(self, silence: float = math.inf) -> list[Report]:
        """Return what those say that have neither left nor been silent for so long."""
        return [
            each.report
            for each in self.heard.values()
            if each.report.phase != "left"
            and self.now - each.at <= min(silence, each.report.terms.timeout)
        ]

    def members(self, silence: float = math.inf) -> list[Report]:
        """Return the reports of the run's members, by number."""
        inside = [r for r in self.living(silence) if r.run == self.run and r.run]
        return sorted(inside, key=_number)

    def resume(self) -> None:
        """Go on with a run that members report, if there is one."""
        living = self.living()
        runs = [r for r in living if r.run and r.phase not in ("ready", "entering")]
        runs = [r for r in runs if r.run == self.run] or runs
        if not runs:
            return
        ahead = max(runs, key=lambda r: (r.round, r.phase in ("training", "asking")))
        judged = self.round if ahead.run == self.run else 0
        if ahead.round >= judged:
            self.run, self.round = ahead.run, ahead.round
        # Some may still be in the round that others have committed already. One that is further
        # behind has been away, and members know the result of the last round only.
        here = [r for r in runs if r.run == self.run]
        self._take_up([r for r in here if r.round >= max(judged, self.round - 1)])
        self.attempt = max((r.attempt for r in here if r.round == self.round), default=0)
        here = [r for r in self.before if r.run == self.run] + here
        self.last = {_number(r): r.token for r in here}
        self._norms = {_number(r): r.norm for r in here}

    def decide(self) -> Iterator[Entry]:
        """Call members, or judge the attempt that they are in."""
        if self.called is None:  # one that was frozen has come back to this round
            self._take_up([r for r in self.members() if r.round == self.round])
        yield from self._call() if self.called is None else self._judge()

    def keeps_up(self, member: Report) -> bool:
        """Return whether a member is in this round, or has yet to read how its last one ended."""
        exchanging = member.phase in ("running", "done", "failed")
        judged = attempt_of(member) in self.judged
        return member.round >= self.round or (exchanging and judged)

    def is_current(self, report: Report, mark: str) -> bool:
        """Return whether a worker has the common weights, of this mark, of this round."""
        if report.round != self.round or report.phase != "asking":
            return report.round == self.round
        return report.mark == mark

    def common_mark(self) -> str:
        """Return the mark of the weights with which this round begins.

        If marks differ, most asking workers have the right one, or else the lowest of them.
        """
        reports = [each.report for each in self.heard.values() if each.report.phase == "asking"]
        asking = [r for r in reports if (r.run, r.round) == (self.run, self.round)]
        marks = Counter(r.mark for r in asking)
        lowest = {r.mark: _number(r) for r in sorted(asking, key=_number, reverse=True)}
        return max(marks, key=lambda mark: (marks[mark], -lowest[mark]), default="")

    def _take_up(self, members: Sequence[Report]) -> None:
        """Judge the last attempt that members are in, if only a keeper before this one knew it."""
        under_way = [r for r in members if r.phase in ("running", "done", "failed")]
        under_way = [r for r in under_way if attempt_of(r) not in self.judged]
        if under_way:
            last = max(under_way, key=lambda r: (r.round, r.attempt))
            self.round = last.round
            self.called = Called(self.run, last.round, last.attempt, last.members, "")

    def _call(self) -> Iterator[Entry]:
        """Close the roll of the next attempt, when all or enough have asked."""
        near = {r.token for r in self.members(self.near)}
        here = [r for r in self.members() if r.round == self.round]
        asking = [r for r in here if r.phase == "asking" and r.token in near]
        mark = self.common_mark()
        asking = [r for r in asking if self.is_current(r, mark)]
        if not asking:
            self.since = math.nan
            return
        now, terms = self.now, asking[0].terms
        if math.isnan(self.since):
            self.since = now
        # One that has been silent for as long as it would be waited for has died, or will be late.
        # In a repeated round the silent are not waited for at all: one of them has died.
        silence = self.near if self.attempt else max(self.near, terms.grace)
        heard = {r.token for r in self.members(silence)}
        coming = [r for r in here if r not in asking and r.token in heard]
        coming = [r for r in coming if r.phase != "asking" or r.token not in near]
        late = [r for r in self.living(self.near) if r not in asking]
        coming += [r for r in late if self.heard[r.token].sent in AWAITED]
        enough = len(asking) >= terms.min_workers
        if not enough or (coming and now - self.since < terms.grace):
            return
        self.since = math.nan
        self._serial += 1
        numbers = tuple(_number(r) for r in asking)
        group = f"{self.run}.{self._term}.{self._serial}"
        where = tuple(r.terms.address for r in asking)
        self.called = Called(self.run, self.round, self.attempt, numbers, group, where)
        yield self.called

    def _judge(self) -> Iterator[Entry]:
        """Commit the attempt, or end it, as soon as that is known."""
        called = self.called
        assert called is not None
        self.judged.add(attempt_of(called))
        by_number = {_number(r): r for r in self.members()}
        here = [by_number.get(number) for number in called.members]
        known = [r for r in here if r is not None]
        for each in known:  # of a keeper before this one
            if each.round > called.round:
                yield self._commit(called, known, each.last)
                return
            if each.round == called.round and each.attempt > called.attempt:
                yield self._end(called, "it was ended before", each.attempt)
                return
        now_here = [r for r in known if (r.round, r.attempt) == (called.round, called.attempt)]
        done = [r for r in now_here if r.phase == "done"]
        failed = [r for r in now_here if r.phase == "failed"]
        gone = [n for n, r in zip(called.members, here, strict=True) if r is None]
        odd = [r for r in known if r.phase in ("entering", "ready") or r.round < called.round]
        if len(done) == len(called.members):
            digests = {r.digest for r in done}
            if len(digests) == 1:
                self._differing = 0
                yield self._commit(called, done, digests.pop())
            else:
                self._differing += 1
                yield self._end(called, f"results differ, {self._differing} in a row")
        elif failed or gone or odd:
            names = gone or [_number(r) for r in [*failed, *odd]]
            what = "not heard of" if gone else "lost a peer"
            yield self._end(called, f"worker {', '.join(map(str, names))} {what}")

    def _commit(self, called: Called, known: Sequence[Report], digest: str) -> Verdict:
        entered, inherited = {}, {}
        for report in known:
            number, entrance = _number(report), report.entrance
            if entrance is not None and entrance.round == called.round:
                entered[number] = entrance
            here = tuple(leaver for when, leaver in report.inherited if when == called.round)
            if here:
                inherited[number] = here
            self.heard[report.token].sent = 0
        left, lost = self._absent(called.members)
        parts = (called.members, called.attempt, entered, inherited, left, lost, digest)
        record = Round(called.round, *parts, self.run)
        gone = {*called.members, *left, *lost}
        self.last = {number: token for number, token in self.last.items() if number not in gone}
        self.last |= {_number(r): r.token for r in known}
        self._norms |= {_number(r): r.norm for r in known}
        self.roll.append(record)
        self.called, self.round, self.attempt = None, called.round + 1, 0
        self.since = math.nan
        return Verdict(self.run, called.round, called.attempt, record)

    def _absent(self, members: Sequence[int]) -> tuple[tuple[int, ...], dict[int, float]]:
        """Return who of the rounds before has left, and the norms of those that are silent."""
        left, lost = [], {}
        for number, token in self.last.items():
            heard = self.heard.get(token)
            if number in members:
                continue
            if heard is not None and heard.report.phase == "left":
                left.append(number)
            elif heard is None or self.now - heard.at > self.near:
                lost[number] = self._norms.get(number, 0.0)
        return tuple(left), lost

    def _end(self, called: Called, why: str, attempt: int | None = None) -> Verdict:
        self.called = None
        self.attempt = called.attempt + 1 if attempt is None else attempt
        self.since = math.nan
        return Verdict(self.run, called.round, called.attempt, None, why)


class Keeper:
    """Decides on rounds, given reports and the time. It keeps no secret: members know all of it.

    A keeper that begins again, because the rendezvous has been restarted, gets the commits of the
    one before from its file, and says the last one again. Everything else is in members' reports:
    it listens until they have come, and goes on in the attempt where they are. Without the file
    it knows only the commits that a reporting member has read.

    Args:
        now: seconds, of any clock that never goes back.
        settle: seconds of listening before the first decision.
        file: the commits and ends of runs that keepers before this one have decided.

    Attributes:
        rounds: of the run that is under way.

    Laws, in ``tests/units/elastic/test_roll.py``:
        1. A round is committed once, with one digest, by members that had the same mark.
        2. A member that has read a commit is never asked to repeat that round.
        3. If at least ``min_workers`` members live and are heard, rounds are committed.
    """

    def __init__(
        self, now: float = 0.0, settle: float = 3.0, file: Iterable[Round | Ended] = ()
    ) -> None:
        self.rounds = Rounds(now)
        self._began = now
        self.listen(now + settle)
        self._next = 0  # number of a worker
        self._founders: dict[str, int] = {}  # token -> request; the first has the snapshot
        self._refused: set[str] = set()
        self._over: dict[str, int] = {}  # run -> round that none has begun
        self._to_say: list[Entry] = []
        self._from_file = ""  # the run that a keeper before this one has left
        self._remember(file)

    def _remember(self, file: Iterable[Round | Ended]) -> None:
        """Take over the decisions of keepers before this one."""
        last = None
        for last in file:
            self._over[last.run] = last.round
            if isinstance(last, Round):
                self._over[last.run] += 1
                self._next = max(self._next, 1 + max(last.members, default=-1))
        self._members: tuple[int, ...] = ()  # of the last round
        if isinstance(last, Round):
            self._from_file, self._members = last.run, last.members
            self.rounds.run, self.rounds.round = last.run, self._over.pop(last.run)
            verdict = Verdict(last.run, last.round, last.attempt, last)
            self.rounds.judged.add(attempt_of(verdict))
            self._to_say = [verdict]

    def listen(self, until: float) -> None:
        """Decide nothing before this time."""
        self._quiet_until = until

    def remember(self, report: Report, now: float) -> None:
        """Take the last report of a worker from a keeper before this one: it may have died since.

        If it says nothing, the next round names its loss.
        """
        if report.phase == "left":
            self.hear(report, now)
        if report.number in self._members:
            self.rounds.before.append(report)

    def hear(self, report: Report, now: float) -> None:
        """Take a report; an old one, or a repeated one, is ignored."""
        known = self.rounds.heard.get(report.token)
        if report.token in self._refused or (known and report.beat <= known.report.beat):
            return
        if known is None:
            self.rounds.heard[report.token] = _Process(report, now)
        else:
            known.report, known.at = report, now
        # A restarted keeper gives no other worker the number of one that is silent.
        own = -1 if report.number is None else report.number
        self._next = max(self._next, report.free, own + 1)

    def hear_again(self, token: str, now: float) -> None:
        """Take a sign of life of a process: what it has said last is still so."""
        if token in self.rounds.heard:
            self.rounds.heard[token].at = now

    def tick(self, now: float) -> list[Entry]:
        """Return what is decided at this time."""
        if now < self._quiet_until:
            return []
        rounds = self.rounds
        rounds.now = now
        again, self._to_say = self._to_say, []
        if again:
            rounds.resume()
        said = [*again, *self._numbers()]
        if rounds.run and not self._founders and not self._goes_on():
            self._over[rounds.run] = rounds.round  # all have ended, or have died
            said.append(Ended(rounds.run, rounds.round))
            rounds.run, rounds.called = "", None
        said += self._refuse_left_behind()
        if not rounds.run:
            rounds.resume()
        if not rounds.run:
            return [*said, *self._found()]
        if self._founders:
            return [*said, *self._begin()]
        return [*said, *rounds.decide(), *self._let_in()]

    def awaited(self, now: float) -> str:
        """Return for whom workers wait, in words; empty if none waits."""
        rounds = self.rounds
        rounds.now = now
        if not rounds.run:
            coming = self._coming()
            return _more(len(coming), coming[0].terms) + _unlike(coming) if coming else ""
        members = rounds.members()
        if self._founders:
            late = [r for r in self._coming() if r.token in self._founders and not r.run]
            return f"{_workers(late)} to take the snapshot" if late else ""
        if rounds.called is not None:
            late = [r for r in members if r.phase == "running"]
            return f"{_workers(late)} to exchange in round {rounds.round}" if late else ""
        asking = [r for r in members if r.phase == "asking"]
        if not asking:
            return ""
        late = [r for r in members if r not in asking]
        few = _more(len(members), asking[0].terms)
        return few or (f"{_workers(late)} to end round {rounds.round}" if late else "")

    def _goes_on(self) -> bool:
        """Return whether the run has a member that is not behind, or may have one."""
        if any(map(self.rounds.keeps_up, self.rounds.members())):
            return True
        # Those that are silent since before this keeper began may be frozen only.
        longest = max((r.terms.timeout for r in self.rounds.living()), default=math.inf)
        return self._from_file == self.rounds.run and self.rounds.now - self._began <= longest

    def _numbers(self) -> Iterator[Entry]:
        """Give numbers to processes that have none."""
        living = self.rounds.living()
        for report in living:
            process = self.rounds.heard[report.token]
            if report.number is not None or process.answered >= 0:
                continue
            given = {r.number for r in living if r.number is not None}
            number = report.terms.wanted
            if number is None or number in given:
                number = max(self._next, max([*given, *self.rounds.last], default=-1) + 1)
            self._next = max(self._next, number + 1)
            process.answered, process.report = 0, replace(report, number=number)
            living = [process.report if r is report else r for r in living]
            yield Numbered(report.token, number, report.terms.address)

    def _coming(self) -> list[Report]:
        """Return who waits for a run to begin."""
        coming = [r for r in self.rounds.living() if r.phase in ("entering", "ready")]
        return [r for r in coming if r.number is not None and not r.sought]

    def _found(self) -> Iterator[Entry]:
        """Begin a run when enough workers have come, and nobody else for a while."""
        coming, now, rounds = self._coming(), self.rounds.now, self.rounds
        if not coming or len(coming) < coming[0].terms.min_workers:
            rounds.since = math.nan
            return
        alike = Counter(_settings(r) for r in coming)
        first = max(coming, key=lambda r: (r.round, alike[_settings(r)], -_number(r)))
        refused = [r for r in coming if r.terms.settings != first.terms.settings]
        if refused:
            for report in refused:
                yield self._refuse_other_settings(report, first)
            return
        if math.isnan(rounds.since):
            rounds.since = now
        if now - rounds.since < first.terms.grace:
            return
        rounds.since = math.nan
        rounds.run, rounds.round, rounds.attempt = secrets.token_hex(6), first.round, 0
        rounds.last = {_number(r): r.token for r in coming}
        self._founders = {r.token: r.request for r in [first, *coming]}
        said = (rounds.run, first.token, first.terms.address, _number(first))
        yield Founded(*said, tuple(self._founders))

    def _begin(self) -> Iterator[Entry]:
        """Let founders begin, when all that live have the snapshot."""
        living = {r.token: r for r in self.rounds.living()}
        here = [living[token] for token in self._founders if token in living]
        # One that could not fetch the snapshot asks again, and then comes in later.
        here = [r for r in here if r.request == self._founders[r.token]]
        if next(iter(self._founders)) not in living:
            self.rounds.run, self._founders = "", {}
        elif all((r.run, r.phase) == (self.rounds.run, "ready") for r in here):
            self._founders = {}
            for report in here:
                self.rounds.heard[report.token].begun = True
            yield Begun(self.rounds.run, tuple(r.token for r in here), len(here))

    def _let_in(self) -> Iterator[Entry]:
        """Send those that need a snapshot to the lowest member."""
        rounds = self.rounds
        members = rounds.members()
        inside = [r for r in members if r.phase not in ("entering", "ready")]
        mark = rounds.common_mark()
        donors = [r for r in inside if r.round == rounds.round and rounds.is_current(r, mark)]
        near = {r.token for r in rounds.members(rounds.near)}
        donors = [r for r in donors if r.token in near] or donors
        if not donors:
            return
        donor = donors[0]
        late = [r for r in inside if r.phase == "asking" and not rounds.is_current(r, mark)]
        ended = [r for r in inside if r.phase in ("done", "failed") and r.round != rounds.round]
        late += [r for r in ended if attempt_of(r) not in rounds.judged]
        late += [r for r in self.rounds.living() if r.phase == "entering" and r.number is not None]
        for report in members:
            process = self.rounds.heard[report.token]
            if report.phase == "ready" and not process.begun:
                process.begun = True
                yield Begun(rounds.run, (report.token,), len(members))
        for report in late:
            process = self.rounds.heard[report.token]
            if process.answered > report.request:
                continue
            process.answered = report.request + 1
            if report.terms.settings != donor.terms.settings:
                yield self._refuse_other_settings(report, donor)
            else:
                process.sent += 1
                size = len({report.token, *(r.token for r in members)})
                parts = (rounds.run, _number(donor), donor.terms.address, size)
                yield Enter(report.token, report.request, *parts)

    def _refuse_left_behind(self) -> Iterator[Entry]:
        """Refuse workers that were away when their run ended: they would end with other weights.

        A member of an ended run that lacks none of its rounds goes on with it, unless another run
        has begun. One that has been sent to the run for a snapshot lacks some. A restarted keeper
        may not know that a run has ended, and waits as long as it would hear of a member that
        lives.
        """
        for report in self.rounds.living():
            run = report.run or report.sought
            if run in ("", self.rounds.run):
                continue
            rounds = self._over.get(run)
            if rounds is None and self.rounds.now - self._began <= report.terms.timeout:
                continue
            after = "" if rounds is None else f", after round {rounds - 1}"
            if report.sought or (rounds is not None and report.round < rounds):
                why = (
                    f"the run has ended without it{after}; this worker was in round "
                    f"{report.round}. Use the weights of another worker"
                )
                yield self._refuse(report, why)
            elif self.rounds.run:
                why = (
                    f"its run has ended{after}, and another one has begun. Start this worker again "
                    f"to take part in that one"
                )
                yield self._refuse(report, why)

    def _refuse_other_settings(self, report: Report, right: Report) -> Refused:
        return self._refuse(report, differing(report.terms.settings, right.terms.settings))

    def _refuse(self, report: Report, why: str) -> Refused:
        self._refused.add(report.token)
        self.rounds.heard.pop(report.token)
        return Refused(report.token, why)


def _more(here: int, terms: Terms) -> str:
    """Return how many workers are missing, in words; empty if none is."""
    missing = (wanted := terms.min_workers) - here
    plural = "s" if missing > 1 else ""
    return f"{missing} more worker{plural} ({here} of {wanted})" if missing > 0 else ""


def _settings(report: Report) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(report.terms.settings.items()))


def _unlike(reports: Sequence[Report]) -> str:
    """Return which settings are not the same for all, as a clause; empty if all are."""
    names = sorted(
        {
            name
            for name, _ in set.union(*map(set, map(_settings, reports)))
            if len({r.terms.settings.get(name) for r in reports}) > 1
        }
    )
    return (
        f", and {_workers(reports)} differ in {', '.join(map(legible, names[:_NAMED]))}"
        if names
        else ""
    )


def _workers(reports: Sequence[Report]) -> str:
    """Return numbers of workers, in words."""
    return workers_in_words(sorted(r.number for r in reports if r.number is not None))


def workers_in_words(numbers: Sequence[int]) -> str:
    """Return numbers of workers, in words.

    Example:
        >>> workers_in_words([0, 2])
        'workers 0, 2'
    """
    plural = "s" if len(numbers) > 1 else ""
    return f"worker{plural} {', '.join(map(str, numbers))}"


def _number(report: Report) -> int:
    assert report.number is not None
    return report.number


def attempt_of(each: Report | Called | Verdict) -> tuple[str, int, int]:
    """Return the run, the round and the attempt that a report or an entry is about."""
    return each.run, each.round, each.attempt
