"""Weights in FSDP's all-gathers, compressed: one copy for all, exact masters, true bytes, resumes."""

import copy
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_gc import (
    QSGD,
    Float8,
    Identity,
    Int8,
    NarrowResidual,
    PerParameter,
    WeightDifferences,
)
from lightning_gc.lightning.for_pytorch_lightning import CompressionMonitor
from tests.processes.test_fsdp import train
from tests.support.accelerator import needs_four, needs_two
from tests.support.fsdp import fsdp, plain
from tests.support.fsdp_loop import Loop, Watch, checkpointed, compiled, prefetching
from tests.support.hsdp import Sharded, fit_sharded
from tests.support.processes import run_in_processes

pytestmark = [pytest.mark.processes, needs_two]
EIGHT, DIFFERENCES = Int8(block_size=256), WeightDifferences()
ERRORS = NarrowResidual("int8")
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
WAYS: dict[str, dict[str, Any]] = {
    "checkpointed": {"before": checkpointed},
    "compiled": {"before": compiled},
    "prefetching": {"after": prefetching},
    "kept": {"reshard": False},
}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


def loops(rank: int, ranks: int) -> dict[str, Any]:
    """Train in all ways; in one set of processes, for starting them takes long."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found: dict[str, Any] = {"dense": Loop(rank).run(0, 4).end()}
    exact = Loop(rank, Identity(), weights=Identity())
    found["exact"] = exact.run(0, 4).end()
    exact_gathers = Loop(rank, Identity())
    found["exact scatters"] = exact_gathers.run(0, 4).end()
    for name, weights in (("eight", EIGHT), ("differences", DIFFERENCES)):
        with Watch() as watch:
            loop = Loop(rank, QSGD(4), weights=weights).run(0, 50)
        found[f"{name}, differing"] = (watch.differing(), sum(b for _, b, _ in watch.calls))
        found[f"{name}, computed"] = loop.computed()
        found[f"{name}, exact"] = loop.end()
        base = Loop(rank, Identity(), weights=weights).run(0, 4).end()
        for way, changes in WAYS.items():
            own = Loop(rank, Identity(), weights=weights, **changes).run(0, 4).end()
            found[f"{name}, {way}"] = same(base, own)
        narrow = Loop(rank, QSGD(4), weights=weights, policy=BFLOAT16).run(0, 10)
        found[f"{name}, bfloat16"] = narrow.computed()
        narrow.end()
    found["resumed"] = resumed(rank)
    return found


def resumed(rank: int) -> bool:
    """Whether a loop that goes on from states equals one that was not interrupted."""
    options: dict[str, Any] = {"weights": DIFFERENCES, "memory": ERRORS}
    first = Loop(rank, QSGD(2), **options).run(0, 4)
    state = first.handle.state_dict()
    model, optimizer = (copy.deepcopy(each.state_dict()) for each in (first.net, first.optimizer))
    whole = first.run(4, 8).end()
    again = Loop(rank, QSGD(2), **options)
    again.net.load_state_dict(model)
    again.optimizer.load_state_dict(optimizer)
    again.handle.load_state_dict(state)
    return same(whole, again.run(4, 8).end())


@pytest.fixture(scope="module")
def looped() -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run_in_processes(loops, 2, 2, timeout=300)
    return results


def test_uncompressed_it_is_fsdp2_bit_for_bit(looped: Any) -> None:
    for rank in looped:
        assert same(rank["exact"], rank["dense"])


@pytest.mark.parametrize("name", ["eight", "differences"])
def test_all_ranks_compute_with_the_same_weights(looped: Any, name: str) -> None:
    """After 50 steps, the owner of a shard too; biases and norms are exact."""
    check_common(looped, name)


def check_common(ranks: Any, name: str) -> None:
    first = ranks[0]
    for rank in ranks:
        assert same(rank[f"{name}, computed"], first[f"{name}, computed"])
        assert same(rank[f"{name}, bfloat16"], first[f"{name}, bfloat16"])
        assert same(rank[f"{name}, exact"], first[f"{name}, exact"])
    off = {
        n: np.abs(first[f"{name}, computed"][n] - value).max()
        for n, value in first[f"{name}, exact"].items()
    }
    compressed = {"table.weight", "body.0.weight", "body.1.weight", "frozen.weight"}
    frozen = {"frozen.weight"} if name == "differences" else set()  # its first gather was exact
    assert {n for n, gap in off.items() if gap > 0} == compressed - frozen
    assert max(off.values()) < 0.02


@pytest.mark.parametrize("name", ["eight", "differences"])
def test_a_backward_pass_has_its_forward_passs_weights(looped: Any, name: str) -> None:
    for rank in looped:
        differing, gathers = rank[f"{name}, differing"]
        assert differing == 0
        assert gathers == 3 * 50, "of the body and the frozen layer; the root is kept"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["eight", "differences"])
def test_other_ways_to_compute_have_the_same_weights(looped: Any, name: str, way: str) -> None:
    assert all(rank[f"{name}, {way}"] for rank in looped)


def test_states_resume_bit_for_bit(looped: Any) -> None:
    """Errors in 8 bits, and the copies of weights."""
    assert all(rank["resumed"] for rank in looped)
