"""``lightning-gc rendezvous`` in processes of its own: killed, started twice, on a full disk."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_gc import Roll
from lightning_gc.cli import FAILED
from lightning_gc.elastic.roll import Ended, Entrance, Round, line_of
from tests.support.elastic import Job, replay, start, step_of
from tests.support.processes import ROOT, hold_port

pytestmark = pytest.mark.processes
LIMIT = 120.0


class Place:
    """Two workers in processes, and the command that serves them."""

    def __init__(self, folder: Path, roll: Path) -> None:
        self.folder, self.roll = folder, roll
        self.held = hold_port()
        self.secret = folder / "secret.txt"
        self.secret.write_text("a secret\n")
        port = self.held.getsockname()[1]
        terms = {"secret": "a secret", "timeout": 10.0}
        settings: dict[str, Any] = {"steps": 160, "pause": 0.02, "batch_norm": False}
        self.job = Job(port, str(folder), elastic=terms, holds=120, **settings)
        self.commands: list[subprocess.Popen[bytes]] = []
        self.workers: dict[str, Any] = {}

    def serve(self, port: int | None = None) -> tuple[subprocess.Popen[bytes], Path]:
        """Start the command; return it with the file of its output."""
        said = self.folder / f"said{len(self.commands)}"
        door = self.job.port if port is None else port
        command = [sys.executable, "-m", "lightning_gc", "rendezvous", "--port", str(door)]
        command += ["--roll", str(self.roll), "--secret-file", str(self.secret)]
        with said.open("wb") as file:
            started = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT)
        self.commands.append(started)
        return started, said

    def until(self, what: Callable[[], Any], words: str) -> None:
        limit = time.monotonic() + LIMIT
        while not what():
            assert time.monotonic() < limit, f"never: {words}"
            time.sleep(0.01)

    def until_step(self, step: int) -> None:
        self.until(lambda: step_of(self.job, "a") >= step, f"step {step}")

    def log(self) -> str:
        logs = [self.folder / f"{name}.log" for name in self.workers]
        return "".join(each.read_text() for each in logs if each.exists())

    def join(self, *names: str) -> None:
        for name in names:
            self.workers[name] = start(self.job, name)

    def replayed(self) -> None:
        """Let the workers end; a replay of the file has their weights bit for bit."""
        for name in self.workers:
            (self.folder / f"{name}.go").touch()
        for name, worker in self.workers.items():
            worker.join(LIMIT)
            assert worker.exitcode == 0, (self.folder / f"{name}.out").read_text()
        roll = Roll.read(self.roll)
        assert [each.round for each in roll] == list(range(40))
        made = replay(replace(self.job, holds=0, pause=0.0), roll)
        left = [(self.folder / f"{name}.json").read_text() for name in self.workers]
        assert made["warned"] == []
        assert all(f'"weights": "{made["weights"]}"' in each for each in left)

    def close(self) -> None:
        for each in (*self.workers.values(), *self.commands):
            each.kill()
        for command in self.commands:
            command.wait()
        self.held.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path, tmp_path / "roll.jsonl")
    yield made
    made.close()


@pytest.mark.nightly
def test_a_killed_command_takes_its_port_back_from_a_worker_and_its_roll_has_no_gap(
    place: Place,
) -> None:
    """An old roll is in the folder, and a second command is started with the file."""
    begun = Round(0, (0,), entered={0: Entrance()}, digest="old", run="old")
    old = line_of(begun) + line_of(Ended("old", 1))
    place.roll.write_text(old)
    first, said = place.serve()
    place.until(lambda: "Rendezvous on port" in said.read_text(), "the command serves")
    other, why = place.serve(port=0)
    assert other.wait(LIMIT) == FAILED
    assert "is written by another rendezvous" in why.read_text()
    twice, why = place.serve()
    assert twice.wait(LIMIT) == FAILED
    assert f"in use by process {first.pid} (" in why.read_text()
    assert len(why.read_text().splitlines()) == 1

    place.join("a", "b")
    place.until_step(12)
    assert (place.folder / "roll-1.jsonl").read_text() == old
    assert "Another run has begun" in said.read_text()

    first.send_signal(signal.SIGKILL)
    first.wait()
    before = len(Roll.read(place.roll))
    place.until(lambda: "so this worker serves" in place.log(), "a worker serves")
    assert "keeps no roll" in place.log()
    place.until_step(4 * before + 24)
    assert len(Roll.read(place.roll)) == before
    _, said = place.serve()
    place.until(lambda: "Rendezvous on port" in said.read_text(), "the command serves again")
    place.replayed()
    assert "has a gap" not in said.read_text()


@pytest.mark.nightly
def test_rounds_that_a_full_disk_refuses_are_written_later(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("needs mount, and root")
    place = Place(tmp_path, disk / "roll.jsonl")
    try:
        _, said = place.serve()
        place.until(lambda: "Rendezvous on port" in said.read_text(), "the command serves")
        place.join("a", "b")
        place.until_step(8)
        with contextlib.suppress(OSError), (disk / "other").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
        place.until(lambda: "so 5 rounds, to round" in said.read_text(), "5 rounds are missing")
        os.remove(disk / "other")
        place.replayed()
        assert "All missing rounds are in" in said.read_text()
    finally:
        place.close()
        subprocess.run(["umount", str(disk)], check=True, timeout=10)
