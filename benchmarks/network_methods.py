"""Strategies of the network benchmark: the limit, torch's own, and ours."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.utils.data import DataLoader

from lightning_gc import (
    QSGD,
    BinMeans,
    Cast,
    ChunkedTopK,
    CompressedDDPStrategy,
    HardThreshold,
    Identity,
    LocalStepsStrategy,
    PowerSGD,
    Quantised,
    SparseReduce,
    TopK,
    TwoShot,
)
from lightning_gc.bench.baselines import BASELINES, NONE, HookStrategy, baseline_strategy
from lightning_gc.compressors import Compressor

LIMIT = timedelta(seconds=120)
OURS: dict[str, tuple[Compressor, dict[str, Any]]] = {
    "Identity()": (Identity(), {}),
    "Cast()": (Cast(), {}),
    "QSGD(4)": (QSGD(4), {}),
    "TopK(0.01)": (TopK(0.01), {}),
    "TopK(0.01), bfloat16": (TopK(0.01, value_dtype="bfloat16"), {}),
    "TopK(0.01), bfloat16, sampled": (
        TopK(0.01, value_dtype="bfloat16", selection="sampled"),
        {},
    ),
    "TopK(0.01), bfloat16, TwoShot": (
        TopK(0.01, value_dtype="bfloat16"),
        {"scheme": TwoShot()},
    ),
    "TopK(0.01), bfloat16, SparseReduce": (
        TopK(0.01, value_dtype="bfloat16"),
        {"scheme": SparseReduce()},
    ),
    "HardThreshold(0.004)": (HardThreshold(0.004), {}),
    "PowerSGD(2)": (PowerSGD(2), {}),
}
_BINS = Quantised(ChunkedTopK(), BinMeans(2))  # SparseLoCo's form
LOCAL: dict[str, tuple[Compressor, int, int]] = {
    "Identity(), every 8 steps": (Identity(), 8, 0),
    "QSGD(4), every 8 steps": (QSGD(4), 8, 0),
    "QSGD(4), every 8 steps, 2 late": (QSGD(4), 8, 2),
    "TopK(0.01), every 8 steps": (TopK(0.01), 8, 0),
    "TopK(0.01), every 8 steps, 1 late": (TopK(0.01), 8, 1),
    "1.6 % of 2 bits, every 32 steps": (_BINS, 32, 0),
    "1.6 % of 2 bits, every 32 steps, 1 late": (_BINS, 32, 1),
}
"""Local steps: compressor, H and delay."""
POST_LOCAL, PERIOD = "torch post-local SGD, every 8 steps", 8
METHODS = [*BASELINES, POST_LOCAL, *OURS, *LOCAL]


def steps_between(method: str) -> int:
    """Return H, the steps from one exchange to the next."""
    if method in LOCAL:
        return LOCAL[method][1]
    return PERIOD if method == POST_LOCAL else 1


def make_strategy(method: str) -> Any:
    """Return a new strategy of one of ``METHODS``."""
    settings: dict[str, Any] = {
        "process_group_backend": "gloo",
        "timeout": LIMIT,
    }
    if method in LOCAL:
        compressor, every, delay = LOCAL[method]
        return LocalStepsStrategy(compressor, every=every, delay=delay, **settings)
    settings["gradient_as_bucket_view"] = True  # for all of them: no copies into buckets and back
    if method == NONE:
        return SingleDeviceStrategy("cpu")
    if method == POST_LOCAL:  # weights are averaged, dense
        state = post_localSGD_hook.PostLocalSGDState(None, None, 0, False)
        hook = (state, post_localSGD_hook.post_localSGD_hook)
        return HookStrategy(hook, ddp_comm_state=state, model_averaging_period=PERIOD, **settings)
    if method in BASELINES:
        return baseline_strategy(method, **settings)
    compressor, more = OURS[method]
    return CompressedDDPStrategy(compressor, **settings, **more)


def train(
    method: str,
    module: LightningModule,
    loader: DataLoader[Any],
    steps: int,
    callbacks: list[Callback],
    *,
    clip: float | None = None,
) -> None:
    """Train with a method as one of the workers, each a node; wait until all have done so.

    Without synchronisation every worker trains alone.
    """
    strategy = make_strategy(method)
    fit(strategy, module, loader, steps, callbacks, clip=clip, alone=method == NONE)


def fit(
    strategy: Any,
    module: LightningModule,
    loader: DataLoader[Any],
    steps: int,
    callbacks: list[Callback],
    *,
    clip: float | None = None,
    alone: bool = False,
) -> None:
    """Train with a strategy as one of the workers, each a node; wait until all have done so.

    ``alone``: every worker by itself.
    """
    worker, workers = dist.get_rank(), dist.get_world_size()
    # Lightning clears these variables after every fit.
    os.environ |= {"WORLD_SIZE": "1" if alone else str(workers), "LOCAL_RANK": "0"}
    os.environ["NODE_RANK"] = "0" if alone else str(worker)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=1 if alone else workers,
        strategy=strategy,
        callbacks=callbacks,
        max_steps=steps,
        use_distributed_sampler=False,
        gradient_clip_val=clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    dist.barrier()
