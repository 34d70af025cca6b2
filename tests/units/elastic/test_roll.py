"""The keeper of an elastic run, with members that die, freeze or come late, and restarts."""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gc.elastic.roll import (
    NEAR,
    Called,
    Do,
    Ended,
    Enter,
    Entrance,
    Entry,
    Founded,
    Keeper,
    Member,
    Report,
    Roll,
    Round,
    Terms,
    Verdict,
    differing,
    entry_of,
    in_words,
    line_of,
)

MIN, GRACE, TIMEOUT = 2, 1.0, 4.0
TICK = 0.1  # seconds
SAME = {"compressor": "TopK(0.01)", "every": "16"}


def terms(address: str, min_workers: int = MIN, settings: dict[str, str] = SAME) -> Terms:
    return Terms(None, address, settings, min_workers, GRACE, TIMEOUT)


class Worker:
    """A member whose exchanges are those of the world it lives in."""

    def __init__(self, name: str, world: "World") -> None:
        self.name, self.world = name, world
        self.member = Member(Report(name, terms=terms(name)))
        self.cursor, self.beat, self.term = len(world.log), 0, world.term
        self.lag = 1 + len(world.workers) % 3  # ticks between two looks at the log
        self.frozen = self.dead = self.left = self.refused = False
        self.history: list[str] = [""]  # its common weights: what has been added up
        self.steps = 0
        self.running: Called | None = None

    @property
    def report(self) -> Report:
        return self.member.report

    @property
    def mark(self) -> str:
        return str(hash(tuple(self.history)))

    def report_to(self, keeper: Keeper, now: float) -> None:
        self.beat += 1
        report = dataclasses.replace(self.report, beat=self.beat)
        keeper.hear(report, now)

    def read(self) -> None:
        if self.term != self.world.term:
            self.term, self.cursor = self.world.term, 0
        while self.cursor < len(self.world.log) and self.running is None:
            entry = self.world.log[self.cursor]
            self.cursor += 1
            done = self.member.read(entry)
            if done is not None:
                self.do(done, entry)

    def do(self, done: Do, entry: Entry) -> None:
        if done.what == "number":
            self.member.enters(len(self.history) - 1, self.mark)
        elif done.what == "fetch":
            donor = self.world.find(done.address)
            gone = donor is None or donor.dead or donor.frozen or donor.left
            if donor is None or gone or self.world.slow:
                self.member.not_fetched()
                return
            self.history = list(donor.history)
            self.member.fetched(len(self.history) - 1, donor.steps, "zero")
            self.steps = donor.steps
        elif done.what == "run":
            assert isinstance(entry, Called)
            self.running = entry
        elif done.what == "commit":
            record = self.member.roll[-1]
            self.history.append(record.digest)
            self.world.note(self.name, self.report.run, len(self.history) - 2, record)
            self.steps = 0
        elif done.what == "repeat":
            self.member.asks(self.mark)
        elif done.what == "refused":
            self.left = self.refused = True

    def act(self) -> None:
        """Make a step, or end an exchange."""
        if self.report.phase == "training":
            self.steps += 1
            if self.steps >= self.world.every:
                self.member.asks(self.mark)
        elif self.running is not None:
            called = self.running
            them = [self.world.numbered(n, called) for n in called.members]
            here = [w for w in them if w is not None and not w.dead and w.running == called]
            if len(here) == len(called.members):
                marks = {w.mark for w in here}
                assert len(marks) == 1, "members of a round have different weights"
                for w in here:
                    w.running = None
                    w.member.ran(f"{called.round}.{called.members}.{marks}", 1.0)
            elif self.world.now - self.world.since[called.group] > 1.0:
                self.running = None
                self.member.failed()


