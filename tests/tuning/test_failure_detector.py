"""Which processes are dead: at once on this host, elsewhere by whether their beat changes."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest

from lightning_gc.tuning import StorageError, failure_detector
from lightning_gc.tuning.failure_detector import (
    HEARTBEAT,
    LEASE,
    FailureDetector,
    heartbeat,
    host,
    owner,
)


class Clock:
    """Goes by a heartbeat with each look."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += HEARTBEAT
        return self.now


LOOKS = round(LEASE / HEARTBEAT) + 1  # the first one sees no silence


def looks(worker: Callable[[int], dict[str, Any]], number: int, work: str = "trial") -> list[bool]:
    detector = FailureDetector(Clock())
    return [detector.is_dead(work, worker(look)) for look in range(number)]


def elsewhere(**changes: Any) -> dict[str, Any]:
    return {**owner(), "host": "elsewhere", **changes}


@pytest.mark.parametrize("off", [-400.0, 0.0, 400.0])
def test_on_another_host_it_is_dead_once_its_beat_has_stood_still(off: float) -> None:
    """Whatever the time is over there."""
    beat = time.time() + off
    assert looks(lambda look: elsewhere(beat=beat), LOOKS + 2) == [False] * LOOKS + [True] * 2
    assert not any(looks(lambda look: elsewhere(beat=beat + look // 14), 10 * LOOKS))


def test_one_that_never_wrote_a_beat_is_dead_after_the_same_time() -> None:
    assert looks(lambda look: {}, LOOKS + 1) == [False] * LOOKS + [True]
    assert looks(lambda look: {"host": host()}, LOOKS + 1) == [False] * LOOKS + [True]


def test_a_beat_after_a_long_silence_is_a_sign_of_life() -> None:
    beats = [1.0] * (LOOKS - 1) + [2.0] * LOOKS + [2.0]
    assert looks(lambda look: elsewhere(beat=beats[look]), len(beats)) == [
        *([False] * (len(beats) - 1)),
        True,
    ]


def test_time_in_which_nobody_looked_is_one_missed_beat() -> None:
    """This process may have trained for hours, or stood still with the storage that both need."""
    clock = Clock()
    detector, worker = FailureDetector(clock), elsewhere()
    for _ in range(LOOKS):
        assert not detector.is_dead("trial", worker)
        clock.now += 24 * 3600
    assert detector.is_dead("trial", worker)


def test_each_trial_has_a_lease_of_its_own() -> None:
    detector = FailureDetector(Clock())
    for _ in range(LOOKS):
        detector.is_dead("one", elsewhere())
    assert not detector.is_dead("other", elsewhere(beat=0.0))


def test_a_process_of_the_same_number_is_another_one() -> None:
    detector = FailureDetector()
    assert not detector.is_dead("trial", owner())
    assert detector.is_dead("trial", {**owner(), "born": "long ago"})
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    assert detector.is_dead("trial", {**owner(), "pid": ended.pid})


def test_work_that_this_process_has_left_behind_is_dead_by_its_silence() -> None:
    """As after a full disk, on which it could not even be given up."""
    worker = owner()
    assert looks(lambda look: worker, LOOKS + 1) == [False] * LOOKS + [True]


def test_one_that_lives_on_this_host_may_be_silent() -> None:
    with subprocess.Popen(["sleep", "60"]) as living:
        born = failure_detector._born(living.pid)
        worker = {**owner(), "pid": living.pid, "born": born}
        assert not any(looks(lambda look: worker, 2 * LOOKS))
        living.kill()
    assert FailureDetector().is_dead("trial", worker)


def test_where_the_system_does_not_tell_the_beat_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc a number may be another process's by now; on Windows nobody is asked."""
    unknown, worker = {**owner(), "born": ""}, owner()
    assert looks(lambda look: unknown, LOOKS + 1) == [False] * LOOKS + [True]
    windows = SimpleNamespace(name="nt", kill=lambda *_: pytest.fail("this presses Ctrl-C"))
    monkeypatch.setattr(failure_detector, "os", windows)
    assert looks(lambda look: worker, LOOKS + 1) == [False] * LOOKS + [True]


needs_proc = pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="no /proc")


def test_without_proc_no_two_processes_are_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str) -> Any:
        raise FileNotFoundError(path)

    monkeypatch.setattr(failure_detector, "os", SimpleNamespace(stat=refused))
    monkeypatch.setattr(sys, "platform", "freebsd")
    assert host.__wrapped__() != host.__wrapped__()


@needs_proc
def test_another_numbering_of_processes_is_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a container, which shares the kernel and may share the name."""
    names = set()
    for number in (1, 2, 2):
        system = SimpleNamespace(
            stat=lambda path, number=number: SimpleNamespace(st_ino=number),
            readlink=lambda path: "7",
            getpid=lambda: 7,
        )
        monkeypatch.setattr(failure_detector, "os", system)
        names.add(host.__wrapped__())
    assert len(names) == 2


@needs_proc
def test_where_proc_shows_another_numbering_no_number_is_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system = SimpleNamespace(stat=os.stat, readlink=lambda path: "7", getpid=lambda: 8)
    monkeypatch.setattr(failure_detector, "os", system)
    assert host.__wrapped__() != host.__wrapped__()


IN_A_CONTAINER = """
import json, runpy, sys
print(json.dumps(runpy.run_path(sys.argv[1])["owner"]()))
"""


def test_a_container_with_this_hosts_name_is_another_host() -> None:
    """The same kernel, name and clock, as with ``--network host``; other process numbers."""
    container = ["unshare", "--pid", "--fork", "--mount-proc"]
    try:
        subprocess.run([*container, "true"], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs unshare, and root")
    python = [sys.executable, "-c", IN_A_CONTAINER, failure_detector.__file__]
    told = subprocess.run([*container, *python], check=True, capture_output=True, timeout=60)
    inside = json.loads(told.stdout)
    assert inside["host"] != host()
    assert inside["pid"] < 10
    assert not FailureDetector().is_dead("trial", inside)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "HEARTBEAT", 0.001)


def test_a_beat_that_cannot_be_written_is_missed(quick: None) -> None:
    beats: list[float] = []
    enough = threading.Event()

    def write(now: float) -> None:
        beats.append(now)
        if len(beats) < 3:
            raise StorageError("no space")
        enough.set()

    with heartbeat(write):
        assert enough.wait(60)


def test_beats_end_with_their_trial(quick: None) -> None:
    """Others have ended it, as they took this process for dead."""
    study = optuna.create_study()
    trial = study.ask()
    study.tell(trial, state=optuna.trial.TrialState.FAIL)
    threads: list[threading.Thread] = []
    begun = threading.Event()

    def write(now: float) -> None:
        threads.append(threading.current_thread())
        begun.set()
        trial.set_user_attr("beat", now)

    with heartbeat(write):
        assert begun.wait(60)
        threads[0].join(60)
        assert not threads[0].is_alive()
    assert len(threads) == 1
