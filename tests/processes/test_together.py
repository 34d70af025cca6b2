"""Muon and AdamW as one optimizer under every strategy, and ZeRO where gradients are exchanged."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import MixedPrecision
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import PerParameter, Together, TopK, attach
from lightning_gc.lightning.for_pytorch_lightning import (
    SimulatedDDPStrategy,
    SimulatedLocalStepsStrategy,
)
from tests.support.accelerator import DEVICE, needs_four
from tests.support.fitting import digest, fit, unwarned
from tests.support.hsdp import RANKS, Sharded, fit_sharded, hsdp
from tests.support.local_steps import local
from tests.support.models import Plain, own_batches
from tests.support.optimizers import MUON, ByHand, Joined, parts
from tests.support.processes import run_in_processes
from tests.support.resuming import Crash, checkpoint
from tests.support.simulation import real, simulated

pytestmark = pytest.mark.processes
SPARSE = PerParameter(TopK(0.1))
LOCAL = {
    "real": local,
    "simulated": SimulatedLocalStepsStrategy,
    "options": {"every": 4},
}
CASES: dict[str, dict[str, Any]] = {
    "each step": {"module": Joined, "gradient_clip_val": 0.1},
    "local steps": {"module": Joined, "gradient_clip_val": 0.1, **LOCAL},
}


def scaled() -> list[Any]:
    scaler = GradScaler(DEVICE, init_scale=2.0**24)  # the first steps overflow
    return [MixedPrecision("16-mixed", DEVICE, scaler=scaler)]


HALF: dict[str, Any] = {"fp16": {"module": Joined, "plugins": scaled}}


class AdamW(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class ZeRO(Plain):
    """Each worker keeps the moments of its share, makes that share's step and broadcasts it."""

    def configure_optimizers(self) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            self.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01
        )


def attached(worker: int, joined: bool, scale: float | None = None) -> str:
    """Train by a loop of one's own; return the weights' digest."""
    torch.manual_seed(0)
    module = Joined()
    ddp = DistributedDataParallel(_Loss(module))
    optimizers = parts(module)
    used = [Together(optimizers)] if joined else list(optimizers)
    scaler = GradScaler(DEVICE, init_scale=scale or 1.0, enabled=scale is not None)
    handle = attach(ddp, SPARSE, optimizers=used, scaler=scaler)
    for index, batch in enumerate(own_batches(worker, 6)):
        for each in used:
            each.zero_grad()
        scaler.scale(ddp(batch, index)).backward()
        handle.check()
        for each in used:
            scaler.step(each)
        scaler.update()
    handle.close()
    return digest(module)


class _Loss(torch.nn.Module):
    def __init__(self, module: Plain) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.module.loss(batch, index)


def everything(worker: int) -> dict[str, Any]:
    """As one of two workers."""
    plain = {"compressor": SPARSE}
    cases = [plain | case for case in (CASES | HALF).values()]
    cases += [plain | {"module": module} for module in (Joined, ByHand, ZeRO, AdamW)]
    names = (*CASES, *HALF, "joined", "by hand", "ZeRO", "AdamW")
    found = dict(zip(names, real(worker, 2, cases), strict=True))
    ways = [(True, None), (False, None), (True, 64.0), (False, 64.0)]
    return found | {"attached": [attached(worker, *way) for way in ways]}


def test_automatic_manual_simulated_and_attached() -> None:
    """Each way is the same, bit for bit; so is what ZeRO does with the mean gradients.

    A scale that is a power of two changes no bit of float32 gradients.
    """
    runs = run_in_processes(everything, 2)
    for name, case in (CASES | HALF).items():
        us = simulated(2, {"compressor": SPARSE, **case, "accumulate_grad_batches": 2})
        assert us["steps"] == runs[0][name]["steps"] >= 12
        assert us["digest"] == runs[0][name]["digest"] == runs[1][name]["digest"], name
        assert us["memory"] == [each[name]["memory"][0] for each in runs], name
    for mine, other in (("joined", "by hand"), ("ZeRO", "AdamW")):
        digests = {each[name]["digest"] for each in runs for name in (mine, other)}
        assert len(digests) == 1, (mine, other)
    assert len({found for each in runs for found in each["attached"]}) == 1