class World:
    """Members, a keeper, and its log."""

    def __init__(self, number: int, every: int = 3) -> None:
        self.now, self.every, self.ticks = 0.0, every, 0
        self.slow = False  # snapshots come later than the ends of their rounds
        self.terms = itertools.count()
        self.since: dict[str, float] = {}
        self.file: list[Round | Ended] = []
        self.restart()
        self.committed: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.run = ""
        self.workers: list[Worker] = []
        for _ in range(number):
            self.join()

    def restart(self, with_file: bool = True) -> None:
        self.term, self.log = next(self.terms), list[Entry]()
        self.keeper = Keeper(self.now, settle=1.0, file=self.file if with_file else ())
        self.keeper.rounds._term = str(self.term)

    def join(self) -> None:
        self.workers.append(Worker(f"w{len(self.workers)}", self))

    def find(self, name: str) -> Worker | None:
        return next((w for w in self.workers if w.name == name), None)

    def numbered(self, number: int, called: Called) -> Worker | None:
        found = [w for w in self.workers if w.report.number == number and w.running == called]
        return found[0] if found else None

    def note(self, name: str, run: str, index: int, record: Round) -> None:
        """Law 1: what one member takes over, all do."""
        if run != self.run:  # all members of the run before have died
            self.run = run
            self.committed.clear()
        seen = self.committed.setdefault(record.round, (record.digest, record.members))
        assert seen == (record.digest, record.members), (name, record, seen)
        assert index == record.round

    def go(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK)):
            self.now += TICK
            self.ticks += 1
            for worker in self.workers:
                if worker.dead or worker.frozen or worker.left:
                    continue
                heeds = not self.ticks % worker.lag
                if heeds:
                    worker.read()
                worker.act()
                if heeds:
                    worker.report_to(self.keeper, self.now)
            for entry in self.keeper.tick(self.now):
                if isinstance(entry, Called):
                    self.since[entry.group] = self.now
                self.log.append(entry_of(in_words(entry)))
                decided = entry.record if isinstance(entry, Verdict) else entry
                if isinstance(decided, Round | Ended) and decided not in self.file[-1:]:
                    self.file.append(decided)
            self.check()

    def check(self) -> None:
        """Members that are in the same round have the same weights."""
        inside = [w for w in self.workers if w.report.phase in ("training", "asking")]
        for one, other in itertools.combinations(inside, 2):
            if one.report.round == other.report.round and not (one.left or other.left):
                shared = {w.report.run for w in (one, other)}
                if len(shared) == 1:
                    assert one.history == other.history, (one.name, other.name)

    @property
    def rounds(self) -> int:
        return len(self.committed)


def living(world: World) -> Iterator[Worker]:
    return (w for w in world.workers if not (w.dead or w.left))


def test_undisturbed_rounds_have_all_members() -> None:
    world = World(3)
    world.go(10)
    assert world.rounds > 5
    assert not any(isinstance(entry, Enter) for entry in world.log)
    assert {members for _, members in world.committed.values()} == {(0, 1, 2)}


def test_a_death_costs_one_attempt() -> None:
    world = World(3)
    world.go(5)
    before = world.rounds
    world.workers[2].dead = True
    world.go(10)
    assert world.rounds > before + 3
    assert world.committed[world.rounds - 1][1] == (0, 1)
    records = [e.record for e in world.log if isinstance(e, Verdict) and e.record is not None]
    assert [r.lost for r in records if r.lost] == [{2: 1.0}]


def test_a_worker_joins_within_a_round_and_members_do_not_wait() -> None:
    world = World(2, every=8)
    world.go(6)
    world.join()
    world.go(6)
    members = [members for _, members in world.committed.values()]
    assert members[0] == (0, 1)
    assert members[-1] == (0, 1, 2)
    entered = [r.entered for r in world.keeper.rounds.roll if 2 in r.entered]
    assert entered[0][2].donor == 0


def test_a_frozen_worker_comes_back_with_the_weights_of_the_others() -> None:
    world = World(3)
    world.go(5)
    world.workers[1].frozen = True
    world.go(8)
    world.workers[1].frozen = False
    world.go(6)
    assert world.committed[world.rounds - 1][1] == (0, 1, 2)


@pytest.mark.parametrize("with_file", [True, False])
@pytest.mark.parametrize("moment", range(12))
def test_a_restarted_keeper_goes_on_with_the_run(moment: int, with_file: bool) -> None:
    world = World(3)
    world.go(4 + moment * TICK)
    run, before = world.keeper.rounds.run, world.rounds
    world.restart(with_file)
    world.go(6)
    assert world.keeper.rounds.run == run
    assert world.rounds > before + 2
    assert world.committed[world.rounds - 1][1] == (0, 1, 2)


