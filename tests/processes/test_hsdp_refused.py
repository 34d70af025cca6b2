"""Models that are sharded otherwise, and ranks that differ, are refused on all ranks alike.

And what is read of torch's private names is what they mean.
"""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from lightning_gc import Identity, TopK
from lightning_gc.sharded import fsdp_units
from lightning_gc.sharded.fsdp_units import Unit, gradient_of, units_of
from tests.support.hsdp import RANKS, OtherwiseSharded, Sharded, fit_sharded, hsdp
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes


class Otherwise(OtherwiseSharded):
    def over_all_ranks(self) -> None:
        for layer in (*self.body, self.head, self):
            fully_shard(layer)

    def replicated(self) -> None:
        fully_shard(self, mesh=self.device_mesh["replicate", "data_parallel"])  # type: ignore[index]

    def offloaded(self) -> None:
        policy = CPUOffloadPolicy(pin_memory=False)
        fully_shard(self, mesh=self.mesh, offload_policy=policy)

    def hooked(self) -> None:
        self.as_documented()
        self.head.set_all_reduce_hook(print)  # type: ignore[operator]

    def divided(self) -> None:
        self.as_documented()
        self.head.set_gradient_divide_factor(3.0)  # type: ignore[operator]

    def stepped_within(self) -> None:
        self.as_documented()
        self.head.bias.register_post_accumulate_grad_hook(print)


CASES: dict[str, tuple[Any, str]] = {
    "unsharded": ("unsharded", "has a model without FSDP2"),
    "over all ranks": ("over_all_ranks", "sharded over the ranks [0, 1, 2, 3], but its node has"),
    "replicated": ("replicated", "on a mesh of two dimensions"),
    "partly": (
        "only_the_head",
        "trains gain, body.0.weight, body.0.bias, body.1.weight and others",
    ),
    "float16": ("in_float16", "use MixedPrecisionPolicy(reduce_dtype=torch.float32)"),
    "offloaded": ("offloaded", "has the whole model with a CPUOffloadPolicy"),
    "hooked": ("hooked", "has head with set_all_reduce_hook"),
    "divided": ("divided", "has head with set_gradient_divide_factor"),
    "stepped within": ("stepped_within", "has head with register_post_accumulate_grad_hook"),
}


def refused(rank: int) -> dict[str, str]:
    said = {}
    for name, (how, _) in CASES.items():
        said[name] = error_of(rank, hsdp(Identity()), partial(Otherwise, how))
    said["on one"] = error_of(rank, hsdp(Identity()), partial(Otherwise, "unsharded", on=2))
    other = TopK(0.2 if rank == 3 else 0.1)
    said["unlike"] = error_of(rank, hsdp(other), Sharded)
    said["three"] = error_of(rank, hsdp(Identity(), replicas=3), Sharded)
    said["unfrozen"] = error_of(rank, hsdp(Identity()), Unfrozen, RuntimeError)
    fit_sharded(rank, hsdp(Identity()))  # and nothing of it is left
    return said


class Unfrozen(Sharded):
    """Trains what was frozen when the fit began, from its third step on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.frozen.requires_grad_(True)


def error_of(rank: int, strategy: Any, module: Any, kind: type[Exception] = ValueError) -> str:
    try:
        fit_sharded(rank, strategy, module=module)
    except kind as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    results: list[dict[str, str]] = run_in_processes(refused, RANKS, timeout=200)
    return results


@pytest.mark.parametrize("name", CASES)
def test_other_shards_are_refused(said: list[dict[str, str]], name: str) -> None:
    for rank in said:
        assert CASES[name][1] in rank[name]
        assert rank[name] == said[0][name]


def test_all_ranks_refuse_what_one_has(said: list[dict[str, str]]) -> None:
    assert {rank["on one"].partition(";")[0] for rank in said} == {
        "Worker 2 of 4 has a model without FSDP2"
    }
    for rank in said:
        assert "Worker 3 has compressor=" in rank["unlike"]
        assert "3 replicas; use one of 1, 2, 4" in rank["three"]
        assert "unfrozen, added or replaced" in rank["unfrozen"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)
        self.bias = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(7, 2), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(rows) + self.bias
        return output


def read_units(rank: int) -> list[str]:
    """Check what is read of units on two ranks; return their names."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    net, mesh = Net(), init_device_mesh("cpu", (2,))
    fully_shard(net.inner, mesh=mesh)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    units = units_of(net)
    root, inner = units
    for unit in units:
        assert unit.ranks == [0, 1]
        assert [unit.replicates, unit.offloads, unit.hooked, unit.divides_itself] == [False] * 4
    assert (root.dtype, inner.dtype) == (torch.bfloat16, torch.float32)
    assert [set(unit.params) for unit in units] == [
        {net.bias, net.frozen},
        {net.inner.weight, net.inner.bias},
    ]
    rows = (3, 2)[rank]
    (weight, bias), (gain,) = inner.pieces(), root.pieces()
    assert weight[1:] == ((rows, 3), 0, 3 * rows)
    assert bias[1:] == ((rows,), 9, rows)
    assert gain[1:] == ((1 - rank,), 0, 1 - rank)
    heard: list[tuple[str, int]] = []
    grads = {}

    def hook(unit: Unit, reduced: torch.Tensor) -> None:
        if not heard:
            fsdp_units.after_backward(lambda: heard.append(("end", 0)))
        heard.append((unit.name, reduced.numel()))
        assert reduced.numel() == unit.padded_numel()
        for piece in unit.pieces():
            grads[piece.param] = reduced[piece.start : piece.start + piece.numel].clone()

    for unit in units:
        unit.listen(partial(hook, unit))
        assert unit.hooked
    net(torch.ones(4, 3)).square().mean().backward()
    *reductions, last = heard
    assert sorted(reductions) == [("inner", 12), ("the whole model", 1)]
    assert last == ("end", 0)
    for param, grad in grads.items():
        assert torch.equal(gradient_of(param).reshape(-1), grad.float())
    assert next(iter(root.stands_in())).shape == (1,)
    assert math.prod(gradient_of(net.frozen).shape) == (8, 6)[rank]
    for unit in units:
        unit.forget()
        assert not unit.hooked
    return [unit.name for unit in units]


def test_private_names_mean_what_they_are_read_for() -> None:
    assert run_in_processes(read_units, 2) == [["the whole model", "inner"]] * 2
