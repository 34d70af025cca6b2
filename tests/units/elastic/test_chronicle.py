"""A rendezvous tells its decisions and long waits in sentences."""

from lightning_gc.core.notices import AGAIN, FIRST
from lightning_gc.elastic.rendezvous import Chronicle
from lightning_gc.elastic.roll import (
    Begun,
    Called,
    Ended,
    Enter,
    Founded,
    Numbered,
    Refused,
    Round,
    Verdict,
)


def committed(number: int, *members: int, lost: tuple[int, ...] = ()) -> Verdict:
    record = Round(number, members, lost=dict.fromkeys(lost, 1.0))
    return Verdict("run", number, 0, record)


def test_a_run_is_told_from_the_first_worker_to_the_end() -> None:
    told = Chronicle()
    said = [
        told.tell(Numbered("one", 0, "10.0.0.1:4"), 0.0),
        told.tell(Numbered("other", 1, "10.0.0.2:4"), 0.0),
        told.tell(Founded("run", "one", "10.0.0.1:4", 0, ("one", "other")), 1.0),
        told.tell(Begun("run", ("one", "other"), 2), 1.0),
        told.tell(Called("run", 0, 0, (0, 1), "group"), 2.0),
        told.tell(committed(0, 0, 1), 3.0),
        told.tell(Enter("third", 0, "run", 0, "10.0.0.1:4", 3), 4.0),
        told.tell(Verdict("run", 1, 0, None, "worker 1 is silent"), 5.0),
        told.tell(Refused("other", "its run has ended"), 6.0),
        told.tell(Ended("run", 1), 7.0),
    ]
    assert [sentence for each in said for sentence in each] == [
        "Worker 0 has come from 10.0.0.1:4.",
        "Worker 1 has come from 10.0.0.2:4.",
        "A run begins, with 2 workers.",
        "Round 0 is committed, by workers 0, 1.",
        "A worker begins at the weights of worker 0.",
        "Round 1 is repeated: worker 1 is silent.",
        "Worker 1 is refused: its run has ended.",
        "The run has ended, before round 1.",
    ]


def test_rounds_of_the_same_members_are_told_together() -> None:
    """Each is told once, and those before another membership are told with theirs."""
    told = Chronicle()
    said: list[str] = []
    for number in range(200):
        members = (0,) if number >= 150 else (0, 1)
        gone = (1,) if number == 150 else ()
        said += told.tell(committed(number, *members, lost=gone), number * 1.0)
    said += told.tell(Ended("run", 200), 200.0)
    ends = [int(AGAIN) * number for number in range(5)]
    expected = ["Round 0 is committed, by workers 0, 1."]
    expected += [
        f"Rounds {end - 29} to {end} are committed, by workers 0, 1." for end in ends if end
    ]
    expected += [
        "Rounds 121 to 149 are committed, by workers 0, 1.",
        "Worker 1 is silent.",
        "Round 150 is committed, by worker 0.",
        "Rounds 151 to 180 are committed, by worker 0.",
        "Rounds 181 to 199 are committed, by worker 0.",
        "The run has ended, before round 200.",
    ]
    assert said == expected


def test_a_wait_is_told_when_it_is_long_and_each_half_minute() -> None:
    told, whom = Chronicle(), "1 more worker (1 of 2)"
    assert told.wait(whom, 0.0) == []
    assert told.wait(whom, FIRST) == [f"Workers wait for {whom} (10 s so far)."]
    assert told.wait(whom, FIRST + 1) == []
    assert told.wait(whom, FIRST + AGAIN) == [f"Workers wait for {whom} (40 s so far)."]
    assert told.wait("worker 0 to end round 7", 60.0) == []
    assert told.wait("", 90.0) == []
    assert told.wait("worker 0 to end round 7", 91.0) == []


def test_rounds_are_told_before_the_wait_that_follows_them() -> None:
    told, said = Chronicle(), list[str]()
    for number in range(3):
        said += told.tell(committed(number, 0, 1), 1.0)
    said += told.wait("worker 1", 2.0) + told.wait("worker 1", 2.0 + FIRST)
    assert said == [
        "Round 0 is committed, by workers 0, 1.",
        "Rounds 1 to 2 are committed, by workers 0, 1.",
        "Workers wait for worker 1 (10 s so far).",
    ]
