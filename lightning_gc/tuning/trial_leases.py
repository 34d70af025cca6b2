"""Who works on which trial: several processes share a study without a word to each other.

A trial counts towards the budget of trials unless it was lost: its process died, or was stopped. A
failure that is a result, such as a diverged run, carries an ``error``; one without it was lost. So
a study has room as long as fewer trials count than are wanted, whoever has begun them.
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

BEAT = 20.0
"""Seconds between two signs of life of a trial."""
STALE = 300.0
"""Seconds after which a trial on another machine without a sign of life is taken for lost."""


def counts(trial: FrozenTrial) -> bool:
    """Return whether a trial counts towards the budget of trials."""
    if trial.state == TrialState.WAITING or trial.user_attrs.get("surplus"):
        return False
    return trial.state != TrialState.FAIL or "error" in trial.user_attrs


def has_room(study: optuna.Study, wanted: int) -> bool:
    """Return whether another trial is to be begun."""
    return sum(counts(trial) for trial in study.get_trials(deepcopy=False)) < wanted


def claim(study: optuna.Study, wanted: int) -> optuna.Trial | None:
    """Begin a trial and return it, or None where others have been quicker.

    Numbers are given by the storage, one after the other: whoever finds that enough trials with a
    lower number count gives its own back.
    """
    if not has_room(study, wanted):
        return None
    trial = study.ask()
    before = [t for t in study.get_trials(deepcopy=False) if t.number < trial.number]
    if sum(map(counts, before)) >= wanted:
        trial.set_user_attr("surplus", True)
        study.tell(trial, state=TrialState.FAIL)
        return None
    for name, value in identity().items():
        trial.set_user_attr(name, value)
    return trial


def release_lost(study: optuna.Study) -> list[int]:
    """Mark trials whose process is gone as failed, and return their numbers."""
    lost = []
    for trial in running(study):
        if _is_lost(trial):
            with contextlib.suppress(ValueError, optuna.exceptions.UpdateFinishedTrialError):
                study.tell(trial.number, state=TrialState.FAIL)
                lost.append(trial.number)
    return lost


def running(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials that are under way, here or elsewhere."""
    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))


@contextlib.contextmanager
def beating(write: Callable[[float], None]) -> Iterator[None]:
    """Give a sign of life now and then, for other machines to see.

    Args:
        write: puts the time where they look.
    """
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT):
            write(time.time())

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def identity() -> dict[str, Any]:
    """Return who works here, and the first sign of life."""
    pid = os.getpid()
    return {"host": platform.node(), "pid": pid, "born": _born(pid), "beat": time.time()}


def is_gone(worker: Mapping[str, Any]) -> bool:
    """Return whether the process with this ``identity()`` works no more."""
    if worker["host"] != platform.node():
        return bool(time.time() - worker["beat"] > STALE)
    return not _alive(worker["pid"]) or _born(worker["pid"]) != worker["born"]


def _is_lost(trial: FrozenTrial) -> bool:
    if "beat" in trial.user_attrs:
        return is_gone(trial.user_attrs)
    # Just begun, or begun by something else than us.
    return trial.datetime_start is not None and _age(trial.datetime_start) > STALE


def _age(begun: datetime.datetime) -> float:
    return (datetime.datetime.now(begun.tzinfo) - begun).total_seconds()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's: it lives
    return True


def _born(pid: int) -> str:
    """Return when a process began, where the system says so: numbers of processes come again."""
    try:
        # After the name, which is in brackets and may hold anything, field 22 is the start time.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
