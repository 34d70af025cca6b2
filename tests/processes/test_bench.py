"""lightning-gc bench measures every method with two workers, and explains failures."""

import contextlib
import io
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.utils.data import DataLoader, TensorDataset

from lightning_gc import cli
from lightning_gc.bench.baselines import (
    BASELINES,
    BF16,
    FP16,
    NONE,
    PLAIN,
    POWER_SGD,
    computed_bytes,
    keep_local,
    low_rank_numel,
)
from lightning_gc.bench.benchmark import COLUMNS, _refuse_other_files, cells, verdict
from lightning_gc.methods.text_table import markdown
from tests.support.fitting import unwarned
from tests.support.processes import run_in_processes

CONFIG = """
model:
  class_path: tests.processes.test_bench.Line
  init_args: {}
data: {class_path: tests.processes.test_bench.Points}
trainer: {accelerator: cpu, max_epochs: 1, accumulate_grad_batches: 2, num_sanity_val_steps: 0}
"""
LOCAL = """
tune:
  name: local
  metric: m
  space: {}
  methods: {local: {compressor: topk, rounds: {every: 8}}}
"""
OURS = "topk:density=0.25,scheme=two_shot"
WEIGHTS, BIAS = 128 * 64, 64
GONE = 9


class Line(pl.LightningModule):
    def __init__(self, dies_in: str = "", rate: float = 0.1, shows: bool = True) -> None:
        super().__init__()
        self.net = nn.Linear(128, 64)
        self.dies_in, self.rate, self.shows = dies_in, rate, shows

    def training_step(self, batch: Any, index: int) -> Any:
        strategy = type(self.trainer.strategy).__name__
        if strategy == self.dies_in and self.global_step == 2:
            if self.global_rank:
                os._exit(GONE)
            if strategy == "HookStrategy":
                raise ZeroDivisionError("a mistake in the model")
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        # As schedules do that last as long as the run: two batches a step, of 8, by 2 workers.
        assert self.trainer.estimated_stepping_batches == 4
        sgd = torch.optim.SGD(self.parameters(), self.rate)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)
        return [sgd], [{"scheduler": plateau, "monitor": "nobody_logs_this"}]


class Points(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        draw = torch.Generator().manual_seed(0)
        x, y = torch.randn(64, 128, generator=draw), torch.randn(64, 64, generator=draw)
        return DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("line.yaml").write_text(CONFIG)
    return tmp_path


def bench(worker: int, folder: str, words: tuple[str, ...], environment: Any) -> tuple[int, str]:
    """Be one of the workers."""
    os.chdir(folder)
    os.environ.update(environment)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), unwarned():
        code = cli.main(["bench", *words])
    return code, said.getvalue()


def test_two_workers(folder: Path) -> None:
    Path("line.yaml").write_text(CONFIG + "tune: {name: n, metric: m, space: {}, methods: "
                                 "{my_qsgd: {compressor: qsgd, fixed: {bits: 2}}}}")  # fmt: skip
    words = ("line.yaml", "--rounds", "2", "--steps", "4", "--compressor", OURS, "my_qsgd")
    (code, said), (other, silence) = run_in_processes(bench, 2, str(folder), words, {})
    assert code == other == cli.OK, said
    assert silence == ""
    assert "Ignored settings of the file's trainer: num_sanity_val_steps." in said
    assert "round 2 of 2  my_qsgd" in said
    found = json.loads(Path("runs", "bench", "line.json").read_text())
    rows = found["rows"]
    assert list(rows) == [*BASELINES, OURS, "my_qsgd"]
    assert (found["workers"], found["machines"], found["steps"]) == (2, 1, 4)
    for row in rows.values():
        assert 0 < row["low"] <= row["seconds"] <= row["high"]
        assert row["loss"] > 0
    assert rows[NONE]["bytes"] == 0
    dense = 4 * (WEIGHTS + BIAS)
    assert (rows[PLAIN]["bytes"], rows[PLAIN]["source"]) == (dense, "computed")
    assert rows[FP16]["bytes"] == dense / 2
    # Half the elements are another worker's shard, sent once to reduce and once to gather; the bias
    # goes dense. 32 bits a value, and positions take at most 4 bits each at this density.
    values, positions = WEIGHTS // 4 * 4, WEIGHTS // 4 / 2
    sent = rows[OURS]["bytes"]
    assert values + 4 * BIAS < sent < values + positions + 4 * BIAS + 300
    assert rows[OURS]["source"] == "counted"
    assert rows["my_qsgd"]["bytes"] < dense / 12
    # Every method begins with the same weights and gets the same data.
    assert rows[FP16]["loss"] == pytest.approx(rows[PLAIN]["loss"], rel=1e-3)
    assert rows[NONE]["loss"] != rows[PLAIN]["loss"]
    page = Path("runs", "bench", "line.md").read_text()
    assert markdown(COLUMNS, cells(rows)) in page
    assert verdict(rows) in page
    assert verdict(rows) in said
    assert "PowerSGD's hook has one bucket" in page


