"""Run an example: in this process or a forked one, or at night as the script that it is."""

import contextlib
import importlib
import io
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_gc import CompressedDDPStrategy
from tests.support.fitting import unwarned
from tests.support.processes import hold_port, preloaded, run_in_processes, without_others

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Ended:
    """What an example has ended with, and what it has said."""

    code: int
    out: str
    err: str


def as_script(name: str, options: tuple[Any, ...], *_: Any, folder: Path | None = None) -> Ended:
    """As a user starts it; so do its workers, which takes a few seconds each."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *map(str, options)],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
        cwd=folder,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def forked_script(name: str, options: tuple[Any, ...], *, folder: Path) -> Ended:
    """As a user starts it, but forked from a process that has imported torch and Lightning."""
    ended: Ended
    (ended,) = run_in_processes(_script, 1, name, options, folder, timeout=220)
    return ended


def _script(worker: int, name: str, options: tuple[Any, ...], folder: Path) -> Ended:
    without_others()
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [f"{name}.py", *map(str, options)]
    fork = multiprocessing.get_context("fork")  # this process has no threads
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), unwarned():
        try:
            runpy.run_path(str(EXAMPLES / sys.argv[0]), run_name="__main__")
        except SystemExit as end:
            code = int(end.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())


each_script: Callable[..., Any] = pytest.mark.parametrize(
    "run", [forked_script, pytest.param(as_script, marks=pytest.mark.nightly)]
)


def here(
    name: str,
    options: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Ended:
    """In this process; workers are forked from one that has imported torch."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module(name)
    preloaded()
    monkeypatch.setattr(module, "CompressedDDPStrategy", forked)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, options)])
    code = 0
    with unwarned(), hold_port() as held:
        monkeypatch.setenv("MASTER_PORT", str(held.getsockname()[1]))
        try:
            module.main()
        except SystemExit as end:
            code = int(end.code or 0)
    return Ended(code, *capsys.readouterr())


def forked(*arguments: Any, **settings: Any) -> CompressedDDPStrategy:
    return CompressedDDPStrategy(*arguments, **settings | {"start_method": "forkserver"})


each_way: Callable[..., Any] = pytest.mark.parametrize(
    "run", [here, pytest.param(as_script, marks=pytest.mark.nightly)]
)
