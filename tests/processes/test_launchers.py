"""Every launcher, both flavours of Lightning, as a user would start them."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parent / "scripts" / "launch.py")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None, reason="needs both flavours of Lightning"
    ),
]


def launch(*command: str) -> float:
    """Run the script and return the compression ratio that it prints."""
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ratio ")]
    return float(line.split()[1])


@pytest.mark.parametrize("start", ["popen", "spawn", "fork", "forkserver"])
def test_start_methods(start: str) -> None:
    assert launch(SCRIPT, "pytorch_lightning", start, "topk") > 10


def test_torchrun() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert launch(*torchrun, SCRIPT, "pytorch_lightning", "popen", "qsgd") > 5


@pytest.mark.parametrize("flavour", ["pytorch_lightning", "lightning.pytorch"])
def test_by_name_in_both_flavours(flavour: str) -> None:
    assert 1.9 < launch(SCRIPT, flavour, "by-name", "compressed_ddp") <= 2.0


def test_lightning_flavour_with_a_strategy_object() -> None:
    assert launch(SCRIPT, "lightning.pytorch", "spawn", "hard_threshold") > 1
