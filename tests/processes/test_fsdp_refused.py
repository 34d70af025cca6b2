"""Models whose reduce-scatters cannot be compressed, and ranks that differ, are refused by all.

A rank that is lost ends the others in time; and what is read of torch's private names is what they
mean.
"""

import os
import time
import warnings
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_gc import QSGD, Int8
from lightning_gc.sharded.fsdp_units import in_backward, units_of
from tests.support.fsdp import fsdp
from tests.support.hsdp import OtherwiseSharded, Sharded, fit_sharded
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes


class ReduceScatter:
    """Somebody else's."""

    def allocate(self, *size: Any, **options: Any) -> Tensor:
        return torch.empty(*size, **options)


class Otherwise(OtherwiseSharded):
    def alone(self) -> None:
        groups = [dist.new_group([rank]) for rank in range(2)]
        mesh = DeviceMesh.from_group(groups[self.global_rank], "cpu")
        fully_shard(self, mesh=mesh)

    def replicated(self) -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(self, mesh=mesh)

    def scattered(self) -> None:
        self.as_documented()
        self.head.set_custom_reduce_scatter(ReduceScatter())  # type: ignore[operator]

    def gathered(self) -> None:
        self.as_documented()
        self.head.set_custom_all_gather(ReduceScatter())  # type: ignore[operator]

    def of_two_dtypes(self) -> None:
        half = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16), requires_grad=False)
        self.head.register_parameter("narrow", half)
        self.as_documented()

    def divided(self) -> None:
        self.as_documented()
        self.head.set_gradient_divide_factor(3.0)  # type: ignore[operator]

    def in_two_units_here(self) -> None:
        for layer in (self.head, self):
            fully_shard(layer, mesh=self.mesh)


CASES: dict[str, tuple[str, str]] = {
    "unsharded": ("unsharded", "has a model without FSDP2"),
    "alone": ("alone", "but the strategy shards over [0, 1]"),
    "replicated": ("replicated", "on a mesh of two dimensions"),
    "partly": (
        "only_the_head",
        "trains gain, body.0.weight, body.0.bias, body.1.weight and others",
    ),
    "float16": ("in_float16", "use MixedPrecisionPolicy(reduce_dtype=torch.float32)"),
    "scattered": ("scattered", "has head with its own reduce-scatter"),
    "divided": ("divided", "has head with set_gradient_divide_factor"),
}


GATHERS: dict[str, tuple[str, str]] = {
    "gathered": ("gathered", "has head with its own all-gather"),
    "of two dtypes": ("of_two_dtypes", "has head with parameters of several dtypes"),
}


