"""Models whose layers two or more ranks have together: exchanged with their replicas, resumed.

Uncompressed they are Lightning's own. What ranks have copies of stays equal on them, bit for bit.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_gc import (
    QSGD,
    Identity,
    Int8,
    ModelTopK,
    NarrowResidual,
    PerParameter,
    PowerSGD,
    TopK,
    attach,
)
from lightning_gc.controllers import Accordion
from lightning_gc.lightning.for_pytorch_lightning import CompressionMonitor
from tests.support.accelerator import BACKEND, DEVICE, needs_four
from tests.support.fsdp import fsdp
from tests.support.hsdp import RANKS, Resumed, batches_of, hsdp
from tests.support.processes import run_in_processes, said
from tests.support.tensor_parallel import COPIED, Net, Parallel, fit_parallel

pytestmark = [pytest.mark.processes, needs_four]
Found = list[dict[str, Any]]
STEPS, FEW = 20, 4
TOPK = PerParameter(TopK(0.05))
WAYS: dict[str, Any] = {
    "hsdp": lambda size: hsdp(Identity(), 2, tensor_parallel_size=size),
    "fsdp": lambda size: fsdp(Identity(), tensor_parallel_size=size),
    "topk": lambda size: hsdp(TOPK, 2, tensor_parallel_size=size),
    "powersgd": lambda size: hsdp(
        PerParameter(PowerSGD(1)),
        2,
        controller=Accordion(low=2, high=1, interval=1),
        tensor_parallel_size=size,
    ),
    "qsgd": lambda size: hsdp(PerParameter(QSGD(4)), 2, tensor_parallel_size=size),
    "scattered": lambda size: fsdp(
        QSGD(4),
        memory=NarrowResidual("int8"),
        weights=Int8(block_size=64),
        min_numel=1,
        tensor_parallel_size=size,
    ),
}
EXACT = ("hsdp", "fsdp")
LOSSY = [way for way in WAYS if way not in EXACT]


def native(data: int, size: int) -> ModelParallelStrategy:
    return ModelParallelStrategy(data, size, process_group_backend=BACKEND)


def fits(rank: int, ranks: int, size: int) -> dict[str, Any]:
    run = partial(fit_parallel, rank, size=size, ranks=ranks, module=partial(Parallel, adam=True))
    found = {"native": run(native(ranks // size, size), STEPS)}
    for name, make in WAYS.items():
        resumed = Resumed()
        strategy = make(size)
        steps = STEPS if name in EXACT else FEW
        settings = {"max_epochs": 1 if name in EXACT else 2}
        callbacks = [resumed, CompressionMonitor()]
        found[name] = run(strategy, steps, callbacks=callbacks, **settings)
        found[name] |= {"parts": resumed.parts, "sent": strategy.recording.take().wire_bytes}
    return found


@pytest.fixture(scope="module")
def found() -> Found:
    results: Found = run_in_processes(fits, RANKS, RANKS, 2, timeout=200)
    return results


@pytest.fixture(scope="module")
def three() -> Found:
    results: Found = run_in_processes(fits, 6, 6, 3, timeout=230)
    return results


def check_native(found: Found) -> None:
    for rank in found:
        for way in EXACT:
            assert rank[way]["losses"] == rank["native"]["losses"]
            for name, param in rank["native"]["whole"].items():
                np.testing.assert_array_equal(rank[way]["whole"][name], param, err_msg=name)


def check_copies(found: Found, way: str, size: int) -> None:
    errors = 0
    for first in range(0, len(found), size):
        here = found[first][way]
        for other in range(first + 1, first + size):
            there = found[other][way]
            assert there["losses"] == here["losses"]
            assert there["levels"] == here["levels"]
            for entry, kept in here["memory"].items():
                name = entry.partition(" ")[0]
                copied = name.endswith(COPIED)
                assert copied == (there["parts"][name] == here["parts"][name])
                if copied:
                    errors += int(np.any(kept))
                    np.testing.assert_array_equal(there["memory"][entry], kept, err_msg=entry)
    for rank in found:
        for name, param in rank[way]["whole"].items():
            np.testing.assert_array_equal(param, found[0][way]["whole"][name], err_msg=name)
    assert errors or way == "qsgd"  # which keeps none


def test_uncompressed_it_is_lightnings_own(found: Found) -> None:
    check_native(found)


@pytest.mark.parametrize("way", LOSSY)
def test_copies_stay_equal(found: Found, way: str) -> None:
    check_copies(found, way, 2)


@pytest.mark.nightly
def test_uncompressed_on_three_tensor_parallel_ranks_it_is_lightnings_own(three: Found) -> None:
    check_native(three)


@pytest.mark.nightly
@pytest.mark.parametrize("way", LOSSY)
def test_copies_on_three_ranks_stay_equal(three: Found, way: str) -> None:
    check_copies(three, way, 3)


# ------------------------------------------------------------------------------- resuming


def train(
    rank: int,
    epochs: int,
    save: str = "",
    resume: str | None = None,
    mesh: tuple[int, int] = (2, 2),
    way: Any = hsdp,
) -> dict[str, Any]:
    resumed = Resumed(save)
    compressor: Any = PerParameter(QSGD(4))
    given: Any = {"memory": NarrowResidual("int8")}
    if way is hsdp:
        compressor, given = TOPK, {"replicas": mesh[0]}
    strategy = way(compressor, **given, tensor_parallel_size=mesh[1])
    settings: Any = {"resume": resume, "max_epochs": epochs, "callbacks": [resumed]}
    found = fit_parallel(rank, strategy, FEW, mesh[1], **settings)
    return found | {"at start": resumed.memory, "began": resumed.step, "parts": resumed.parts}


def resumes(rank: int, folder: str) -> dict[str, Any]:
    found = {}
    for way in (hsdp, fsdp):
        half = str(Path(folder, f"{way.__name__}.ckpt"))
        run = partial(train, rank, way=way)
        found[way.__name__] = {
            "whole": run(2),
            "first": run(1, save=half),
            "second": run(2, resume=half),
            "(4, 1)": run(2, resume=half, mesh=(4, 1)),
            "(1, 4)": run(2, resume=half, mesh=(1, 4)),
        }
    return found


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = str(tmp_path_factory.mktemp("tensor_parallel"))
    results: Found = run_in_processes(resumes, RANKS, folder, timeout=230)
    return results


@pytest.mark.parametrize("way", ["hsdp", "fsdp"])
def test_on_the_same_mesh_it_resumes_bit_for_bit(resumed: Found, way: str) -> None:
    for rank in resumed:
        whole, second = rank[way]["whole"], rank[way]["second"]
        assert second["began"] == FEW
        assert second["losses"] == whole["losses"][FEW:]
        for kind in ("whole", "memory"):
            for name, array in whole[kind].items():
                np.testing.assert_array_equal(second[kind][name], array, err_msg=name)


def mean_errors(found: Found, memory: str) -> dict[str, Any]:
    """Return the mean over replicas of whole errors, which each rank has a part of."""
    sums: dict[str, Any] = {}
    counts: dict[str, Any] = {}
    for rank in found:
        for entry, kept in rank[memory].items():
            shape, offsets, sizes = rank["parts"][entry.partition(" ")[0]]
            place = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            sums.setdefault(entry, np.zeros(shape))[place] += kept.reshape(sizes)
            counts.setdefault(entry, np.zeros(shape))[place] += 1
    return {entry: total / counts[entry] for entry, total in sums.items()}


@pytest.mark.parametrize("mesh", ["(4, 1)", "(1, 4)"])
@pytest.mark.parametrize("way", ["hsdp", "fsdp"])
def test_on_another_mesh_the_mean_error_is_kept(resumed: Found, way: str, mesh: str) -> None:
    before = mean_errors([rank[way]["first"] for rank in resumed], "memory")
    after = mean_errors([rank[way][mesh] for rank in resumed], "at start")
    assert before.keys() == after.keys()
    assert any(np.any(error) for error in before.values())
    for name, error in before.items():
        assert resumed[0][way][mesh]["began"] == FEW
        # Int8 rounds a mean again, by at most 2/127 of the largest of a block.
        gap = 1e-7 if way == "hsdp" else 2 / 127 * np.abs(error).max()
        np.testing.assert_allclose(after[name], error, rtol=0, atol=gap, err_msg=name)


# --------------------------------------------------------------------- without Lightning


class Loop:
    """A training loop of a user's own, on three dimensions, or on two without replicas."""

    def __init__(self, rank: int, compressor: Any, *shape: int, **options: Any) -> None:
        names = ("replicate", "shard", "tensor")[-len(shape) :]
        mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=names)
        self.net = Net()
        self.net.cut(mesh["tensor"])
        self.net.shard(mesh[names[:-1]])
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.handle: Any = None
        if compressor is not None:
            options = {"optimizers": self.optimizer} | options
            self.handle = attach(self.net, compressor, **options)  # type: ignore[arg-type]
        self.data = batches_of(rank // shape[-1], FEW)

    def run(self) -> dict[str, Any]:
        for batch in self.data:
            self.optimizer.zero_grad()
            self.net.loss(batch).backward()
            self.optimizer.step()
        return {n: p.full_tensor().detach().numpy() for n, p in self.net.named_parameters()}  # type: ignore[attr-defined]


def attached(rank: int) -> dict[str, Any]:
    found = {
        "hsdp by torch": Loop(rank, None, 2, 1, 2).run(),
        "hsdp": Loop(rank, Identity(), 2, 1, 2).run(),
        "fsdp by torch": Loop(rank, None, 2, 2).run(),
        "fsdp": Loop(rank, Identity(), 2, 2).run(),
        "of one rank by torch": Loop(rank, None, 2, 2, 1).run(),
        "of one rank": Loop(rank, Identity(), 2, 2, 1).run(),
    }
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    workers = Loop(rank, QSGD(4), 2, 2, hops=2).handle._workers
    found["hops"] = {"scheme": repr(workers.configuration.scheme)}
    apart = Loop(rank, None, 2, 2)
    with torch.no_grad():
        for param in apart.net.parameters():
            param.add_(rank % 2)
    attach(apart.net, QSGD(4))  # type: ignore[arg-type]
    found["begun"] = {n: p.full_tensor().detach().numpy() for n, p in apart.net.named_parameters()}  # type: ignore[attr-defined]
    loop = Loop(rank, TOPK, 2, 1, 2)
    found["topk"] = loop.run()
    state = loop.handle.state_dict()
    found["memory"] = {n: k["error"].numpy() for n, k in state["engine"]["memory"].items()}
    again = Loop(rank, TOPK, 2, 1, 2)
    again.handle.load_state_dict(state)
    kept = again.handle.state_dict()["engine"]["memory"]
    found["restored"] = {n: k["error"].numpy() for n, k in kept.items()}
    return found


@pytest.fixture(scope="module")
def loops() -> Found:
    results: Found = run_in_processes(attached, RANKS, timeout=200)
    return results


@pytest.mark.parametrize("way", [*EXACT, "of one rank"])
def test_attached_uncompressed_it_is_torchs_own(loops: Found, way: str) -> None:
    for rank in loops:
        for name, param in rank[f"{way} by torch"].items():
            np.testing.assert_array_equal(rank[way][name], param, err_msg=name)


def test_attached_copies_stay_equal_and_errors_are_restored(loops: Found) -> None:
    for rank, loop in enumerate(loops):
        for name, error in loop["memory"].items():
            np.testing.assert_array_equal(loop["restored"][name], error)
            if name.endswith(COPIED):
                np.testing.assert_array_equal(loops[rank ^ 1]["memory"][name], error)


def test_attached_ranks_begin_with_equal_copies_and_a_node_has_fewer_shards(loops: Found) -> None:
    for rank, loop in enumerate(loops):
        assert loop["hops"] == {"scheme": "ReduceScatter(workers_per_node=2)"}
        for name, begun in loop["begun"].items():
            if name.endswith(COPIED):
                np.testing.assert_array_equal(loops[rank ^ 1]["begun"][name], begun)


# ------------------------------------------------------------------------------- refusals


class Uneven(Parallel):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net(inner=35)


class Otherwise(Parallel):
    """Cuts the head over ranks that are not the strategy's tensor-parallel ones."""

    def configure_model(self) -> None:
        ranks = self.device_mesh["data_parallel"].size()  # type: ignore[index]
        names = ("expert", "data", "others")
        mesh = init_device_mesh(DEVICE, (2, ranks, 2 // ranks), mesh_dim_names=names)
        parallelize_module(self.net.head, mesh["expert"], ColwiseParallel())
        fully_shard(self.net, mesh=mesh["data"])


def refused(rank: int) -> dict[str, str]:
    run = partial(said, fit_parallel, rank)
    return {
        "uneven": run(hsdp(TOPK, 2, tensor_parallel_size=2), FEW, module=Uneven),
        "unannounced": run(hsdp(TOPK, 2), FEW, module=Otherwise),
        "elsewhere": run(hsdp(TOPK, 2, tensor_parallel_size=2), FEW, module=Otherwise),
        "indivisible": run(fsdp(QSGD(4), tensor_parallel_size=3), FEW),
    }


def test_other_meshes_are_refused_on_all_ranks() -> None:
    for rank in run_in_processes(refused, RANKS, timeout=200):
        assert "2 tensor-parallel ranks cannot share equally; make it a multiple" in rank["uneven"]
        assert "mesh of tensor-parallel ranks; give tensor_parallel_size=2" in rank["unannounced"]
        assert "and here it is [0, 1]. Meshes of experts" in rank["elsewhere"]
        assert "4 ranks are not a multiple of it; use one of 1, 2, 4" in rank["indivisible"]


@pytest.mark.parametrize("strategy", [hsdp, fsdp])
def test_a_method_that_looks_at_the_whole_model_is_refused(strategy: Any) -> None:
    with pytest.raises(ValueError, match="their copies of norms would differ; use TopK"):
        strategy(ModelTopK(0.01), memory="none", tensor_parallel_size=2)
    with pytest.raises(ValueError, match="at least 1"):
        strategy(QSGD(8), tensor_parallel_size=0)
