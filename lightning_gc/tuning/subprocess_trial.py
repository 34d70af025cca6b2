"""A run of several processes: a tree of its own, which asks its parent and dies with it.

Lightning starts W workers, and none of them may talk to the study: they would each ask for a trial.
So a run is a fresh process that starts the workers. After each validation worker 0 writes what was
logged into a file and waits for the answer; the parent answers with another. That works with every
storage and survives a crash, a hang and Ctrl-C.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna

from lightning_gc.tuning.experiment import Experiment
from lightning_gc.tuning.method import Method
from lightning_gc.tuning.training_callback import Ask
from lightning_gc.tuning.training_run import fit

_PAUSE = 0.02  # seconds between two looks for a file


class TreeError(RuntimeError):
    """A run in processes of its own has failed."""


def fit_in_tree(
    experiment: Experiment,
    method: Method,
    params: Mapping[str, Any],
    ask: Ask,
    seed: int,
    final: bool = False,
) -> float | None:
    """Run ``fit`` in a fresh process, which may start others; same arguments, same result.

    ``params`` stands for the trial, whose values must have been drawn before.

    Raises:
        TreeError: it has failed, has ended without a word, or has been silent for longer than
            ``experiment.timeout``; nothing of it is left running.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="lightning_gc_") as name:
        folder = Path(name)
        arguments = (experiment, method, dict(params), seed, final, folder)
        process = context.Process(target=_grow, args=arguments)
        process.start()
        try:
            for number, said in _follow(process, folder, experiment.timeout):
                if "error" in said:
                    raise TreeError(said["error"])
                if "result" in said:
                    result: float | None = said["result"]
                    return result
                _write(folder / f"answer-{number}", ask(said["figures"]))
            raise AssertionError("unreachable")
        finally:
            _fell(process)


@dataclass
class _Question:
    """Asks the parent by file. Travels to the workers, so it holds plain values only."""

    folder: Path
    asked: int = 0

    def __call__(self, figures: Mapping[str, float]) -> bool:
        self.say({"figures": dict(figures)})
        answer = self.folder / f"answer-{self.asked - 1}"
        while not answer.exists():
            time.sleep(_PAUSE)
        return bool(json.loads(answer.read_text()))

    def say(self, what: Mapping[str, Any]) -> None:
        _write(self.folder / f"said-{self.asked}", what)
        self.asked += 1


def _grow(
    experiment: Experiment,
    method: Method,
    params: dict[str, Any],
    seed: int,
    final: bool,
    folder: Path,
) -> None:
    """Run in the child: a group of its own, so that it can be ended with all that it starts."""
    os.setsid()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    said: dict[str, Any]
    try:
        trial = optuna.trial.FixedTrial(params)
        said = {"result": fit(experiment, method, trial, _Question(folder), seed, final)}
    except BaseException as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    # Workers have counted for themselves: the last word has a name of its own.
    _write(folder / "last", said)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _follow(process: Any, folder: Path, timeout: float) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield what the child says, in order."""
    number, deadline = 0, time.monotonic() + timeout
    while True:
        alive = process.is_alive()  # looked at first: its last word comes before its end
        for name in (f"said-{number}", "last"):
            if (folder / name).exists():
                yield number, json.loads((folder / name).read_text())
                number, deadline = number + 1, time.monotonic() + timeout
                break
        else:
            if not alive:
                raise TreeError(f"The process of the run has ended with code {process.exitcode}.")
            if time.monotonic() > deadline:
                raise TreeError(f"The run has been silent for {timeout:g} s and was killed.")
            time.sleep(_PAUSE)


def _fell(process: Any) -> None:
    """End the child and all that it has started."""
    try:
        # Its group exists once it has called setsid; until then it has started nothing.
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.kill()
    process.join()


def _write(path: Path, what: Any) -> None:
    """Write a file that is whole from the moment at which it can be seen."""
    hidden = path.with_name(f".{path.name}")
    hidden.write_text(json.dumps(what))
    hidden.rename(path)