@pytest.mark.parametrize("with_file", [True, False])
def test_a_round_that_only_absent_members_know_is_not_committed_again(with_file: bool) -> None:
    """A restarted keeper knows it from its file. Without the file it commits another round 2."""
    world = World(4)
    world.workers[3].frozen = world.workers[2].frozen = True
    world.go(4)
    world.join()
    known = world.keeper.rounds.round
    for worker in world.workers[:2]:
        worker.frozen = True
    for worker in world.workers[2:4]:
        worker.frozen = False
    world.restart(with_file)
    world.go(3)
    assert world.keeper.rounds.round >= known if with_file else world.keeper.rounds.round < known
    for worker in world.workers[:2]:
        worker.frozen = False
    if with_file:
        world.go(10)
        assert world.committed[world.rounds - 1][1] == (0, 1, 2, 3, 4)


def test_the_commit_that_no_member_has_read_is_said_again() -> None:
    """The rendezvous dies after it has written a round, and before it tells a member."""
    world = World(3)
    world.go(4)
    while not isinstance(world.log[-1], Verdict):
        world.go(TICK)
    last = world.file[-1]
    assert isinstance(last, Round)
    assert {w.report.phase for w in world.workers} == {"done"}
    world.restart()
    world.go(3)
    assert world.committed[last.round] == (last.digest, last.members)
    assert [each for each in world.file if each.round == last.round] == [last]


def test_a_new_run_does_not_wait_for_one_that_has_ended() -> None:
    world = World(2)
    world.go(5)
    for worker in world.workers:
        worker.member.leaves()
        worker.report_to(world.keeper, world.now)
        worker.left = True
    world.go(TICK)
    assert isinstance(world.file[-1], Ended)
    world.restart()
    world.join()
    world.join()
    world.go(1 + 2 * GRACE)
    assert world.keeper.rounds.run not in ("", world.file[0].run)


def test_a_worker_that_was_away_while_another_run_began_is_refused() -> None:
    """Otherwise it waits in vain for members of its own run."""
    world = World(2)
    world.go(5)
    world.workers[0].frozen = True
    world.workers[1].dead = True
    world.go(2 * TIMEOUT)
    world.join()
    world.join()
    world.go(3)
    world.workers[0].frozen = False
    world.go(1)
    assert world.workers[0].refused
    assert {w.report.run for w in world.workers[2:]} == {world.keeper.rounds.run}


def test_one_worker_of_two_waits_for_another() -> None:
    world = World(2)
    world.go(5)
    world.workers[0].dead = True
    world.go(10)
    before = world.rounds
    world.go(5)
    assert world.rounds == before
    world.join()
    world.go(10)
    assert world.rounds > before + 2


def test_a_worker_that_was_away_when_the_run_ended_is_refused() -> None:
    """With one that joins later it would go on to other weights under the same name."""
    world = World(3)
    world.go(5)
    world.workers[0].frozen = True
    world.go(5)
    for worker in world.workers[1:]:
        worker.member.leaves()
        worker.report_to(world.keeper, world.now)
        worker.left = True
    refused: list[Do] = []
    world.workers[0].do = lambda done, entry: refused.append(done)  # type: ignore[method-assign]
    world.join()
    world.workers[0].frozen = False
    world.go(5)
    assert refused[-1].what == "refused"
    assert "ended without it, after round" in refused[-1].why


@pytest.mark.parametrize("restarted", ["", "with its file", "without"])
@pytest.mark.parametrize("dies", [False, True])
def test_workers_without_a_snapshot_of_an_ended_run_begin_no_other(
    restarted: str, dies: bool
) -> None:
    """They had weights of one of its rounds, and would have gone on to a second end."""
    world = World(2)
    world.go(5)
    world.join()
    world.join()
    world.go(3)
    world.workers[1].frozen = True  # and comes back as one that has been late
    world.slow = True
    world.join()
    world.go(3)
    world.workers[1].frozen = False
    world.go(1)
    for worker in (world.workers[0], *world.workers[2:4]):
        worker.dead = dies
        if not dies:
            worker.member.leaves()
            worker.report_to(world.keeper, world.now)
            worker.left = True
    if restarted:
        world.restart(with_file=restarted != "without")
    begun = len(world.log)
    world.go(2 * TIMEOUT + 2 * GRACE)
    assert world.workers[1].refused
    assert world.workers[4].refused
    assert not any(isinstance(entry, Founded) for entry in world.log[begun:])
    world.slow = False
    world.join()
    world.join()
    world.go(5)
    assert {w.report.run for w in world.workers[5:]} == {world.keeper.rounds.run} != {""}


