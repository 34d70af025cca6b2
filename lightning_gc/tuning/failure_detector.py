"""Detect dead processes among those that share a study, by heartbeats.

A process stores its ``owner()`` with its trial or final run, and updates the beat in it every
``HEARTBEAT`` seconds. Others only check whether it changes; clocks of two hosts are never compared.
"""

import contextlib
import functools
import os
import platform
import sys
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

HEARTBEAT = 20.0  # seconds between two changes of a beat
LEASE = 300.0  # seconds without a change after which a process on another host is dead


class FailureDetector:
    """Decides which processes are dead, by this process's clock.

    The system knows the processes of this host. A process of another host is dead if its beat does
    not change while this process watches it.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # work: (last beat, time of the last look, seconds of silence)
        self._seen: dict[Hashable, tuple[Any, float, float]] = {}

    def is_dead(self, work: Hashable, worker: Mapping[str, Any]) -> bool:
        """Return whether a process is dead, or has been silent for too long.

        Args:
            work: identifies the process's trial or final run, equal in every call.
            worker: its ``owner()`` with the last beat; empty if it has not stored one.
        """
        if worker.get("host") == host() and {"pid", "born"} <= worker.keys():
            ended = _has_ended(worker["pid"], worker["born"])
            if ended is not None:
                return ended
        now, beat = self._clock(), worker.get("beat")
        last, looked, silence = self._seen.get(work, (beat, now, 0.0))
        # A long pause between two looks counts as one missed beat: this process, or the storage
        # that both need, may have hung as well.
        silence = silence + min(now - looked, HEARTBEAT) if beat == last else 0.0
        self._seen[work] = beat, now, silence
        return silence > LEASE


@contextlib.contextmanager
def heartbeat(write: Callable[[float], None]) -> Iterator[None]:
    """Call ``write`` with the time every ``HEARTBEAT`` seconds, from a thread."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(HEARTBEAT):
            try:
                write(time.time())
            except optuna.exceptions.UpdateFinishedTrialError:
                return  # others took this process for dead; the trial's next report raises this
            except Exception:  # each driver has its own errors
                continue  # a beat may be missed; a storage that stays away ends the run itself

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def owner() -> dict[str, Any]:
    """Return this process's identity and its first heartbeat."""
    pid = os.getpid()
    return {"host": host(), "pid": pid, "born": _born(pid), "beat": time.time()}


@functools.cache
def host() -> str:
    """Return a name that two processes share only if they see each other's process numbers.

    Containers may share a host's name, kernel and clocks, but number their processes separately.
    Where the system cannot distinguish them, every process gets another name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbering = os.stat("/proc/self/ns/pid").st_ino
        if os.readlink("/proc/self") == str(os.getpid()):  # /proc shows this numbering
            return f"{platform.node()} {boot} {numbering}"
    except OSError:
        pass
    if sys.platform == "darwin":
        return f"{platform.node()} {uuid.getnode():x}"  # the network card's address
    return uuid.uuid4().hex


def _has_ended(pid: int, born: str) -> bool | None:
    """Return whether a process of this host has ended, or None if the system does not know."""
    if os.name != "posix":
        return None  # there, os.kill with signal 0 would press Ctrl-C
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # another user's: it lives
    known = _born(pid)
    if not known or not born or (known == born and pid == os.getpid()):
        return None  # earlier work of this same process: only silence shows that it is over
    return known != born


def _born(pid: int) -> str:
    """Return the start time of a process, or "" if unknown; process numbers are reused."""
    try:
        # After the name, which is in brackets and may hold anything, field 22 is the start time.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def counts(trial: FrozenTrial) -> bool:
    """Return whether a trial counts towards the number of trials of its study."""
    if trial.state == TrialState.WAITING or trial.user_attrs.get("surplus"):
        return False
    return trial.state != TrialState.FAIL or "error" in trial.user_attrs


def has_room(study: optuna.Study, wanted: int) -> bool:
    """Return whether the study needs another trial."""
    return sum(counts(trial) for trial in study.get_trials(deepcopy=False)) < wanted


def begin_trial(study: optuna.Study, wanted: int) -> optuna.Trial | None:
    """Begin a trial and return it, or None if there are enough.

    The storage numbers trials. A process that finds enough lower numbers gives its trial back.
    """
    if not has_room(study, wanted):
        return None
    trial = study.ask()
    before = [t for t in study.get_trials(deepcopy=False) if t.number < trial.number]
    if sum(map(counts, before)) >= wanted:
        trial.set_user_attr("surplus", True)
        study.tell(trial, state=TrialState.FAIL)
        return None
    try:
        for name, value in owner().items():
            trial.set_user_attr(name, value)
    except BaseException:  # Ctrl-C: without an owner it would count as running for LEASE seconds
        study.tell(trial, state=TrialState.FAIL)
        raise
    return trial


def fail_lost_trials(study: optuna.Study, detector: FailureDetector) -> list[int]:
    """Mark trials of dead processes as failed, and return their numbers."""
    lost = []
    for trial in running(study):
        if detector.is_dead((study.study_name, trial.number), trial.user_attrs):
            with contextlib.suppress(ValueError, optuna.exceptions.UpdateFinishedTrialError):
                study.tell(trial.number, state=TrialState.FAIL)
                lost.append(trial.number)
    return lost


def running(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials that any process is running."""
    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
