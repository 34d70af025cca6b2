"""Killing or stopping a worker leaves no process behind, and a restart loses nothing.

``python -m tests.support.survival`` plays as many rounds as one likes.
"""

import functools
import tempfile
from pathlib import Path

import pytest

from tests.support.processes import run_in_processes
from tests.support.scripts.survivor import train
from tests.support.survival import finish, one_round

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


def survive(worker: int, folder: Path) -> str:
    return train(folder)


def finish_quickly(folder: Path) -> list[str]:
    """As ``finish``, in processes that have imported torch before."""
    return run_in_processes(survive, 2, folder)  # type: ignore[no-any-return]


@functools.cache
def undisturbed() -> list[str]:
    """Return what a run that is left alone ends with."""
    with tempfile.TemporaryDirectory() as folder:
        return finish_quickly(Path(folder))


@pytest.mark.nightly
def test_a_killed_parent_costs_nothing(tmp_path: Path) -> None:
    """SIGKILL to worker 0, which has started worker 1: nobody is left to end that one."""
    one_round(2, undisturbed(), tmp_path, finish_quickly)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 2, 11])
def test_killed_and_stopped_workers_cost_nothing(tmp_path: Path, seed: int) -> None:
    """SIGKILL to worker 1, to worker 0; SIGSTOP to worker 1."""
    one_round(seed, undisturbed(), tmp_path, finish)