def test_a_restarted_keeper_lets_in_those_whose_snapshots_are_late() -> None:
    world = World(2)
    world.go(5)
    world.slow = True
    world.join()
    world.go(2)
    world.restart()
    world.go(2 * TIMEOUT)
    assert not world.workers[2].refused
    world.slow = False
    world.go(6)
    assert world.committed[world.rounds - 1][1] == (0, 1, 2)


def test_other_settings_are_refused() -> None:
    world = World(2)
    world.go(5)
    world.join()
    other = world.workers[-1].member
    unlike = terms("w2", settings={**SAME, "every": "8"})
    other.report = dataclasses.replace(other.report, terms=unlike)
    refused = []
    world.workers[-1].do = lambda done, entry: refused.append(done)  # type: ignore[method-assign]
    world.go(0.2)
    other.enters(0, "")
    world.go(1)
    assert [done.what for done in refused] == ["number", "refused"]
    assert refused[1].why.startswith("every is 8 here, and 16 in the run.")


def test_a_worker_is_told_which_setting_differs() -> None:
    """Three of them by value, and what one of the two does not have."""
    run = {"every": "16", "seed": "0", "outer": "SGD", "torch": "2.6", "island": "2"}
    own = {"every": "8", "seed": "1", "outer": "Adam", "torch": "2.7"}
    assert differing(own, run) == (
        "every is 8 here, and 16 in the run; seed is 1 here, and 0 in the run; outer is Adam here, "
        "and SGD in the run, and 2 more differ. Give all workers the same settings"
    )
    assert differing({}, {"island": "2"}).startswith("island is not known here, and 2 in the run.")
    hostile = differing({"every": "\x1b[2J" + "8" * 1000}, {"every": "16"})
    assert hostile.isprintable()
    assert len(hostile) < 400


def test_a_keeper_says_for_whom_workers_wait() -> None:
    world = World(1)
    assert world.keeper.awaited(world.now) == ""
    world.go(3)
    assert world.keeper.awaited(world.now) == "1 more worker (1 of 2)"
    world.join()
    world.go(5)
    assert world.rounds > 0
    one, other = world.workers
    while {each.report.phase for each in world.workers} != {"training"}:
        world.go(TICK)
    one.frozen = True
    while other.report.phase != "asking":
        world.go(TICK)
    world.go(GRACE / 2)
    assert world.keeper.awaited(world.now) == f"worker 0 to end round {world.keeper.rounds.round}"
    world.go(2 * TIMEOUT)
    assert world.keeper.awaited(world.now) == "1 more worker (1 of 2)"
    one.frozen = False
    while {each.report.phase for each in world.workers} != {"training"}:
        world.go(TICK)
    world.go(2 * TICK)  # they are heard every second or third tick
    assert "more" not in world.keeper.awaited(world.now)


@pytest.mark.parametrize(("unlike", "refused"), [({0}, "w0"), ({1}, "w1"), ({0, 2}, "w1")])
def test_most_founders_have_the_settings_of_the_run(unlike: set[int], refused: str) -> None:
    """As long as workers are missing, all are told what differs."""
    world = World(0)
    for number in range(3):
        world.join()
        member = world.workers[-1].member
        own = {**SAME, "every": "8"} if number in unlike else SAME
        unusual = terms(f"w{number}", 3, own)
        member.report = dataclasses.replace(member.report, terms=unusual)
        world.go(2)
        if number == 1:
            told = "1 more worker (2 of 3), and workers 0, 1 differ in every"
            assert world.keeper.awaited(world.now) == told
    assert [w.name for w in world.workers if w.refused] == [refused]
    assert world.keeper.awaited(world.now) == "1 more worker (2 of 3)"


def test_a_keeper_names_who_exchanges_and_who_takes_a_snapshot() -> None:
    world = World(3)
    late = world.workers[1]
    while not any(isinstance(entry, Founded) for entry in world.log):
        world.go(TICK)
    late.frozen = True
    world.go(0.5)
    assert "worker 1 to take the snapshot" in world.keeper.awaited(world.now)
    late.frozen = False
    world.go(5)
    while late.running is None:
        world.go(TICK)
    late.frozen = True
    world.go(0.5)
    assert f"to exchange in round {world.keeper.rounds.round}" in world.keeper.awaited(world.now)


