"""Machines that die and join, in virtual time: the library's keeper and members, without sockets.

Steps, exchanges and snapshots take the seconds of ``Terms``. Who is called to which round, and when
it is repeated, is what ``lightning_gc.elastic.roll`` decides with the same reports.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gc import Roll
from lightning_gc.elastic import roll
from lightning_gc.elastic.roll import BEAT, Called, Do, Entry, Keeper, Member, Report, Round

TICK = 0.05  # virtual seconds


@dataclass(frozen=True)
class Terms:
    """How long what takes, in seconds.

    Attributes:
        every: H.
        step: an optimizer step; each takes up to ``jitter`` of it more or less.
        exchange: of a round.
        snapshot: for a worker that joins.
        notice: after which a broken connection is noticed.
        silent: machines vanish with their connections open, so that the timeout notices it.
        grace, timeout: as for ``Elastic``, whose defaults these are.
    """

    every: int = 8
    step: float = 1.0
    jitter: float = 0.05
    exchange: float = 2.0
    snapshot: float = 4.0
    notice: float = 0.3
    silent: bool = False
    grace: float = 5.0
    timeout: float = 30.0

    @property
    def round(self) -> float:
        """Seconds of an undisturbed round, without waiting."""
        return self.every * self.step + self.exchange


@dataclass(frozen=True)
class Fault:
    """A death or a join, at a round and a share of its time."""

    what: str
    round: int
    share: float


def faults(rounds: int, death_every: int, join_every: int, draw: random.Random) -> list[Fault]:
    """Return one death in every ``death_every`` rounds and one join in every ``join_every``."""
    found = []
    for what, apart in (("death", death_every), ("join", join_every)):
        for first in range(0, rounds, apart) if apart else ():
            moment = first + draw.random() * apart
            found.append(Fault(what, int(moment), moment % 1))
    return sorted(found, key=lambda each: (each.round, each.share))


def worker_steps(rounds: Sequence[Round], every: int) -> int:
    """Return the optimizer steps of all members in these committed rounds."""
    return sum(
        every * len(each.members) - sum(entrance.position for entrance in each.entered.values())
        for each in rounds
    )


def until_steps(rounds: Sequence[Round], every: int, wanted: int) -> list[Round]:
    """Return the first rounds that have at least so many worker-steps together."""
    done = 0
    for index, each in enumerate(rounds):
        done += worker_steps([each], every)
        if done >= wanted:
            return list(rounds[: index + 1])
    raise ValueError(f"{len(rounds)} rounds have {done} worker-steps, fewer than {wanted}.")


class Machine:
    """One worker: a member of the protocol, and the time that its work takes."""

    def __init__(self, site: Site, name: str) -> None:
        self.site, self.terms = site, site.terms
        terms = self.terms
        # min_workers is 2 by default, and all have the same settings.
        own = roll.Terms(address=name, grace=terms.grace, timeout=terms.timeout)
        self.member = Member(Report(name, terms=own))
        self.died = math.inf
        self.round = self.position = 0
        self._cursor, self._beat = len(site.log), 0
        self._said: Report | None = None
        self._due = 0.0  # the next report
        self._until = math.inf  # when what it does ends
        self._donor: tuple[Machine, int] | None = None
        self.exchange: Exchange | None = None

    @property
    def name(self) -> str:
        """A word that no other machine has."""
        return self.member.report.token

    @property
    def trains(self) -> bool:
        """Whether it is in a round."""
        return self.member.report.phase in ("training", "asking", "running", "done", "failed")

    def live(self, now: float) -> None:
        """Do what is to be done at this time."""
        while self._cursor < len(self.site.log) and self._until == math.inf:  # else it is busy
            entry = self.site.log[self._cursor]
            self._cursor += 1
            done = self.member.read(entry)
            if done is not None:
                self._do(done, entry, now)
        if now >= self._until:
            self._until = math.inf
            self._end(now)
        if self.member.report is not self._said or now >= self._due:
            self._said, self._due = self.member.report, now + BEAT
            self._beat += 1
            self.site.keeper.hear(dataclasses.replace(self._said, beat=self._beat), now)

    def _do(self, done: Do, entry: Entry, now: float) -> None:
        match done.what:
            case "number":
                self.member.enters(0, "0")
            case "fetch":
                self._fetch(self.site.machines[done.address], now)
            case "begin":
                self._step(now)
            case "run":
                assert isinstance(entry, Called)
                self.exchange = self.site.exchanges.setdefault(entry.group, Exchange(entry, now))
                self.exchange.arrive(self, now)
            case "commit":
                self.round, self.position, self.exchange = self.round + 1, 0, None
                self._step(now)
            case "repeat":
                self.exchange = None
                self.member.asks(str(self.round))
            case what:
                raise AssertionError((self.name, what, done.why))

    def _fetch(self, donor: Machine, now: float) -> None:
        self._donor, self._until = (donor, donor.round), now + self.terms.snapshot

    def _step(self, now: float) -> None:
        spread = self.terms.jitter * (2 * self.site.draw.random() - 1)
        self._until = now + self.terms.step * (1 + spread)

    def wait(self, until: float) -> None:
        """End the exchange then."""
        self._until = until

    def _end(self, now: float) -> None:
        if self.exchange is not None:
            if self.exchange.whole:
                self.member.ran(str(self.round), 1.0)
            else:
                self.member.failed()
        elif self.member.report.phase == "entering":
            assert self._donor is not None
            donor, began = self._donor
            if donor.died <= now:
                self.member.not_fetched()
            elif donor.round != began:
                self._fetch(donor, now)
            else:
                self.round, self.position = donor.round, donor.position
                self.member.fetched(self.round, self.position, "zero")
                phase: str = self.member.report.phase  # changed by fetched()
                if phase == "training":
                    self._step(now)
        else:
            self.position += 1
            if self.position < self.terms.every:
                self._step(now)
            else:
                self.member.asks(str(self.round))


class Exchange:
    """An attempt at a round.

    Attributes:
        whole: no member has died in it, so far.
    """

    def __init__(self, called: Called, now: float) -> None:
        self._called, self._here = called, list[Machine]()
        self._began = math.inf
        self.whole = False

    def arrive(self, machine: Machine, now: float) -> None:
        """Let a member come; the last one begins it. Without it the others wait for a timeout."""
        self._here.append(machine)
        machine.wait(now + machine.terms.timeout)
        if len(self._here) == len(self._called.members):
            self.whole, self._began = True, now
            for each in self._here:
                each.wait(now + each.terms.exchange)

    def lose(self, machine: Machine, now: float) -> None:
        """Let a member die."""
        if machine in self._here and self.whole:
            terms = machine.terms
            self.whole = False
            for each in self._here:
                each.wait(now + (terms.timeout if terms.silent else terms.notice))


class Site:
    """Machines, a keeper and its log.

    Args:
        workers: at first.
        terms: how long what takes.
        draw: of the jitter and the victims.

    Attributes:
        commits: virtual time of each committed round.
        begun: when the first step began.
        deaths: seconds from each death to the next committed round.
    """

    def __init__(self, workers: int, terms: Terms, draw: random.Random) -> None:
        self.terms, self.draw, self.now = terms, draw, 0.0
        self.keeper, self.log = Keeper(settle=0.0), list[Entry]()
        self.machines: dict[str, Machine] = {}
        self.exchanges: dict[str, Exchange] = {}
        self.commits: list[float] = []
        self.begun = math.nan
        self.deaths: list[float] = []
        self._dying: list[float] = []
        for _ in range(workers):
            self.join()

    def join(self) -> None:
        """Start one more machine."""
        name = f"m{len(self.machines)}"
        self.machines[name] = Machine(self, name)

    def kill(self) -> None:
        """Let a machine die that is in a round."""
        victim = self.draw.choice([m for m in self._living if m.trains])
        victim.died = self.now
        self._dying.append(self.now)
        if victim.exchange is not None:
            victim.exchange.lose(victim, self.now)

    @property
    def _living(self) -> list[Machine]:
        return [each for each in self.machines.values() if each.died == math.inf]

    def run(self, rounds: int, faults: Sequence[Fault]) -> None:
        """Go on until so many rounds are committed."""
        left = list(faults)
        while len(self.keeper.rounds.roll) < rounds:
            self.now += TICK
            began = self.commits[-1] if self.commits else self.begun
            while (
                left
                and self.keeper.rounds.round >= left[0].round
                and self.now - began >= left[0].share * self.terms.round
            ):
                fault = left.pop(0)
                if fault.what == "join":
                    self.join()
                elif sum(each.trains for each in self._living) > 2:
                    self.kill()
            for machine in self._living:
                machine.live(self.now)
            self.log += self.keeper.tick(self.now)
            if math.isnan(self.begun) and any(each.trains for each in self._living):
                self.begun = self.now
            if len(self.commits) < len(self.keeper.rounds.roll):
                self.commits.append(self.now)
                self.deaths += [self.now - died for died in self._dying]
                self._dying = []

    @property
    def seconds(self) -> float:
        """From the first step to the last commit."""
        return self.commits[-1] - self.begun

    @property
    def roll(self) -> list[Round]:
        """The committed rounds; their results have no bits."""
        return [dataclasses.replace(each, digest="") for each in self.keeper.rounds.roll]


def rolled(workers: int, steps: int, seed: int, deaths: int, joins: int) -> Roll:
    """Return a roll with at least so many worker-steps, of machines that die and join.

    Args:
        workers: at first.
        steps: wanted, of all workers together.
        seed: of the faults.
        deaths: one in so many rounds; 0: none.
        joins: as ``deaths``.
    """
    draw, terms = random.Random(seed), Terms()
    rounds = math.ceil(2 * steps / (workers * terms.every))
    site = Site(workers, terms, draw)
    site.run(rounds, faults(rounds, deaths, joins, draw))
    return Roll(until_steps(site.roll, terms.every, steps))
