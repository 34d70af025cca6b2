"""Elastic workers that meet in a folder: killed, joined, told to leave, refused, replayed."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_gc import Roll
from lightning_gc.elastic.roll import Entrance, Round
from tests.soak.elastic import Run
from tests.support.elastic import Job, decider, replay, start, step_of, write_roll

pytestmark = pytest.mark.processes
LIMIT = 120.0


class Site:
    """A folder, and the workers that meet there."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.meeting = folder, str(folder / "meeting")
        given: dict[str, Any] = {"pause": 0.02, "batch_norm": False} | settings
        terms = {"secret": "secret", "grace": 4.0}
        self.job = Job(0, str(folder), meeting=self.meeting, elastic=terms, **given)
        self.processes: dict[str, Any] = {}

    def start(self, *names: str, **settings: Any) -> None:
        for name in names:
            self.processes[name] = start(self.job, name, **settings)

    def until(self, name: str, step: int) -> None:
        limit = time.monotonic() + LIMIT
        while step_of(self.job, name) < step:
            assert time.monotonic() < limit, f"{name} has not reached step {step}"
            time.sleep(0.005)

    def ended(self, *names: str) -> list[Any]:
        for name in names:
            self.processes[name].join(LIMIT)
            assert self.processes[name].exitcode == 0, (self.folder / f"{name}.out").read_text()
        return [json.loads((self.folder / f"{name}.json").read_text()) for name in names]

    def assert_replayed(self, left: list[Any]) -> Roll:
        """The replay of the folder's log has the workers' weights and errors, bit for bit."""
        write_roll(self.meeting, "secret", self.folder / "roll.jsonl")
        roll = Roll.read(self.folder / "roll.jsonl")
        made = replay(self.job, roll)
        assert made["warned"] == []
        assert {made["weights"]} == {each["weights"] for each in left}
        for each in left:
            assert made["errors"][each["number"]] == each["errors"]
        return roll


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    for process in made.processes.values():
        process.kill()
        process.join()


def test_a_killed_decider_and_a_joiner_are_replayed_and_nothing_is_left(site: Site) -> None:
    """Whoever holds the lease is killed; another worker takes it over, and lets one more in."""
    site.job = Job(**vars(site.job) | {"holds": 9})
    site.start("a", "b")
    site.start("c", plain=True)
    for name in "abc":
        site.until(name, 9)
    pid = decider(site.meeting, "secret")
    (victim,) = [name for name, each in site.processes.items() if each.pid == pid]
    os.kill(pid, signal.SIGKILL)
    others = sorted({"a", "b", "c"} - {victim})
    site.job = Job(**vars(site.job) | {"holds": 0})
    site.start("d")
    site.until("d", 9)
    for name in others:
        (site.folder / f"{name}.go").touch()
    left = site.ended(*others, "d")
    roll = site.assert_replayed(left)
    assert len(roll.numbers) == 4
    assert any(each.lost for each in roll)  # named, and no more
    meeting = Path(site.meeting)
    kept = {name: os.listdir(meeting / name) for name in ("rounds", "mail", "probe")}
    assert kept == {"rounds": [], "mail": [], "probe": []}
    logs = "".join((site.folder / f"{name}.log").read_text() for name in others)
    assert "is committed, by workers 0, 1, 2" in logs
    assert f"The folder {meeting} took" in logs


def test_a_donor_that_was_never_a_member_is_replayed(tmp_path: Path) -> None:
    """Worker 9 died before its first round. Worker 3 has its snapshot, and worker 2 that of 3."""
    job = Job(0, str(tmp_path), steps=12, batch_norm=False)

    def made(*donors: int) -> Any:
        came = {n: Entrance(2, 0, donor) for n, donor in zip((2, 3), donors, strict=True)}
        rounds = [Round(0, (0, 1)), Round(1, (0, 1)), Round(2, (2, 3), entered=came)]
        return replay(job, Roll(rounds))["weights"]

    assert made(3, 9) == made(0, 1)


@pytest.mark.nightly
def test_a_leaver_hands_its_error_over(tmp_path: Path) -> None:
    site = Site(tmp_path, steps=400, outer=0.6)
    site.start("a", "b", "c")
    for name in "abc":
        site.until(name, 8)
    os.kill(site.processes["a"].pid, signal.SIGTERM)
    roll = site.assert_replayed(site.ended("b", "c"))
    (gone,) = [each.left for each in roll if each.left]
    assert [leavers for each in roll for leavers in each.inherited.values()] == [gone]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_random_faults(seed: int) -> None:
    """Also the worker that decides is killed."""
    seen = Run(seed, rounds=40, workers=3, within="{}").play(faults=4)
    assert seen.problems == []