class Changed(Sharded):
    """Changes something after its second step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.change()

    def change(self) -> None:
        self.frozen.requires_grad_(True)


class Divided(Changed):
    def change(self) -> None:
        self.head.set_gradient_divide_factor(3.0)  # type: ignore[operator]
        self.head.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]


def error_of(rank: int, strategy: Any, module: Any, kind: type[Exception] = ValueError) -> str:
    try:
        fit_sharded(rank, strategy, module=module, ranks=2)
    except kind as error:
        return str(error)
    return ""


def refused(rank: int) -> dict[str, str]:
    said = {}
    for name, (how, _) in CASES.items():
        said[name] = error_of(rank, fsdp(QSGD(8)), partial(Otherwise, how))
    for name, (how, _) in GATHERS.items():
        said[name] = error_of(rank, fsdp(weights=Int8(256)), partial(Otherwise, how))
    said["weights"] = error_of(rank, fsdp(weights=Int8(256 + rank)), Sharded)
    said["on one"] = error_of(rank, fsdp(QSGD(8)), partial(Otherwise, "unsharded", on=1))
    said["units"] = error_of(rank, fsdp(QSGD(8)), partial(Otherwise, "in_two_units_here", on=1))
    said["bits"] = error_of(rank, fsdp(QSGD(8 - rank)), Sharded)
    said["seed"] = error_of(rank, fsdp(QSGD(8), seed=rank), Sharded)
    said["unfrozen"] = error_of(rank, fsdp(QSGD(8)), Changed, RuntimeError)
    said["divided since"] = error_of(rank, fsdp(QSGD(8)), Divided, RuntimeError)
    fit_sharded(rank, fsdp(QSGD(8)), ranks=2)  # and nothing of it is left
    return said


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    results: list[dict[str, str]] = run_in_processes(refused, 2, timeout=200)
    return results


@pytest.mark.parametrize("name", CASES | GATHERS)
def test_other_shards_are_refused(said: list[dict[str, str]], name: str) -> None:
    for rank in said:
        assert (CASES | GATHERS)[name][1] in rank[name]
        assert name == "alone" or rank[name] == said[0][name]


def test_all_ranks_refuse_what_one_has(said: list[dict[str, str]]) -> None:
    for rank in said:
        assert rank["on one"].startswith("Worker 1 of 2 has a model without FSDP2")
        assert rank["units"].startswith("Worker 1 has units=")
        assert "Worker 1 has compressor=" in rank["bits"]
        assert "Worker 1 has seed=1" in rank["seed"]
        assert "Worker 1 has weights=" in rank["weights"]
        assert "unfrozen, added or replaced" in rank["unfrozen"]
        assert "head has set_gradient_divide_factor" in rank["divided since"]


def alone(rank: int) -> tuple[list[str], int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fit_sharded(rank, fsdp(QSGD(8)), ranks=1)
    return [str(each.message) for each in caught], found["steps"]


def test_one_rank_trains_with_a_warning() -> None:
    ((said, steps),) = run_in_processes(alone, 1)
    assert steps == 4
    assert any("one rank, so that nothing is exchanged" in each for each in said)


class Dies(Sharded):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == 2:
            os._exit(1)
        return super().training_step(batch, batch_idx)


class DiesWithin(Sharded):
    """In the backward pass, after some of its exchanges."""

    def forward(self, batch: Tensor) -> Tensor:
        hidden = torch.tanh(self.body[0](batch))
        if self.global_rank == 1 and len(self.losses) == 2:
            hidden.register_hook(lambda grad: os._exit(1))
        for layer in self.body[1:]:
            hidden = torch.tanh(layer(hidden))
        output: Tensor = self.head(hidden + 0.1 * self.frozen(hidden)) * self.gain
        return output


def train(rank: int, module: type[pl.LightningModule]) -> tuple[str, str]:
    strategy = fsdp(QSGD(8), weights=Int8(256), timeout=timedelta(seconds=15))
    try:
        fit_sharded(rank, strategy, 6, module, ranks=2)
    except (RuntimeError, ValueError) as error:
        return type(error).__name__, " ".join([str(error), *getattr(error, "__notes__", [])])
    raise AssertionError("the fit ended as if nothing had happened")


class Hangs(Dies):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == 2:
            time.sleep(60)
        return super().training_step(batch, 0)


class Raises(Dies):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == 2:
            raise ValueError("out of memory")
        return super().training_step(batch, 0)


@pytest.mark.parametrize(
    "module",
    [Dies, DiesWithin, *(pytest.param(m, marks=pytest.mark.nightly) for m in (Hangs, Raises))],
)
def test_the_other_ends_with_an_error_that_names_it(module: type[Sharded]) -> None:
    last = 2 if module is Raises else 1
    (kind, message), *others = run_in_processes(train, 2, module, timeout=80, wait_for=last)
    assert kind == "PeerError"
    assert "with workers 1" in message or "with worker 1" in message
    purpose = "an all-gather of weights" in message
    assert purpose or "a reduce-scatter of gradients" in message
    assert purpose or module is not Dies, "it died before its forward pass"
    assert others == ([("ValueError", "out of memory")] if module is Raises else [])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)
        self.gain = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(7, 2), requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.inner(rows) * self.gain
        return output


def read_units(rank: int) -> list[tuple[str, int, str]]:
    """Check what is read of units on two ranks; return what is asked of a reduce-scatter."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    net, mesh = Net(), init_device_mesh("cpu", (2,))
    fully_shard(net.inner, mesh=mesh)
    fully_shard(net, mesh=mesh)
    root, inner = units_of(net)
    weight, bias = inner.columns()
    assert weight[1:] == ((3, 3), 0, 9)
    assert bias[1:] == ((3,), 9, 12)
    assert [column[1:] for column in root.columns()] == [((1,), 0, 1)]
    assert (inner.padded_numel(), root.padded_numel()) == (12, 1)
    every = [column[1:] for column in root.columns(frozen=True)]
    assert every == [((1,), 0, 1), ((4, 2), 1, 9)]
    assert not any(unit.scattered or unit.shares_its_module for unit in (root, inner))
    assert not any(unit.gathered or unit.gathers_itself for unit in (root, inner))
    assert root.gathered_dtypes == {torch.float32}
    assert root.device == torch.device("cpu")
    asked: list[tuple[str, int, str]] = []

    class Spy(ReduceScatter):
        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **given: Any) -> None:
            assert dist.get_process_group_ranks(given["group"]) == [0, 1]
            asked.append(("own", output_tensor.numel(), str(given["op"])))
            assert input_tensor.numel() == 2 * output_tensor.numel()
            output_tensor.fill_(rank + 1)

    class Gather(ReduceScatter):
        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **given: Any) -> None:
            assert (output_tensor.numel(), input_tensor.numel()) == (2 * 12, 12)
            assert output_tensor.view(2, 12)[rank].data_ptr() == input_tensor.data_ptr()
            gathers.append(in_backward())
            output_tensor.zero_()

    gathers: list[bool] = []
    inner.gather_by(Gather())
    inner.scatter_by(Spy())
    replaced = [inner.scattered, inner.gathered]
    net(torch.ones(4, 3)).sum().backward()
    assert net.inner.weight.grad is not None
    assert net.inner.weight.grad.to_local().unique().tolist() == [rank + 1]  # type: ignore[attr-defined]
    assert gathers == [False, True]
    inner.gather_itself()
    replaced.append(inner.gathered)
    inner.scatter_itself()
    assert [*replaced, inner.scattered] == [True, True, False, False]
    net(torch.ones(4, 3)).sum().backward()
    return asked


def test_private_names_mean_what_they_are_read_for() -> None:
    assert run_in_processes(read_units, 2) == [[("own", 12, "RedOpType.AVG")]] * 2
