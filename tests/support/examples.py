"""Run an example: its ``main`` in this process, or at night as the script that it is."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_gc import CompressedDDPStrategy
from tests.support.fitting import unwarned
from tests.support.processes import hold_port, preloaded

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Ended:
    """What an example has ended with, and what it has said."""

    code: int
    out: str
    err: str


def as_script(name: str, options: tuple[Any, ...], *_: Any) -> Ended:
    """As a user starts it; so do its workers, which takes a few seconds each."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *map(str, options)],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


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
