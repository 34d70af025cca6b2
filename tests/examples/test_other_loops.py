"""Examples of other loops: in small by day; by night as a user runs them, stopped and resumed."""

import contextlib
import importlib
import importlib.util
import io
import os
import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gc import QSGD
from tests.support.fitting import digest, unwarned
from tests.support.processes import hold_port, run_in_processes, without_others

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]
NEEDS = {
    "plain_torch": "torch",
    "local_plain_torch": "torch",
    "local_elastic": "torch",
    "cluster": "pytorch_lightning",
    "sharded": "pytorch_lightning",
    "fabric": "lightning_fabric",
    "local_fabric": "lightning_fabric",
    "accelerate_loop": "accelerate",
    "local_accelerate": "accelerate",
    "transformers_trainer": "transformers",
    "local_transformers": "transformers",
}


class Scored(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.net(x) - labels).square().mean()}


def needed(name: str) -> None:
    if not importlib.util.find_spec(NEEDS[name]):
        pytest.skip(f"{NEEDS[name]} is not installed: pip install 'lightning-gc[huggingface]'")


def in_small(worker: int, name: str, options: list[str]) -> str:
    """Run an example as torchrun would; return what it prints."""
    if name == "local_elastic":
        without_others()
    sys.argv = [f"{name}.py", *options]
    with contextlib.redirect_stdout(io.StringIO()) as out, unwarned():
        runpy.run_path(str(EXAMPLES / sys.argv[0]), run_name="__main__")
    return out.getvalue()


@pytest.mark.parametrize("name", NEEDS)
def test_it_trains(name: str, tmp_path: Path) -> None:
    """A few steps in two processes: it saves, and workers that print their weights agree."""
    needed(name)
    options = ["--steps", "9"]
    if NEEDS[name] == "pytorch_lightning":
        options = ["--devices", "2", "--epochs", "1"]
    with hold_port() as held:
        if name == "local_elastic":
            options += ["--rendezvous", f"127.0.0.1:{held.getsockname()[1]}"]
        said = run_in_processes(in_small, 2, name, [*options, "--folder", str(tmp_path / "run")])
    figures = re.findall(r"(?:weights sum to|ratio|: 1/) ?(-?[0-9.]*[0-9])", "".join(said))
    assert len(set(figures)) == 1, said
    assert any(tmp_path.rglob("*")), "it saves"


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


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [each for each in NEEDS if each not in ("local_elastic", "cluster", "sharded")]
)
def test_it_goes_on_as_if_it_had_not_stopped(name: str, tmp_path: Path) -> None:
    needed(name)
    launcher = () if NEEDS[name] == "lightning_fabric" else TORCHRUN
    command = *launcher, str(EXAMPLES / f"{name}.py")
    last_line(*command, "--steps", "20", folder=tmp_path / "stopped")
    resumed = last_line(*command, "--steps", "40", folder=tmp_path / "stopped")
    straight = last_line(*command, "--steps", "40", folder=tmp_path / "straight")
    weights = [re.findall("weights sum to (.*)", line) for line in (resumed, straight)]
    assert weights[0] == weights[1]
    assert weights[0]


def trained_twice(worker: int, folder: str, compiled: bool) -> tuple[str, list[str]]:
    """A Trainer trains twice with the page's callback; its DDP may be compiled after it is made."""
    from transformers import Trainer, TrainingArguments

    from lightning_gc.huggingface import CompressedGradients

    torch.manual_seed(0)
    net = Scored()
    data: Any = [{"x": row, "labels": row} for row in torch.randn(32, 8).unbind()]
    options: dict[str, Any] = {"use_cpu": True, "ddp_backend": "gloo", "report_to": "none"}
    options |= {"disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    if compiled:
        options |= {"torch_compile": True, "torch_compile_backend": "eager"}
    arguments = TrainingArguments(folder, max_steps=4, per_device_train_batch_size=4, **options)
    trainer = Trainer(net, arguments, train_dataset=data)
    CompressedGradients(trainer, QSGD(4), min_numel=0)
    ends = []
    for _ in range(2):
        trainer.train()
        figures = trainer.state.log_history[-1]
        assert figures["compression/total_ratio"] > 5
        assert (
            figures["compression/total_dense_bytes"]
            == 4 * sum(p.numel() for p in net.parameters()) * 4
        )
        ends.append(digest(net))
    return type(trainer.model_wrapped).__name__, ends


def test_a_trainer_trains_twice_and_compiled(tmp_path: Path) -> None:
    """It keeps its DDP, and Accelerate compiles it after it has made it."""
    needed("transformers_trainer")
    plain, same = run_in_processes(trained_twice, 2, str(tmp_path), False)
    compiled, other = run_in_processes(trained_twice, 2, str(tmp_path), True)
    assert plain == same
    assert compiled == other
    assert (plain[0], compiled[0]) == ("DistributedDataParallel", "OptimizedModule")
    assert plain[1] == compiled[1]
    assert plain[1][0] != plain[1][1]


def test_a_worker_reads_no_other_objects_than_tensors(tmp_path: Path) -> None:
    """A prepared file in a checkpoint ends in an error."""
    needed("transformers_trainer")
    from lightning_gc.huggingface import read_state

    with pytest.raises(ValueError, match="is missing, so this worker's errors cannot be resumed"):
        read_state(tmp_path / "compression-worker0.pt")
    torch.save({"seen": Exploit(tmp_path / "touched")}, tmp_path / "compression-worker0.pt")
    with pytest.raises(pickle.UnpicklingError):
        read_state(tmp_path / "compression-worker0.pt")
    assert not (tmp_path / "touched").exists()


class Exploit:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_callback_that_comes_too_late_says_so(tmp_path: Path) -> None:
    needed("transformers_trainer")
    from transformers import Trainer, TrainingArguments

    from lightning_gc.huggingface import CompressedGradients

    with unwarned():
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
        late = CompressedGradients(Trainer(Scored(), arguments), QSGD(4))
    with pytest.raises(RuntimeError, match=r"Make it before trainer\.train"):
        late.on_step_begin(arguments, None, None)


@pytest.mark.nightly
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
