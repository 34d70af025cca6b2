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


def logged(worker: int, folder: str, with_ours: bool) -> dict[str, Any]:
    """A Trainer logs, evaluates and saves, with a reporter and a callback that reads losses."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from lightning_gc import Identity, TopK
    from lightning_gc.huggingface import CompressedGradients

    seen: list[dict[str, Any]] = []

    class Reporter(TrainerCallback):
        """Is told before callbacks that are added later, as W&B's is; stops at step 9."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.append(dict(logs))
            control.should_training_stop = "loss" in logs and state.global_step == 9

    data: Any = [
        {"x": row, "labels": row}
        for row in torch.randn(96, 8, generator=torch.Generator().manual_seed(1)).unbind()
    ]
    options: dict[str, Any] = {"use_cpu": True, "ddp_backend": "gloo", "report_to": "none"}
    options |= {"disable_tqdm": True, "logging_steps": 3, "logging_first_step": True}
    options |= {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 3, "max_steps": 12}

    def train(out: Path, compressor: Any, resumed: str | None = None) -> Any:
        torch.manual_seed(0)
        arguments = TrainingArguments(str(out), per_device_train_batch_size=4, **options)
        given: dict[str, Any] = {"train_dataset": data, "eval_dataset": data[:8]}
        trainer = Trainer(Scored(), arguments, callbacks=[Reporter()], **given)
        if compressor is not None:
            CompressedGradients(trainer, compressor, min_numel=0)
        seen.clear()
        result = trainer.train(resume_from_checkpoint=resumed)
        return trainer, result.training_loss

    out = Path(folder)
    trainer, mean = train(out / "first", Identity() if with_ours else None)
    found = {"history": trainer.state.log_history, "mean": mean, "told": [*seen]}
    if with_ours:
        straight, _ = train(out / "straight", TopK(0.1))
        other, _ = train(out / "other", TopK(0.1), str(out / "straight" / "checkpoint-6"))
        found["ends"] = digest(straight.model), digest(other.model)
        found["folders"] = sorted(each.name for each in (out / "other").iterdir())
        for each in (out / "straight" / "checkpoint-3").glob("compression-*"):
            each.unlink(missing_ok=True)  # the other worker deletes, too
        try:
            train(out / "none", TopK(0.1), str(out / "straight" / "checkpoint-3"))
        except (ValueError, FileNotFoundError) as error:
            found["refused"] = str(error), (out / "none" / "checkpoint-3").exists()
    return found


def test_the_log_of_a_trainer_is_what_it_is_without_us(tmp_path: Path) -> None:
    """Besides our figures; a run resumes from the folder that it is given."""
    needed("transformers_trainer")
    with_ours = run_in_processes(logged, 2, str(tmp_path / "ours"), True)
    without = run_in_processes(logged, 2, str(tmp_path / "plain"), False)
    for ours, plain in zip(with_ours, without, strict=True):
        assert ours["mean"] == plain["mean"]
        for kind in ("history", "told"):
            assert _untimed(ours[kind]) == _untimed(plain[kind])
            figures = ["compression/total_ratio" in entry for entry in ours[kind]]
            assert figures == [bool({"loss", "train_loss"} & {*e}) for e in ours[kind]]
        assert ours["ends"][0] == ours["ends"][1]
        assert "checkpoint-6" not in ours["folders"]
        sentence, made = ours["refused"]
        assert "was written without CompressedGradients" in sentence
        assert not made


def _untimed(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the Trainer says besides our figures and clocks."""
    clocks = ("compression/", "train_runtime", "eval_runtime", "train_s", "train_t", "eval_s")
    return [{k: v for k, v in each.items() if not k.startswith(clocks)} for each in entries]


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
