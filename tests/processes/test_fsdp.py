"""Fits of models in shards on all ranks: uncompressed they equal FSDP2, compressed they come close.

The same LightningModule is trained by Lightning's own strategy and by ours.
"""

import csv
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from lightning_gc import QSGD, Identity, PerParameter
from lightning_gc.lightning.for_pytorch_lightning import CompressionMonitor
from tests.processes.test_hsdp import Manual, Seen, Twice
from tests.support.accelerator import needs_four, needs_two
from tests.support.fitting import quiet_trainer, unwarned
from tests.support.fsdp import fsdp, plain
from tests.support.hsdp import Sharded, batches, fit_sharded, left_by
from tests.support.processes import run_in_processes

pytestmark = [pytest.mark.processes, needs_two]
Found = list[dict[str, Any]]
STEPS = 3


def reduced(policy: torch.dtype | None, dtype: torch.dtype) -> Any:
    return partial(Sharded, MixedPrecisionPolicy(param_dtype=policy, reduce_dtype=dtype))


class Offloaded(Sharded):
    def configure_model(self) -> None:
        if not hasattr(self.head, "set_requires_gradient_sync"):
            for layer in (*self.body, self.frozen, self.head, self):
                policy = CPUOffloadPolicy(pin_memory=False)
                fully_shard(layer, mesh=self.mesh, offload_policy=policy)


class OnAllRanks(Sharded):
    """Without a mesh, which is torch's for all ranks."""

    def configure_model(self) -> None:
        if not hasattr(self.head, "set_requires_gradient_sync"):
            for layer in (*self.body, self.frozen, self.head, self):
                fully_shard(layer)


DAY: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {
        "accumulate_grad_batches": 2,
        "steps": 5,
        "module": partial(Sharded, adam=True),
    },
    "clipped by norm": {"gradient_clip_val": 0.5},
    "reduced in bfloat16": {"module": reduced(None, torch.bfloat16)},
}
NIGHT: dict[str, dict[str, Any]] = {
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "manual": {"module": Manual},
    "a unit called twice": {"module": Twice},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "computed in bfloat16": {"module": reduced(torch.bfloat16, torch.bfloat16)},
    "reduced in float32": {"module": reduced(torch.bfloat16, torch.float32)},
    "offloaded": {"module": Offloaded},
    "on all ranks": {"module": OnAllRanks},
    "accumulated in bfloat16": {
        "module": reduced(None, torch.bfloat16),
        "accumulate_grad_batches": 2,
    },
}


def fit_cases(rank: int, ranks: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for name, case in cases.items():
        for strategy, key in ((fsdp(Identity()), name), (plain(ranks), f"{name} by torch")):
            seen = Seen()
            found[key] = fit_sharded(rank, strategy, ranks=ranks, callbacks=[seen], **case)
            found[key]["norms"] = (seen.after, seen.before)
    return found


class Resumed(pl.Callback):
    """Notes where training begins, and saves when it ends."""

    def __init__(self, path: str) -> None:
        self.path, self.step = path, -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.step = trainer.strategy.engine.step

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.path:
            trainer.save_checkpoint(self.path)


def train(
    rank: int, epochs: int, save: str = "", resume: str | None = None, **options: Any
) -> dict[str, Any]:
    noted = Resumed(save)
    strategy = fsdp(PerParameter(QSGD(2)), **options)  # whose noise shows
    settings: dict[str, Any] = {"max_epochs": epochs, "resume": resume, "callbacks": [noted]}
    found = fit_sharded(rank, strategy, STEPS, ranks=2, **settings)
    return found | {"began": noted.step}


def watched(rank: int, folder: str) -> dict[str, Any]:
    """Fit with the monitor, validate, and go on with the same Trainer."""
    settings = {"max_epochs": 2, "logger": CSVLogger(folder, "", ""), "log_every_n_steps": 1}
    callbacks = [CompressionMonitor()]
    trainer = quiet_trainer(
        fsdp(QSGD(8)), devices=2, use_distributed_sampler=False, callbacks=callbacks, **settings
    )
    torch.manual_seed(0)
    module = Sharded(adam=True)
    trainer.fit(module, batches(rank, STEPS))
    found = left_by(trainer, module)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, batches(rank, STEPS))
    return found | {"metrics": metrics, "rounds after": trainer.strategy.engine.step}  # type: ignore[attr-defined]


