"""Run a trial of several devices in a process group of its own, which talks to its parent by files.

Each worker that Lightning starts would ask the study for a trial of its own. So a run is a fresh
process that starts the workers. After each validation worker 0 writes the logged metrics to a file
and waits for the parent's answer in another. That survives a crash, a hang and Ctrl-C.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna

from lightning_gc.tuning.experiment import Experiment
from lightning_gc.tuning.method import Method
from lightning_gc.tuning.training_callback import Ask
from lightning_gc.tuning.training_run import fit

_PAUSE = 0.02  # seconds between two looks for a file


class SubprocessError(RuntimeError):
    """A run in processes of its own has failed."""


def fit_in_subprocess(
    experiment: Experiment,
    method: Method,
    params: Mapping[str, Any],
    ask: Ask,
    seed: int,
    final: bool = False,
) -> float | None:
    """Run ``fit`` in a fresh process with hyper-parameters drawn before.

    Raises:
        SubprocessError: the run has failed, ended without a result, or been silent for longer than
            ``experiment.timeout``; none of its processes is left.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="lightning_gc_") as name:
        folder = Path(name)
        trial = optuna.trial.FixedTrial(dict(params))
        run = functools.partial(fit, experiment, method, trial, _AskByFile(folder), seed, final)
        process = context.Process(target=_run_child, args=(run, folder))
        process.start()
        try:
            number = 0
            while True:
                message = _receive(process, folder, number, experiment.timeout)
                if "error" in message:
                    raise SubprocessError(message["error"])
                if "result" in message:
                    result: float | None = message["result"]
                    return result
                _write(folder / f"answer-{number}", ask(message["logged"]))
                number += 1
        finally:
            _kill_group(process)


@dataclass
class _AskByFile:
    """Asks the parent. Is pickled for the workers, so it holds plain values only."""

    folder: Path
    asked: int = 0

    def __call__(self, logged: Mapping[str, float]) -> bool:
        _write(self.folder / f"message-{self.asked}", {"logged": dict(logged)})
        answer = self.folder / f"answer-{self.asked}"
        self.asked += 1
        while not answer.exists():
            time.sleep(_PAUSE)
        return bool(json.loads(answer.read_text()))


def _run_child(run: Callable[[], float | None], folder: Path) -> None:
    """Run in the child, as leader of a process group, which can be killed as a whole."""
    os.setsid()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    message: dict[str, Any]
    try:
        message = {"result": run()}
    except BaseException as error:
        message = {"error": f"{type(error).__name__}: {error}"}
    # Its number is not known here: workers have copies of the counter.
    _write(folder / "last", message)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _receive(process: Any, folder: Path, number: int, timeout: float) -> dict[str, Any]:
    """Wait for the child's message with this number, or its last one."""
    deadline = time.monotonic() + timeout
    while True:
        alive = process.is_alive()  # read first: the last message is written before the end
        for path in (folder / f"message-{number}", folder / "last"):
            if path.exists():
                message: dict[str, Any] = json.loads(path.read_text())
                return message
        if not alive:
            raise SubprocessError(f"The process of the run has ended with code {process.exitcode}.")
        if time.monotonic() > deadline:
            raise SubprocessError(f"The run has been silent for {timeout:g} s and was killed.")
        time.sleep(_PAUSE)


def _kill_group(process: Any) -> None:
    """Kill the child and all processes that it has started."""
    try:
        # Its group exists once it has called setsid; until then it has started nothing.
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.kill()
    process.join()


def _write(path: Path, what: Any) -> None:
    """Write a file atomically."""
    hidden = path.with_name(f".{path.name}")
    hidden.write_text(json.dumps(what))
    hidden.rename(path)