@pytest.mark.parametrize("where", ["DDPStrategy", "CompressedDDPStrategy"])
def test_a_worker_that_dies_ends_the_command(folder: Path, where: str) -> None:
    Path("line.yaml").write_text(CONFIG.replace("{}", f"{{dies_in: {where}}}", 1))
    words = (
        "line.yaml",
        "--rounds",
        "1",
        "--steps",
        "3",
        "--compressor",
        "topk",
        "--timeout",
        "20",
    )
    ((code, said),) = run_in_processes(bench, 2, str(folder), words, {}, wait_for=1)
    method = PLAIN if where == "DDPStrategy" else "topk"
    assert code == cli.FAILED
    assert f"lightning-gc: Worker 0 cannot continue with {method}." in said
    assert "has died" in said
    assert "Traceback" not in said


def test_a_mistake_in_the_model_is_shown_whole(folder: Path) -> None:
    Path("line.yaml").write_text(CONFIG.replace("{}", "{dies_in: HookStrategy}", 1))
    words = ("line.yaml", "--rounds", "1", "--steps", "3")
    ((code, said),) = run_in_processes(bench, 2, str(folder), words, {}, wait_for=1)
    assert code == cli.FAILED
    assert "cannot continue with torch fp16 hook. ZeroDivisionError: a mistake" in said
    assert "in training_step" in said


def test_workers_that_want_different_things_are_refused(folder: Path) -> None:
    for code, said in run_in_processes(disagree, 2, str(folder)):
        assert code == cli.USAGE
        assert "Worker 1 has steps=3, but worker 0 has steps=2." in said


def disagree(worker: int, folder: str) -> tuple[int, str]:
    return bench(worker, folder, ("line.yaml", "--steps", str(2 + worker)), {})


