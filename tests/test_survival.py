"""Three rounds of ``tests/survival.py``; it plays as many as one likes."""

from pathlib import Path

import pytest

from tests.survival import finish, one_round, start

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def test_killed_and_stopped_workers_cost_nothing(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    expected = finish(start(tmp_path / "whole"))
    lines = [one_round(seed, expected, tmp_path) for seed in SEEDS]
    assert any("peers named: True" in line for line in lines), lines


SEEDS = (0, 2, 11)  # SIGKILL to worker 1, to worker 0, SIGSTOP to worker 1
