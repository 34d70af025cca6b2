"""Elastic workers that meet in a folder: killed, joined, told to leave, refused, replayed."""

import contextlib
import json
import os
import re
import signal
import subprocess
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
        terms = {"secret": "secret", "grace": 4.0, "roll": str(folder / "{}.roll.jsonl")}
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
    for name in others:  # each has written the same
        assert list(Roll.read(site.folder / f"{name}.roll.jsonl")) == list(roll)
    logs = {name: (site.folder / f"{name}.log").read_text() for name in "abcd"}
    decisions = "".join(logs.values())  # whoever holds the lease says them, and this may be d
    assert "is committed, by workers 0, 1, 2." in decisions
    assert re.search(r"committed, by workers \d, \d, 3\.", decisions)
    assert all(f"The folder {meeting} took" in logs[name] for name in others)


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
@pytest.mark.timeout(600)
def test_a_full_disk_and_a_read_only_folder_cost_time_only(tmp_path: Path) -> None:
    disk = tmp_path / "meeting"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("needs mount, and root")
    site = Site(tmp_path, steps=400)
    try:
        site.start("a", "b")
        for name in "ab":
            site.until(name, 8)
        with contextlib.suppress(OSError), (disk / "other").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
        stands = stopped_at(site)
        time.sleep(6.0)  # longer than a message may take
        os.remove(disk / "other")
        site.until("a", stands + 8)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=10)
        stands = stopped_at(site)
        time.sleep(1.0)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True, timeout=10)
        site.until("b", stands + 8)
        roll = site.assert_replayed(site.ended("a", "b"))
        assert {each.members for each in roll} == {(0, 1)}
    finally:
        for process in site.processes.values():
            process.kill()
            process.join()
        subprocess.run(["umount", "-l", str(disk)], check=True, timeout=10)


def stopped_at(site: Site) -> int:
    """Return the step at which the workers wait, as their folder takes nothing."""
    step, since = -1, time.monotonic()
    while time.monotonic() < since + 1.5:
        if (now := step_of(site.job, "a")) != step:
            step, since = now, time.monotonic()
        time.sleep(0.01)
    return step


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_slow_store_costs_time_only(tmp_path: Path) -> None:
    """A tenth of a second for each request, and 10 MB of a second."""
    site = Site(tmp_path, latency=0.1, rate=1e7)
    site.job = Job(**vars(site.job) | {"elastic": site.job.elastic | {"timeout": 20.0}})
    site.start("a", "b")
    site.until("a", 8)
    site.start("c")
    roll = site.assert_replayed(site.ended("a", "b"))
    assert {each.lost.values() for each in roll if each.lost} == set()


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_random_faults(seed: int) -> None:
    """Also the worker that decides is killed."""
    seen = Run(seed, rounds=40, workers=3, within="{}").play(faults=4)
    assert seen.problems == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(10))
def test_ten_kills(seed: int) -> None:
    """Half of them hit the worker that decides: at once, or before or after it writes."""
    kinds = ("kill", "restart")
    seen = Run(100 + seed, rounds=80, workers=3, within="{}").play(faults=10, kinds=kinds)
    assert seen.problems == []