@pytest.mark.parametrize(
    ("words", "change", "said"),
    [
        (["none.yaml"], {}, "none.yaml cannot be read"),
        (["line.yaml", "--steps", "1"], {}, "--steps 1: must be at least 2"),
        (["line.yaml", "--rounds", "0"], {}, "--rounds 0: must be at least 1"),
        (["line.yaml", "--compressor", "topkk"], {}, "'topkk' is not a compressor"),
        (["line.yaml", "--compressor", "topk:0.1"], {}, "write a compressor's fields as"),
        (["line.yaml", "--compressor", "topk:depth=1"], {}, "depth"),
        (["line.yaml", "--compressor", "topk:scheme=all_reduce"], {}, "are not linear"),
        (["line.yaml", "--compressor", "topk:scheme=star"], {}, "'star' is not a scheme"),
        (["line.yaml", "--compressor", "local"], {"model:": f"{LOCAL}model:"}, "has local steps"),
        (["line.yaml"], {"MASTER_ADDR": None}, "torchrun --nproc-per-node 2 -m lightning_gc bench"),
        (["line.yaml"], {"WORLD_SIZE": "1"}, "One worker sends nothing"),
        (["line.yaml"], {"WORLD_SIZE": "3"}, "3 workers with 2 on this machine"),
        (["line.yaml"], {"accelerator: cpu": "accelerator: tpu"}, "trainer.accelerator='tpu'"),
        (["line.yaml"], {"accelerator: cpu": "accelerator: gpu"}, "start one worker per GPU"),
        (["line.yaml"], {"accelerator: cpu": "precision: 7"}, "The configuration is refused"),
        (["line.yaml"], {"model:": "modell:"}, "has no section model"),
        (["line.yaml"], {"test_bench.Line": "test_bench.Lime"}, "Lime"),
        (["line.yaml", "--timeout", "nan"], {}, "--timeout nan: must be at least 1"),
        (["line.yaml", "--out", "."], {}, "line.md is not of lightning-gc bench"),
        ([], {}, "bench needs a file such as train.yaml, or --replay and a description."),
        (["line.yaml", "--step-ms", "9"], {}, "--step-ms describes a training without a file"),
        (["line.yaml", "--replay"], {}, "line.yaml is not read in a --replay."),
        (["--replay", "--params", "1M"], {}, "The description lacks --step-ms. Write"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    change: dict[str, Any],
    said: str,
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    Path("line.md").write_text("my notes")
    for name, value in (place | change).items():
        if name.isupper() and value is not None:
            monkeypatch.setenv(name, value)
        elif name.isupper():
            monkeypatch.delenv(name, raising=False)
        else:
            path = Path("line.yaml")
            path.write_text(path.read_text().replace(name, value))
    assert cli.main(["bench", *words]) == cli.USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mine.md", "mine.json"])
def test_files_of_the_user_are_not_overwritten(tmp_path: Path, name: str) -> None:
    mine = tmp_path / "mine.yaml"
    other = {"md": "# mine, 2026-11-27", "json": '{\n "date": "2026-11-27"}'}[name[5:]]
    (tmp_path / name).write_text(other)
    _refuse_other_files(tmp_path, mine)
    (tmp_path / name).write_text("my notes")
    with pytest.raises(ValueError, match=f"{name} is not of lightning-gc bench"):
        _refuse_other_files(tmp_path, mine)


REPLAY = ("--replay", "--params", "1M", "--step-ms", "30", "--codec-ms", "6", "--rounds", "1")


def test_a_replay_sleeps_and_sends(folder: Path) -> None:
    """A sleep ends no sooner than told, so a step has its least seconds on any machine."""
    words = (*REPLAY, "--steps", "2", "--compressor", "qsgd")
    (code, said), (other, silence) = run_in_processes(bench, 2, str(folder), words, {})
    assert code == other == cli.OK, said
    assert silence == ""
    found = json.loads(Path("runs", "bench", "1M.json").read_text())["rows"]
    assert list(found) == [NONE, PLAIN, BF16, "qsgd"]
    assert min(row["low"] for row in found.values()) >= 0.03
    assert found["qsgd"]["low"] >= 0.036  # compression delays the backward pass
    dense = found[PLAIN]["bytes"]
    assert dense == pytest.approx(4e6, rel=0.01)
    assert found[BF16]["bytes"] == dense / 2
    assert dense / 8 < found["qsgd"]["bytes"] < dense / 7
    assert "Computation and compression were slept." in Path("runs", "bench", "1M.md").read_text()


def test_cells() -> None:
    rows: dict[str, dict[str, Any]] = {
        NONE: {"seconds": 0.1, "bytes": 0},
        PLAIN: {"seconds": 0.4, "bytes": 1000, "source": "computed", "loss": 1.0},
        "topk": {"seconds": 0.2, "low": 0.15, "high": 0.3, "bytes": 10.4, "loss": math.nan},
    }
    assert cells(rows) == [
        [NONE, "0.1000", "4.00", "1.00", "0", ""],
        [PLAIN, "0.4000", "1.00", "4.00", "1,000*", "1.000"],
        ["topk", "0.2000 (0.1500-0.3000)", "2.00", "2.00", "10", "nan"],
    ]
    assert cells({"topk": rows["topk"]})[0][2:4] == ["nan", "nan"]
    assert markdown(COLUMNS[:2], [["a", "b"]]) == "|  | s per step |\n| --- | ---: |\n| a | b |\n"


def wrapped(worker: int) -> tuple[list[float], list[float]]:
    """Return a gradient in DDP under ``keep_local``, and the worker's own."""
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    ddp = nn.parallel.DistributedDataParallel(module)
    ddp.register_comm_hook(None, keep_local)
    inputs = torch.full((1, 3), worker + 1.0)
    ddp(inputs).sum().backward()
    assert module.weight.grad is not None
    found = module.weight.grad.flatten().tolist()
    (own,) = torch.autograd.grad(module(inputs).sum(), [module.weight])
    torch.distributed.destroy_process_group()
    return found, own.flatten().tolist()


@pytest.mark.processes
def test_without_an_exchange_gradients_are_the_workers_own() -> None:
    (one, ones), (two, twos) = run_in_processes(wrapped, 2)
    assert (one, two) == (ones, twos)
    assert one != two


@pytest.mark.parametrize("shape", [(100,), (100, 50), (2, 50), (4, 5), (16, 3, 3, 3), ()])
def test_power_sgd_sends_what_torch_says(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    matrix = tensor.view(shape[0] if shape else 1, -1)
    rows, columns = matrix.shape
    worth, dense, low = powerSGD_hook._should_compress(rows, columns, min(rows, columns, 2), 2)
    assert low_rank_numel(tensor) == (low if worth else dense)
    assert computed_bytes(POWER_SGD, [tensor], 2) == 4 * (low if worth else dense)


@pytest.mark.parametrize(
    ("seconds", "spread", "said"),
    [
        (0.5, 0.1, "Verdict: topk was fastest, at 2.00 times plain DDP's speed."),
        (0.8, 0.2, "Verdict: too noisy to tell. The quartiles of topk and plain DDP overlap."),
        (0.98, 0.2, "Verdict: too noisy to tell."),
        (0.98, 0.01, "Verdict: stay with plain DDP. The best method, topk, took 0.98"),
        (2.0, 0.2, "Verdict: stay with plain DDP."),
    ],
)
def test_the_verdict_needs_quartiles_that_do_not_overlap(
    seconds: float, spread: float, said: str
) -> None:
    rows = {
        name: {"seconds": s, "low": s * (1 - spread), "high": s * (1 + spread)}
        for name, s in ((NONE, 0.1), (PLAIN, 1.0), ("topk", seconds))
    }
    assert verdict(rows).startswith(said)
    assert COLUMNS[2] == "speed relative to DDP"


def test_the_verdict_compares_with_the_quicker_16_bit_hook() -> None:
    seconds = {PLAIN: 1.0, FP16: 0.6, BF16: 0.5, "topk": 0.25}
    rows = {name: {"seconds": s, "low": s, "high": s} for name, s in seconds.items()}
    assert "at 4.00 times plain DDP's speed and 2.00 times torch bf16 hook's." in verdict(rows)
    del rows["topk"]
    assert "torch bf16 hook was fastest, at 2.00 times plain DDP's speed. " in verdict(rows)
