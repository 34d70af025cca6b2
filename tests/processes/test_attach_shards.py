"""``attach`` of a model in shards: equal to the strategy, to torch's own HSDP, and resumed."""

import io
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_gc import (
    QSGD,
    ErrorFeedback,
    Identity,
    Int8,
    PerParameter,
    StepAhead,
    TopK,
    Uniform,
    attach,
)
from lightning_gc.controllers import Accordion, Fixed, LayerBudget
from lightning_gc.core.saved_state import CHECKSUM, with_checksum
from tests.support.accelerator import BACKEND, DEVICE, needs_four
from tests.support.hsdp import RANKS, Sharded, batches_of, fit_sharded, hsdp, whole
from tests.support.hsdp_laws import MINUTE
from tests.support.processes import run_in_processes

pytestmark = [pytest.mark.processes, needs_four]
STEPS = 6
CAP_MB = 0.002  # several buckets


def mesh_of(*shape: int) -> Any:
    return init_device_mesh(DEVICE, shape, mesh_dim_names=("replicate", "shard")[: len(shape)])


class Loop:
    """A training loop of a user's own, on a mesh of replicas and shards.

    Without a compressor it is torch's own HSDP.
    """

    def __init__(self, rank: int, compressor: Any = None, mesh: Any = None, **options: Any) -> None:
        self.net = Sharded()
        for layer in (*self.net.body, self.net.frozen, self.net.head, self.net):
            fully_shard(layer, mesh=mesh or mesh_of(2, 2))
        trained = [param for param in self.net.parameters() if param.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
        self.handle: Any = None
        if compressor is not None:
            options = {"optimizers": self.optimizer, "bucket_cap_mb": CAP_MB} | options
            self.handle = attach(self.net, compressor, **options)  # type: ignore[arg-type]
        self.data = batches_of(rank, 2 * STEPS)

    def run(self, start: int, stop: int, accumulated: int = 1) -> None:
        for step in range(start, stop):
            self.optimizer.zero_grad()
            for part in range(accumulated):
                last = part == accumulated - 1
                self.net.set_requires_gradient_sync(last)  # type: ignore[operator]
                batch = self.data[step * accumulated + part]
                (self.loss(batch) / accumulated).backward()
            self.optimizer.step()

    def loss(self, batch: Tensor) -> Tensor:
        return (self.net(batch) - batch[:, :3] * 2).square().mean()

    def left(self) -> dict[str, Any]:
        """Return whole parameters and, of a handle, this rank's errors, as arrays."""
        found = {n: whole(p).numpy().copy() for n, p in self.net.named_parameters()}
        if self.handle is not None:
            memory = self.handle.state_dict()["engine"]["memory"]
            found |= {f"{n} error": kept["error"].numpy().copy() for n, kept in memory.items()}
        return found


def equal(one: dict[str, Any], other: dict[str, Any], gap: float = 0.0) -> bool:
    return one.keys() == other.keys() and all(
        np.allclose(one[n], other[n], rtol=0, atol=gap) for n in one
    )


def everything(rank: int) -> dict[str, Any]:
    """In one set of processes, for starting them takes long."""
    found: dict[str, Any] = {}
    compressor = PerParameter(TopK(0.1))
    dist.init_process_group(BACKEND)
    ours = Loop(rank, compressor)
    ours.run(0, 3)
    file = io.BytesIO()
    saved = {"net": ours.net.state_dict(), "optimizer": ours.optimizer.state_dict()}
    torch.save(saved | {"compression": ours.handle.state_dict()}, file)
    ours.run(3, STEPS)
    found["attached"] = ours.left()
    found["bytes"] = ours.handle.account().wire_bytes
    ours.handle.close()
    ours.run(STEPS, STEPS + 2)  # torch averages over replicas again
    found["after close"] = {n: whole(p).numpy() for n, p in ours.net.named_parameters()}

    file.seek(0)
    state = torch.load(file, weights_only=True)
    again = Loop(rank, compressor)
    again.net.load_state_dict(state["net"])
    again.optimizer.load_state_dict(state["optimizer"])
    again.handle.load_state_dict(state["compression"])
    again.run(3, STEPS)
    found["resumed"] = again.left()
    other = {n: part for n, part in state["compression"].items() if n != CHECKSUM}
    other["shard"] = 1 - other["shard"]
    found["other shard"] = sentence(again.handle.load_state_dict, with_checksum(other))
    again.handle.load_state_dict(again.handle.state_dict("mean"))
    found["mean"] = again.left()
    again.handle.close()

    for name, accumulated in (("dense", 1), ("accumulated", 2)):
        for key, method in ((name, Identity()), (f"{name} by torch", None)):
            loop = Loop(rank, method)
            loop.run(0, STEPS, accumulated)
            found[key] = {n: whole(p).numpy() for n, p in loop.net.named_parameters()}
            if loop.handle is not None:
                loop.handle.close()

    watched = Loop(rank, compressor, controller=Accordion(0.2, 0.1, interval=1))
    levels = []
    for epoch in range(3):
        watched.handle.begin_epoch(epoch, max_epochs=3)
        watched.run(epoch, epoch + 1)
        levels.append(watched.handle.levels)
    found["levels"] = levels
    watched.handle.close()
    found["refused"] = refused(rank, compressor)
    fitted = fit_sharded(rank, hsdp(compressor, bucket_cap_mb=CAP_MB), steps=STEPS)
    found["strategy"] = fitted["whole"] | fitted["memory"]
    return found


def refused(rank: int, compressor: Any) -> dict[str, str]:
    def with_units(*meshes: Any) -> Any:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer, mesh in zip((*net, net), meshes, strict=True):
            fully_shard(layer, mesh=mesh)
        return net

    def with_outside(mesh: Any) -> Any:
        head = nn.Sequential(nn.Linear(4, 4))
        fully_shard(head, mesh=mesh)
        head.insert(0, nn.Linear(4, 4))
        return head

    both, flat = mesh_of(2, 2), mesh_of(RANKS)
    turned = mesh_of(1, RANKS)
    net = with_units(both, both, both)
    cases: dict[str, Any] = {
        "no bits to compare": lambda: attach(with_units(flat, flat, flat), QSGD(4), verify=1),
        "no replicas": lambda: attach(with_units(flat, flat, flat), compressor),
        "a timeout": lambda: attach(with_units(flat, flat, flat), QSGD(4), timeout=MINUTE),
        "weights of replicas": lambda: attach(net, compressor, weights=Int8()),
        "levels of replicas": lambda: attach(net, compressor, weights_controller=Fixed(8)),
        "no learning rates": lambda: attach(
            with_units(flat, flat, flat),
            QSGD(4),
            weights=Uniform(8),
            weights_controller=Fixed(8),
        ),
        "two meshes": lambda: attach(with_units(both, turned, both), compressor),
        "trained outside": lambda: attach(with_outside(both), compressor),
        "a loss scaler": lambda: attach(net, compressor, scaler=torch.amp.GradScaler("cpu")),
        "full gradients": lambda: attach(
            net,
            compressor,
            controller=LayerBudget(reference=0.1, levels=(0.05, 0.1)),
            optimizers=torch.optim.SGD(net.parameters()),
        ),
        "no megabytes": lambda: attach(net, compressor, bucket_cap_mb=0),
        "lookahead": lambda: attach(net, compressor, StepAhead()),
        "unlike ranks": lambda: attach(net, PerParameter(TopK(0.1 + 0.1 * (rank == 3)))),
    }
    found = {name: sentence(act) for name, act in cases.items()}
    attach(net, compressor, ErrorFeedback()).close()  # what was refused has left nothing behind
    return found


def sentence(act: Any, *args: Any) -> str:
    try:
        act(*args)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run_in_processes(everything, RANKS, timeout=200)
    return results


def test_it_equals_the_strategy(found: Any) -> None:
    """The same weights and errors, bit for bit."""
    for rank in found:
        assert equal(rank["attached"], rank["strategy"])
        assert any(
            np.abs(v).max() > 0 for n, v in rank["attached"].items() if "error" in n and v.size
        )


def test_it_sends_a_tenth(found: Any) -> None:
    elements = sum(v.size for n, v in found[0]["attached"].items() if n.endswith("error"))
    for rank in found:
        assert 0 < rank["bytes"] < STEPS * 4 * elements / 2


def test_it_resumes_bit_for_bit(found: Any) -> None:
    for rank in found:
        assert equal(rank["resumed"], rank["attached"])
        assert "has a state with shard=" in rank["other shard"]


def test_the_mean_over_replicas_is_of_each_shard(found: Any) -> None:
    for rank, own in enumerate(found):
        both = [found[(rank + r) % RANKS]["resumed"] for r in (0, RANKS // 2)]
        mean = {n: np.mean([each[n] for each in both], axis=0) for n in both[0]}
        assert equal(own["mean"], mean, gap=1e-7)


@pytest.mark.parametrize("how", ["dense", "accumulated"])
def test_uncompressed_it_is_torchs_hsdp(found: Any, how: str) -> None:
    for rank in found:
        assert equal(rank[how], rank[f"{how} by torch"], gap=1e-6)


def test_after_close_torch_averages_over_replicas(found: Any) -> None:
    for rank in found[1:]:
        assert equal(rank["after close"], found[0]["after close"])


def test_a_controller_decides_the_same_on_all_ranks(found: Any) -> None:
    levels = [rank["levels"] for rank in found]
    assert levels[0][0]
    assert all(each == levels[0] for each in levels)


REFUSED = {
    "no replicas": "4 bytes for each parameter of the model",
    "no bits to compare": "so no two ranks can compare",
    "a timeout": "init_process_group(timeout=...)",
    "weights of replicas": "was called on without replicas",
    "levels of replicas": "was called on without replicas",
    "no learning rates": "weights_controller=Fixed(8)): a controller sees the learning rates",
    "two meshes": "give fully_shard one mesh for all",
    "trained outside": "trains 0.weight, 0.bias outside of all",
    "a loss scaler": "need no loss scaling",
    "full gradients": "LayerBudget compresses full gradients",
    "no megabytes": "more than 0, such as 25",
    "lookahead": "moves the weights around each forward pass",
    "unlike ranks": "compressor",
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_on_all_ranks(found: Any, case: str) -> None:
    for rank in found:
        assert REFUSED[case] in rank["refused"][case]


class Extra(nn.Module):
    """Has a layer that is not used, and a frozen table outside of FSDP2."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)
        self.table = nn.Parameter(torch.full((3,), float(rank)), requires_grad=False)
        fully_shard(self, mesh=mesh_of(2, 1), ignored_params={self.table})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def besides(rank: int) -> dict[str, Any]:
    dist.init_process_group(BACKEND)
    found: dict[str, Any] = {}
    net: Any = Extra(rank)
    handle = attach(net, TopK(0.1))
    found["table"] = net.table.tolist()
    net(torch.ones(2, 8)).sum().backward()
    handle.close()
    again = attach(net, TopK(0.1))
    handle.close()  # which takes nothing off the new one
    net(torch.ones(2, 8)).sum().backward()
    found["steps"] = again.state_dict()["engine"]["step"]
    again.close()
    net.zero_grad()
    net(torch.ones(2, 8)).sum().backward()
    found["unused"] = net.unused.weight.grad is None
    handle = attach(net, TopK(0.1))
    net.set_requires_all_reduce(False)
    with pytest.raises(RuntimeError, match=r"use set_requires_gradient_sync\(False\)"):
        net(torch.ones(2, 8)).sum().backward()
    return found


def test_what_a_model_has_besides_is_left_as_it_was() -> None:
    """A frozen parameter outside of FSDP2 starts equal; unused ones get no gradient afterwards."""
    for found in run_in_processes(besides, 2):
        assert found == {"table": [0.0] * 3, "steps": 1, "unused": True}