def in_the_other_flavour(rank: int) -> tuple[str, float]:
    """Fit by name; return the strategy and the ratio of bytes."""
    import lightning.pytorch as other

    from lightning_gc.lightning import for_lightning

    class Net(other.LightningModule):
        def configure_model(self) -> None:
            self.layer = torch.nn.Linear(64, 64)
            fully_shard(self, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

        def forward(self, rows: torch.Tensor) -> Any:
            return self.layer(rows)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            return self(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    monitor = for_lightning.CompressionMonitor()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with unwarned():
        trainer = other.Trainer(
            strategy="compressed_fsdp",
            accelerator="cpu",
            devices=2,
            max_epochs=1,
            callbacks=[monitor],
            enable_model_summary=False,
            **quiet,  # type: ignore[arg-type]
        )
        rows: Any = torch.randn(16, 64)
        trainer.fit(Net(), torch.utils.data.DataLoader(rows, 4))
    ratio = float(trainer.callback_metrics["compression/total_ratio"])
    return f"{type(trainer.strategy).__module__}.{type(trainer.strategy).__name__}", ratio


def everything(rank: int, folder: str) -> dict[str, Any]:
    """In one set of processes, for starting them takes long."""
    found = fit_cases(rank, 2, DAY)
    for form in ("folder", "file"):
        options: dict[str, Any] = {"save_distributed_checkpoint": form == "folder"}
        path = str(Path(folder, f"{form}.ckpt"))
        found[f"{form}, whole"] = train(rank, 2, **options)
        found[f"{form}, first"] = train(rank, 1, save=path, **options)
        found[f"{form}, second"] = train(rank, 2, resume=path, **options)
    found["another seed"] = train(rank, 2, seed=1)
    found["watched"] = watched(rank, folder)
    long: dict[str, Any] = {"steps": 50, "module": partial(Sharded, adam=True), "ranks": 2}
    found["eight bits"] = fit_sharded(rank, fsdp(QSGD(8)), **long)
    found["dense"] = fit_sharded(rank, plain(2), **long)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fits")


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    results: Found = run_in_processes(everything, 2, str(folder), timeout=200)
    return results


def check_same(found: Found, name: str) -> None:
    for rank in found:
        ours, theirs = rank[name], rank[f"{name} by torch"]
        assert ours["steps"] == theirs["steps"]
        for param, value in ours["whole"].items():
            np.testing.assert_array_equal(value, theirs["whole"][param])
        assert ours["norms"] == theirs["norms"]


@pytest.mark.parametrize("name", DAY)
def test_uncompressed_it_is_fsdp2(found: Found, name: str) -> None:
    """Bit for bit. Every micro-batch is exchanged, as by Lightning's own."""
    check_same(found, name)
    assert {rank[name]["rounds"] for rank in found} == {5 if name == "accumulated" else 4}


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_uncompressed_it_is_fsdp2_in_other_ways_too() -> None:
    results = run_in_processes(fit_cases, 2, 2, NIGHT, timeout=300)
    for name in NIGHT:
        check_same(results, name)


@pytest.mark.nightly
@needs_four
@pytest.mark.timeout(400)
def test_uncompressed_it_is_fsdp2_on_four_ranks() -> None:
    results = run_in_processes(fit_cases, 4, 4, DAY, timeout=300)
    for name in DAY:
        check_same(results, name)


@pytest.mark.nightly
def test_by_name_in_the_other_flavour() -> None:
    pytest.importorskip("lightning")
    for name, ratio in run_in_processes(in_the_other_flavour, 2):
        assert name == "lightning_gc.lightning.for_lightning.CompressedFSDPStrategy"
        assert 3.5 < ratio < 4


@pytest.mark.parametrize("form", ["folder", "file"])
def test_a_run_resumes_bit_for_bit(found: Found, form: str) -> None:
    """Random numbers follow from seed and step, which are all of the state."""
    for rank in found:
        whole, first, second = (rank[f"{form}, {part}"] for part in ("whole", "first", "second"))
        assert (first["began"], second["began"]) == (0, STEPS)
        apart = [
            np.abs(value - rank["another seed"]["whole"][name]).max()
            for name, value in whole["whole"].items()
        ]
        assert max(apart) > 1e-4, "what is compressed shows"
        for name, value in whole["whole"].items():
            np.testing.assert_array_equal(second["whole"][name], value)
        assert second["losses"] == whole["losses"][STEPS:]


def test_eight_bits_train_as_dense_gradients(found: Found) -> None:
    """A mean over fifty steps; one seed."""
    ours, theirs = (
        np.mean([np.mean(r[n]["losses"][-10:]) for r in found]) for n in ("eight bits", "dense")
    )
    assert abs(ours / theirs - 1) < 0.02
    assert theirs < 0.8 * np.mean(found[0]["dense"]["losses"][:5])


def test_the_monitor_counts_true_bytes(found: Found, folder: Path) -> None:
    """Dense bytes are those of a reduce-scatter, half of what DDP sends."""
    sizes = {"body.0.weight": 38 * 8, "body.0.bias": 38, "body.2.bias": 40}
    sizes |= {"head.weight": 4 * 40, "head.bias": 4, "gain": 2}  # as padded for two ranks
    dense = sum(sizes.values())
    compressed = 40 * 37 + 40 * 40
    metrics = found[0]["watched"]["metrics"]
    steps = 2 * STEPS
    assert metrics["compression/total_dense_bytes"] == steps * 4 * (dense + compressed) // 2
    norms = sum(-(-half // 512) for half in (20 * 37, 20 * 40))  # one for each block of a part
    payload = 4 * dense // 2 + compressed // 2 + 4 * norms
    sent = metrics["compression/total_wire_bytes"] / steps
    assert payload < sent <= payload + 12 * 5, "flags and padding of five units"
    assert found[1]["watched"]["metrics"] == metrics
    log = Path(folder, "metrics.csv").read_text().splitlines()
    rows = [row for row in csv.DictReader(log) if row.get("compression/relative_error")]
    assert len(rows) >= steps
    assert all(0 < float(row["compression/relative_error"]) < 0.02 for row in rows)
    assert float(rows[0]["compression/level"]) == 8


def test_a_second_fit_goes_on(found: Found) -> None:
    for rank in found:
        assert (rank["watched"]["rounds"], rank["watched"]["rounds after"]) == (6, 9)
        assert rank["watched"]["levels"] == dict.fromkeys(("body.1.weight", "body.2.weight"), 8)
