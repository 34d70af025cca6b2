"""Training starts under every launcher and both flavours of Lightning."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import hold_port

SCRIPT = str(Path(__file__).parents[1] / "support" / "scripts" / "launch.py")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None, reason="needs both flavours of Lightning"
    ),
]


def launch(*command: str) -> float:
    """Run the script and return the compression ratio that it prints."""
    with hold_port() as held:  # else Lightning looks for one that is free now, and hopes
        done = subprocess.run(
            [sys.executable, *command],
            env={**os.environ, "MASTER_PORT": str(held.getsockname()[1])},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ratio ")]
    return float(line.split()[1])


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.nightly  # by day in tests/examples
def test_a_script_that_starts_the_other_workers() -> None:
    """Lightning's default, with a strategy object, in one flavour."""
    assert launch(SCRIPT, "pytorch_lightning", "popen", "topk") > 10


@pytest.mark.nightly
def test_torchrun_by_name() -> None:
    """With the name of a strategy, in the other flavour."""
    ratio = launch(*TORCHRUN, SCRIPT, "lightning.pytorch", "by-name", "compressed_ddp")
    assert 1.9 < ratio <= 2.0


@pytest.mark.nightly
@pytest.mark.parametrize("start", ["spawn", "fork", "forkserver"])
def test_other_start_methods(start: str) -> None:
    assert launch(SCRIPT, "pytorch_lightning", start, "topk") > 10


@pytest.mark.nightly
def test_torchrun() -> None:
    assert launch(*TORCHRUN, SCRIPT, "pytorch_lightning", "popen", "qsgd") > 5


@pytest.mark.nightly
@pytest.mark.parametrize("flavour", ["pytorch_lightning", "lightning.pytorch"])
def test_by_name_in_both_flavours(flavour: str) -> None:
    assert 1.9 < launch(SCRIPT, flavour, "by-name", "compressed_ddp") <= 2.0


@pytest.mark.nightly
def test_lightning_flavour_with_a_strategy_object() -> None:
    assert launch(SCRIPT, "lightning.pytorch", "spawn", "hard_threshold") > 1


@pytest.mark.nightly
@pytest.mark.parametrize("flavour", ["pytorch_lightning", "lightning.pytorch"])
def test_local_steps_by_name_in_both_flavours(flavour: str) -> None:
    """Four steps of each worker, and one exchange in bfloat16; the script compares the weights."""
    assert 7.6 < launch(SCRIPT, flavour, "by-name", "local_steps_spawn") <= 8.0


@pytest.mark.nightly
def test_local_steps_under_torchrun() -> None:
    assert launch(*TORCHRUN, SCRIPT, "lightning.pytorch", "by-name", "sparseloco") > 4
