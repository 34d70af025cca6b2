"""After torchrun restarts a killed worker, the run ends as it would have without the crash."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn", reason="the example's digits come with scikit-learn")
EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def last_line(*options: Any) -> str:
    """Run the example; the variable is what its docstring asks for."""
    done = subprocess.run(
        [sys.executable, *TORCHRUN, "--max-restarts=2", EXAMPLE, *map(str, options)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(220)
def test_a_killed_worker_costs_an_attempt_and_nothing_else(tmp_path: Path) -> None:
    short = ("--epochs", 2, "--timeout", 10)
    alone = last_line(*short, "--out", tmp_path / "alone")
    killed = last_line(*short, "--out", tmp_path / "killed", "--fail-at", 45)
    assert alone.startswith("attempt 1: accuracy ")
    assert killed == alone.replace("attempt 1", "attempt 2")
