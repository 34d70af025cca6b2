"""Three rounds of ``tests/survival.py``; it plays as many as one likes."""

import functools
import tempfile
from pathlib import Path

import pytest

from tests.survival import finish, one_round, start

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@functools.cache
def undisturbed() -> dict[str, str]:
    """Return what a run that is left alone ends with."""
    with tempfile.TemporaryDirectory() as folder:
        return finish(start(Path(folder)))


@pytest.mark.parametrize("seed", [0, 2, 11])
def test_killed_and_stopped_workers_cost_nothing(tmp_path: Path, seed: int) -> None:
    """SIGKILL to worker 1, to worker 0; SIGSTOP to worker 1."""
    one_round(seed, undisturbed(), tmp_path)
