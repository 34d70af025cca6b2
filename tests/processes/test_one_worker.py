"""One worker compresses as several do, and every strategy says once that this saves nothing."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import QSGD, Identity, PerParameter, TopK, attach
from lightning_gc.compressors import Compressor
from lightning_gc.lightning.for_pytorch_lightning import (
    CompressedHSDPStrategy,
    LocalStepsStrategy,
    SimulatedDDPStrategy,
)
from tests.support.accelerator import BACKEND
from tests.support.fitting import ddp, fit
from tests.support.fsdp import fsdp
from tests.support.hsdp import fit_sharded
from tests.support.models import Plain, own_batches
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes

SAVES_NOTHING = "are still compressed, which slows training and saves nothing"


def kept_back(strategy: Any) -> bool:
    """Train, and return whether something was held back."""
    left = fit(strategy, Plain, own_batches(0, 2), devices=1)
    return any(bool(error.any()) for error in left["errors"][0].values())


def sharded(strategy: Any) -> bool:
    left = fit_sharded(0, strategy, ranks=1)
    return any(bool(error.any()) for error in left["memory"].values())


def attached(compressor: Compressor) -> bool:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 40))
    handle = attach(model, compressor)
    model(torch.ones(2, 8)).square().mean().backward()
    errors = handle.state_dict()["engine"]["memory"].values()
    held = any(bool(each.any()) for kept in errors for each in kept.values())
    handle.close()
    dist.destroy_process_group()
    return held


def train(rank: int, kind: str, compressor: Any) -> tuple[bool, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        match kind:
            case "DDP":
                held = kept_back(ddp(compressor))
            case "local steps":
                held = kept_back(
                    LocalStepsStrategy(compressor, every=2, process_group_backend=BACKEND)
                )
            case "simulated":
                held = kept_back(SimulatedDDPStrategy(compressor, workers=1))
            case "HSDP":
                held = sharded(CompressedHSDPStrategy(compressor, process_group_backend=BACKEND))
            case "FSDP":
                held = sharded(fsdp(compressor))
            case _:
                held = attached(compressor)
    return held, [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("DDP", "One worker: nothing is sent, but gradients are"),
        ("local steps", "One worker: nothing is sent, but differences of weights are"),
        ("simulated", "One worker: nothing is sent, but gradients are"),
        ("HSDP", "has one replica on 1 ranks: nothing is sent between nodes, but gradients are"),
        ("attach", "One worker: nothing is sent, but gradients are"),
    ],
)
def test_it_compresses_and_warns_once(kind: str, said: str) -> None:
    ((held, found),) = run_in_processes(train, 1, kind, PerParameter(TopK(0.1)))
    assert held
    (warning,) = (each for each in found if SAVES_NOTHING in each)
    assert said in warning


def test_auto_is_uncompressed_there_and_does_not_warn() -> None:
    ((held, found),) = run_in_processes(train, 1, "simulated", "auto")
    assert not held
    assert not [each for each in found if SAVES_NOTHING in each]


@pytest.mark.parametrize("kind", ["DDP", "HSDP"])
def test_what_is_exact_costs_nothing_worth_a_warning(kind: str) -> None:
    ((_, found),) = run_in_processes(train, 1, kind, Identity())
    assert not [each for each in found if SAVES_NOTHING in each]


def test_one_rank_of_shards_compresses_nothing() -> None:
    """FSDP2 calls no reduce-scatter there, so its own warning is the true one."""
    ((_, found),) = run_in_processes(train, 1, "FSDP", QSGD(8))
    assert not [each for each in found if SAVES_NOTHING in each]
    assert any("one rank, so that nothing is exchanged or compressed" in each for each in found)