@pytest.mark.parametrize("name", CASES)
def test_it_resumes(name: str, tmp_path: Path) -> None:
    """Within a round of local steps too: moments of both optimizers, and both schedules."""

    def run(folder: str, crash: int = -1, **more: Any) -> dict[str, Any]:
        callbacks = [
            Crash(crash),
            ModelCheckpoint(
                tmp_path / folder, "{epoch}-{step}", save_top_k=-1, save_on_train_epoch_end=True
            ),
        ]
        case = {"compressor": SPARSE, **CASES[name], "max_epochs": 2, "callbacks": callbacks}
        return simulated(2, case | {"enable_checkpointing": True} | more)

    whole = run("whole")
    run("crashed", crash=5 if name == "local steps" else 17)
    resumed = run("on", resume=checkpoint(tmp_path / "crashed", 0, 15))
    assert whole["digest"] == resumed["digest"]
    assert whole["memory"] == resumed["memory"]


class Bad(Joined):
    """One gradient of the head is not finite in the third step, on one worker."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[bool] = []

    def on_after_backward(self) -> None:
        if self.trainer.fit_loop.batch_idx == 5:
            self.head.bias.grad.fill_(torch.inf)  # type: ignore[union-attr]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before = digest(self)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.strategy.worker:  # type: ignore[attr-defined]
            self.moved.append(digest(self) != self.before)

    def noted(self) -> dict[str, Any]:
        return {"moved": self.moved}


def test_a_scaler_skips_the_step_of_both() -> None:
    """In float16, simulated: with a gradient of AdamW's that is infinite Muon makes no step."""
    scaler = GradScaler(DEVICE, init_scale=256.0)
    strategy = SimulatedDDPStrategy(SPARSE, workers=2)
    plugin = MixedPrecision("16-mixed", DEVICE, scaler=scaler)
    rows = own_batches(0, 10)
    with unwarned():
        left = fit(strategy, Bad, rows, plugins=[plugin], use_distributed_sampler=False)
    assert left["moved"] == [True, True, False, True, True]
    assert scaler.get_scale() == 128.0


class OnShards(Sharded):
    """Muon and AdamW as one; Muon orthogonalises whole matrices, and communicates to do so."""

    def configure_optimizers(self) -> Any:
        trained = {n: p for n, p in self.named_parameters() if p.requires_grad}
        matrices = [p for p in trained.values() if p.ndim == 2]
        others = [p for p in trained.values() if p.ndim != 2]
        muon = MUON(matrices, lr=0.02, momentum=0.9)
        return Together([muon, torch.optim.AdamW(others, lr=0.01)])


def on_shards(rank: int, folder: str) -> list[dict[str, Any]]:
    """Train two epochs at once, and in two parts."""
    path = str(Path(folder, "half.ckpt"))
    fits = functools.partial(fit_sharded, rank, steps=3, module=OnShards)
    saved = [ModelCheckpoint(folder, "half", save_on_train_epoch_end=True)]
    whole = fits(hsdp(SPARSE, 2), max_epochs=2)
    fits(hsdp(SPARSE, 2), max_epochs=1, callbacks=saved)
    return [whole, fits(hsdp(SPARSE, 2), max_epochs=2, resume=path)]


@needs_four
@pytest.mark.nightly
def test_on_shards(tmp_path: Path) -> None:
    for whole, resumed in run_in_processes(on_shards, RANKS, str(tmp_path), timeout=200):
        assert whole["steps"] == resumed["steps"] == 6
        for what in ("whole", "memory"):
            assert whole[what].keys() == resumed[what].keys()
            for name, array in whole[what].items():
                assert np.array_equal(array, resumed[what][name]), name


def muon_steps(rank: int) -> dict[str, float]:
    """Return how far Muon's step is from the whole matrix's: on shards, and shard by shard."""
    mesh = init_device_mesh(DEVICE, (2,))
    grad = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))

    def step(gradient: torch.Tensor) -> torch.Tensor:
        param = torch.nn.Parameter(torch.zeros_like(gradient))
        param.grad = gradient
        MUON([param], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()
        return param.detach()

    whole = step(grad)
    ways = {
        "shards": step(distribute_tensor(grad, mesh, [Shard(0)])).full_tensor(),  # type: ignore[attr-defined]
        "each alone": torch.cat([step(half.clone()) for half in grad.chunk(2)]),
        "gradient + 0.1 %": step(grad * (1 + 1e-3 * torch.sign(grad - grad.mean()))),
    }
    return {name: float((way - whole).norm() / whole.norm()) for name, way in ways.items()}


@pytest.mark.nightly
@pytest.mark.skipif(MUON is torch.optim.SGD, reason="torch.optim.Muon needs torch 2.9")
def test_muon_takes_sharded_matrices_as_whole() -> None:
    """Up to the noise of its products in bfloat16."""
    figures = {"shards": 0.019, "each alone": 0.39, "gradient + 0.1 %": 0.019}
    for apart in run_in_processes(muon_steps, 2):
        assert apart == pytest.approx(figures, abs=0.01)