def asking(token: str, number: int, mark: str) -> Report:
    parts: dict[str, Any] = {"phase": "asking", "run": "run", "round": 5}
    return Report(token, 1, number=number, mark=mark, terms=terms(token), **parts)


def test_a_worker_with_other_weights_takes_a_snapshot() -> None:
    keeper = Keeper(settle=0.0)
    for token, number, mark in (("a", 0, "odd"), ("b", 1, "same"), ("c", 2, "same")):
        keeper.hear(asking(token, number, mark), 0.1)
    said = keeper.tick(0.1) + keeper.tick(0.1 + GRACE)
    assert [e.members for e in said if isinstance(e, Called)] == [(1, 2)]
    assert [(e.token, e.donor) for e in said if isinstance(e, Enter)] == [("a", 1)]


@pytest.mark.parametrize("silent", [False, True])
def test_a_worker_that_was_silent_for_grace_is_not_waited_for_again(silent: bool) -> None:
    """It died in its steps. One that was heard since then is waited for."""
    keeper, late = Keeper(settle=0.0), 0.2 + max(GRACE, NEAR)
    reports = [asking(token, number, "same") for number, token in enumerate("abc")]
    for report in reports:
        keeper.hear(dataclasses.replace(report, phase="training"), 0.1)
    keeper.tick(0.1)
    for report in reports[: 2 if silent else 3]:
        phase: Any = "training" if report.token == "c" else "asking"
        keeper.hear(dataclasses.replace(report, phase=phase, beat=2), late)
    said = [keeper.tick(late), keeper.tick(late + GRACE)]
    members = [[e.members for e in each if isinstance(e, Called)] for each in said]
    assert members == ([[(0, 1)], []] if silent else [[], [(0, 1)]])


def test_unlike_results_are_not_committed() -> None:
    keeper = Keeper(settle=0.0)
    reports = [asking(token, number, "same") for number, token in enumerate("ab")]
    for report in reports:
        keeper.hear(report, 0.1)
    (called,) = keeper.tick(0.1)
    assert isinstance(called, Called)
    for report, digest in zip(reports, ("one", "other"), strict=True):
        done: dict[str, Any] = {"phase": "done", "beat": 2, "digest": digest}
        keeper.hear(dataclasses.replace(report, members=called.members, **done), 0.2)
    (verdict,) = keeper.tick(0.2)
    assert isinstance(verdict, Verdict)
    assert verdict.record is None
    assert "differ" in verdict.why


