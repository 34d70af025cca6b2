"""Examples of other loops than the Trainer's: run as a user runs them, stopped and resumed."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import hold_port

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
pytestmark = [pytest.mark.processes, pytest.mark.nightly, pytest.mark.timeout(400)]


def last_line(*command: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command, "--folder", str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "weights sum to" in line][-1]


@pytest.mark.parametrize(
    ("needs", "command"),
    [
        ("torch", (*TORCHRUN, str(EXAMPLES / "plain_torch.py"))),
        ("torch", (*TORCHRUN, str(EXAMPLES / "local_plain_torch.py"))),
        ("lightning_fabric", (str(EXAMPLES / "fabric.py"),)),
        ("lightning_fabric", (str(EXAMPLES / "local_fabric.py"),)),
        ("accelerate", (*TORCHRUN, str(EXAMPLES / "accelerate_loop.py"))),
        ("accelerate", (*TORCHRUN, str(EXAMPLES / "local_accelerate.py"))),
        ("transformers", (*TORCHRUN, str(EXAMPLES / "transformers_trainer.py"))),
        ("transformers", (*TORCHRUN, str(EXAMPLES / "local_transformers.py"))),
    ],
    ids=lambda value: Path(value[-1]).stem if isinstance(value, tuple) else "",
)
def test_it_goes_on_as_if_it_had_not_stopped(
    needs: str, command: tuple[str, ...], tmp_path: Path
) -> None:
    if not importlib.util.find_spec(needs):
        pytest.skip(f"{needs} is not installed: pip install 'lightning-gc[huggingface]'")
    last_line(*command, "--steps", "20", folder=tmp_path / "stopped")
    resumed = last_line(*command, "--steps", "40", folder=tmp_path / "stopped")
    straight = last_line(*command, "--steps", "40", folder=tmp_path / "straight")
    weights = [re.findall("weights sum to (.*)", line) for line in (resumed, straight)]
    assert weights[0] == weights[1]
    assert weights[0]


def test_an_elastic_loop_in_two_jobs(tmp_path: Path) -> None:
    with hold_port() as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        command = [sys.executable, str(EXAMPLES / "local_elastic.py"), "--steps", "40"]
        command += ["--rendezvous", address, "--folder", str(tmp_path)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        jobs = [subprocess.Popen(command, stdout=pipe, text=True, env=env) for _ in range(2)]
        said = [job.communicate(timeout=120)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    found = [re.findall("weights sum to (.*)", each) for each in said]
    assert found[0] == found[1]
    assert found[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker0.pt", "worker1.pt"]
