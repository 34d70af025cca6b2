"""Leases on trials: several processes share a study through its storage alone.

Each running trial holds its process and a heartbeat. A failed trial with an ``error`` is a result,
such as a diverged run, and counts; one without was lost with its process, and is made up for.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

HEARTBEAT = 20.0  # seconds between two heartbeats of a trial
LEASE = 300.0  # seconds without one after which a trial on another machine is taken for lost


def counts(trial: FrozenTrial) -> bool:
    """Return whether a trial counts towards the number of trials of its study."""
    if trial.state == TrialState.WAITING or trial.user_attrs.get("surplus"):
        return False
    return trial.state != TrialState.FAIL or "error" in trial.user_attrs


def has_room(study: optuna.Study, wanted: int) -> bool:
    """Return whether another trial is to be begun."""
    return sum(counts(trial) for trial in study.get_trials(deepcopy=False)) < wanted


def begin_trial(study: optuna.Study, wanted: int) -> optuna.Trial | None:
    """Begin a trial and return it, or None if there are enough.

    The storage numbers trials in turn: who finds enough with lower numbers gives its own back.
    """
    if not has_room(study, wanted):
        return None
    trial = study.ask()
    before = [t for t in study.get_trials(deepcopy=False) if t.number < trial.number]
    if sum(map(counts, before)) >= wanted:
        trial.set_user_attr("surplus", True)
        study.tell(trial, state=TrialState.FAIL)
        return None
    for name, value in owner().items():
        trial.set_user_attr(name, value)
    return trial


def fail_lost_trials(study: optuna.Study) -> list[int]:
    """Mark trials whose process is dead as failed, and return their numbers."""
    lost = []
    for trial in running(study):
        if _is_lost(trial):
            with contextlib.suppress(ValueError, optuna.exceptions.UpdateFinishedTrialError):
                study.tell(trial.number, state=TrialState.FAIL)
                lost.append(trial.number)
    return lost


def running(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials that any process is running."""
    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))


@contextlib.contextmanager
def heartbeat(write: Callable[[float], None]) -> Iterator[None]:
    """Call ``write`` with the time every ``HEARTBEAT`` seconds, from a thread."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(HEARTBEAT):
            write(time.time())

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def owner() -> dict[str, Any]:
    """Return what identifies this process, and its first heartbeat."""
    pid = os.getpid()
    return {"host": platform.node(), "pid": pid, "born": _born(pid), "beat": time.time()}


def is_dead(worker: Mapping[str, Any]) -> bool:
    """Return whether the process with this ``owner()`` is dead, or silent for too long."""
    if worker["host"] != platform.node():
        return bool(time.time() - worker["beat"] > LEASE)
    return not _alive(worker["pid"]) or _born(worker["pid"]) != worker["born"]


def _is_lost(trial: FrozenTrial) -> bool:
    if "beat" in trial.user_attrs:
        return is_dead(trial.user_attrs)
    begun = trial.datetime_start  # just now, or by another program
    lease = datetime.timedelta(seconds=LEASE)
    return begun is not None and datetime.datetime.now(begun.tzinfo) - begun > lease


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's: it lives
    return True


def _born(pid: int) -> str:
    """Return when a process began, where the system tells; process numbers are reused."""
    try:
        # After the name, which is in brackets and may hold anything, field 22 is the start time.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