HITS = st.lists(
    st.tuples(
        st.sampled_from(("kill", "freeze", "thaw", "join", "leave", "restart", "wait")),
        st.integers(0, 5),
        st.integers(1, 25),
    ),
    max_size=12,
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(number=st.integers(2, 4), hits=HITS)
def test_members_never_differ_and_go_on_when_faults_end(number: int, hits: Any) -> None:
    """Laws 1 to 3 over any sequence of faults."""
    meet_faults(number, hits)


AWAY = {
    "a silent worker's number is given to another one": (
        3,
        [
            *(("freeze", 2, 20), ("restart", 0, 9), ("join", 0, 5), ("freeze", 1, 6)),
            *(("join", 0, 24), ("thaw", 1, 20), ("wait", 0, 30), ("restart", 0, 21)),
        ],
    ),
    "one that is rounds behind says what was decided": (
        3,
        [("wait", 0, 22), ("freeze", 0, 34), ("wait", 0, 10), ("leave", 1, 17), ("restart", 0, 4)],
    ),
    "nobody judges the attempt of one that comes back": (
        3,
        [("wait", 0, 11), ("kill", 1, 13), ("freeze", 0, 40), ("restart", 0, 15)],
    ),
}


@pytest.mark.parametrize("with_file", [True, False])
@pytest.mark.parametrize("name", AWAY)
def test_a_restarted_keeper_meets_workers_that_were_away(name: str, with_file: bool) -> None:
    number, hits = AWAY[name]
    meet_faults(number, hits, with_file)


@pytest.mark.nightly
@settings(max_examples=1000, deadline=None)
@given(number=st.integers(2, 4), hits=HITS)
def test_members_never_differ_in_a_thousand_runs(number: int, hits: Any) -> None:
    meet_faults(number, hits)


def meet_faults(number: int, hits: Any, with_file: bool = True) -> None:
    world = World(number)
    world.go(4)
    for what, which, ticks in hits:
        chosen = world.workers[which % len(world.workers)]
        if what == "kill":
            chosen.dead = True
        elif what in ("freeze", "thaw"):
            chosen.frozen = what == "freeze"
        elif what == "join" and len(world.workers) < 7:
            world.join()
        elif what == "leave" and chosen.running is None and not chosen.frozen:
            chosen.member.leaves()
            chosen.report_to(world.keeper, world.now)
            chosen.left = True
        elif what == "restart":
            world.restart(with_file)
        world.go(ticks * TICK)
    for worker in world.workers:
        worker.frozen = False
    while len(list(living(world))) < MIN:
        world.join()
    world.go(2 * TIMEOUT + 4 * GRACE)
    while len(list(living(world))) < MIN:  # some have been refused, as their run was over
        world.join()
    world.go(8 * GRACE)
    before = world.rounds
    world.go(8)
    assert world.rounds > before, [(w.name, w.report) for w in living(world)]
    latest = world.committed[max(world.committed)][1]
    assert len(latest) == len(list(living(world)))


def test_a_roll_is_saved_and_read(tmp_path: Path) -> None:
    rounds = [
        Round(4, (0, 2), entered={2: Entrance(4, 3, 0, "kept")}, lost={1: 0.5}, digest="a"),
        Round(5, (0, 2, 3), 1, {3: Entrance(5)}, {0: (1,)}, (1,), {}, "b"),
    ]
    Roll(rounds).save(tmp_path / "roll")
    assert list(Roll.read(tmp_path / "roll")) == rounds
    assert Roll(rounds).numbers == (0, 2, 3)
    with pytest.raises(ValueError, match="round 5 after round 5"):
        Roll([rounds[1], rounds[1]])


def test_a_run_that_resumes_another_one_takes_the_place_of_its_last_rounds(tmp_path: Path) -> None:
    first = [Round(number, (0, 1), digest=f"a{number}", run="a") for number in range(4)]
    second = [Round(number, (0, 1, 2), digest=f"b{number}", run="b") for number in (2, 3)]
    # the last one by two rendezvous
    lines: list[Round | Ended] = [*first, Ended("a", 4), *second, second[-1]]
    path = tmp_path / "roll"
    path.write_text("".join(map(line_of, lines)) + '{"round": 4, "mem')
    assert list(Roll.read(path)) == [*first[:2], *second]
    with path.open("a") as file:
        file.write("\n")
    with pytest.raises(ValueError, match="line 9, is not a round"):
        Roll.read(path)


@pytest.mark.parametrize("line", ["[]", "{}", '{"round": 1}', "nothing", "3"])
def test_a_damaged_roll_is_refused_by_line(tmp_path: Path, line: str) -> None:
    good = json.dumps(dataclasses.asdict(Round(0, (0, 1))))
    (tmp_path / "roll").write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match="line 2, is not a round"):
        Roll.read(tmp_path / "roll")


@pytest.mark.parametrize("text", ["[]", '["Called", {}]', '["Nothing", {}]', "3", '["Begun"]'])
def test_what_is_no_entry_or_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        entry_of(text)
    with pytest.raises(ValueError, match="report"):
        Report.read(text)


def test_a_leaver_whom_only_a_keeper_before_has_heard_is_named() -> None:
    keeper = Keeper(0.0, 0.0, file=[Round(0, (0, 1, 2), run="run")])
    keeper.remember(Report("gone", 9, "left", "run", number=0, round=1), 0.0)
    here = [Report(str(n), 1, "asking", "run", number=n, round=1, mark="m") for n in (1, 2)]
    here = [dataclasses.replace(each, terms=terms(each.token)) for each in here]
    for each in here:
        keeper.hear(each, 1.0)
    assert [type(each) for each in keeper.tick(1.0)] == [Verdict, Called]  # one is said again
    for each in here:
        done = dataclasses.replace(each, beat=2, phase="done", members=(1, 2), digest="d")
        keeper.hear(done, 3.0)
    (verdict,) = keeper.tick(3.0)
    assert isinstance(verdict, Verdict)
    assert verdict.record is not None
    assert verdict.record.left == (0,)
