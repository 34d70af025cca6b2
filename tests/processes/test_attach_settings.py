"""What ``attach`` is given: no optimizers, other wrappers, static graphs; what ends peers."""

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import QSGD, PowerSGD, TopK, attach
from lightning_gc.exchange.workers import local_part
from tests.support.fitting import ddp, fit, unwarned
from tests.support.models import Plain, common_batches
from tests.support.processes import run_in_processes, said

pytestmark = pytest.mark.processes


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def other_modules(worker: int) -> dict[str, str]:
    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(net())
    none = attach(DistributedDataParallel(net()), TopK(0.1), optimizers=None)
    none.close()
    found = {
        "held": said(attach, nn.Sequential(wrapped), TopK(0.1)),
        "replicated": said(attach, replicate(net()), TopK(0.1)),
        "plain": said(attach, net(), TopK(0.1)),
        "other": said(attach, nn.DataParallel(net()), TopK(0.1)),
    }
    with unwarned():
        older = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
        found["first FSDP"] = said(attach, older, TopK(0.1))
    sparse = DistributedDataParallel(nn.Embedding(8, 8, sparse=True))
    found["sparse"] = said(attach, sparse, TopK(0.1))
    by_shards = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp")
    if hasattr(by_shards, "ReplicateModule"):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("replicate",))
        given = by_shards.replicate(net(), mesh=mesh)
        found["replicated by FSDP2"] = said(attach, given, TopK(0.1))
        around: Any = nn.Sequential(given)
        fully_shard(around)
        found["replicated within shards"] = said(attach, around, TopK(0.1))
    return found


@pytest.mark.filterwarnings("ignore:One worker")
def test_other_modules_are_answered_by_name() -> None:
    """And ``optimizers=None`` is as none."""
    found = run_in_processes(other_modules, 1)[0]
    assert "holds a DistributedDataParallel" in found["held"]
    assert "attach(DistributedDataParallel(model), ...)" in found["plain"]
    assert "sparse=False" in found.pop("sparse")
    for name in ("plain", "other", "first FSDP"):
        assert "give a DistributedDataParallel module, or one that fully_shard" in found[name]
    for name in ("replicated", "replicated by FSDP2", "replicated within shards"):
        assert "torch's replicate(...)" in found.get(name, "torch's replicate(...)"), found[name]
    assert all(sentence.startswith("ValueError: attach(") for sentence in found.values())


def unlike(worker: int) -> str:
    dist.init_process_group("gloo")
    return said(attach, DistributedDataParallel(net()), QSGD(4 + 4 * worker))


def test_workers_that_differ_are_refused_on_all() -> None:
    zero, one = run_in_processes(unlike, 2)
    assert zero == one
    assert zero.startswith("ValueError: Worker 1 has ")


def wrapped_net(shards: bool) -> Any:
    model: Any = net()
    if not shards:
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    return model


def compiled(worker: int) -> dict[str, Any]:
    """As TrainingArguments(torch_compile=True) does: attach comes after torch.compile."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    data = torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(worker))
    for shards in (False, True):
        for order in ("before", "after", "again", "late"):
            module = wrapped_net(shards)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            given: Any = torch.compile(module, backend="eager")
            attached = module if order == "before" else given
            if order == "late":
                given(data[0])
                found[f"late {shards}"] = said(attach, given, QSGD(4))
                continue
            handle = attach(attached, QSGD(4), optimizers=optimizer)
            for step, x in enumerate(data):
                if order == "again" and step == 2:
                    state = handle.state_dict()
                    handle.close()
                    handle = attach(attached, QSGD(4), optimizers=optimizer)
                    handle.load_state_dict(state)
                optimizer.zero_grad()
                given(x).square().mean().backward()
                optimizer.step()
            parts = [local_part(p.detach()) for p in module.parameters()]
            sums = [float(part.double().sum()) for part in parts]
            found[f"{order} {shards}"] = sums, order == "again" or handle.account().wire_bytes
            handle.close()
    return found


def test_attach_takes_a_compiled_module_that_has_not_run() -> None:
    """The same weights and bytes as of a module that is compiled after attach; DDP and FSDP2."""
    for found in run_in_processes(compiled, 2):
        for shards in (False, True):
            assert found[f"before {shards}"] == found[f"after {shards}"]
            assert found[f"before {shards}"][0] == found[f"again {shards}"][0]
            assert found[f"before {shards}"][1] > 0
            assert "the compiled module has run already" in found[f"late {shards}"]


def accumulated(worker: int) -> dict[str, str]:
    """The first pass is under ``no_sync``, or follows a synchronised one."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    x = torch.randn(4, 64)

    def train(attached: bool, first: bool, static: bool = True) -> None:
        module = DistributedDataParallel(net(), static_graph=static)
        handle: Any = attach(module, TopK(0.1)) if attached else None
        try:
            if first:
                module(x).sum().backward()
            for _ in range(2):
                with module.no_sync():
                    module(x).sum().backward()
                module(x).sum().backward()
        finally:
            if handle is not None:
                handle.close()

    return {
        "plain": said(train, attached=False, first=False),
        "refused": said(train, attached=True, first=False),
        "after a pass": said(train, attached=True, first=True),
        "not static": said(train, attached=True, first=False, static=False),
    }


def test_a_static_graph_that_begins_with_accumulation_is_refused_where_torch_fails() -> None:
    for found in run_in_processes(accumulated, 2):
        assert bool(found["plain"]) == bool(found["refused"]), found
        if found["refused"]:
            assert "expect_autograd_hooks_" in found["plain"]
            assert found["refused"].startswith("ValueError: DistributedDataParallel(static_graph=")
            assert "Synchronise the first pass" in found["refused"]
        assert found["after a pass"] == found["not static"] == ""


def accumulated_by_lightning(worker: int) -> dict[str, str]:
    found = {}
    for name, compressor in (("plain", None), ("refused", TopK(0.1))):
        with unwarned():
            strategy = ddp(compressor, static_graph=True)
            settings: dict[str, Any] = {"devices": 2, "accumulate_grad_batches": 2}
            found[name] = said(fit, strategy, Plain, common_batches(16, 4), **settings)
    return found


def test_lightnings_accumulation_with_a_static_graph_is_refused_likewise() -> None:
    for found in run_in_processes(accumulated_by_lightning, 2):
        assert bool(found["plain"]) == bool(found["refused"]), found
        if found["refused"]:
            assert "expect_autograd_hooks_" in found["plain"]
            assert "Synchronise the first pass" in found["refused"]


def failing(worker: int) -> str:
    """Worker 1's own exchange fails in the third step; the module has buffers."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    module = DistributedDataParallel(nn.Sequential(net(), nn.BatchNorm1d(64)))
    handle = attach(module, PowerSGD(1))

    def train() -> None:
        for step in range(6):
            if (worker, step) == (1, 2):
                for kept in handle._workers.first.compressor_state.values():
                    kept.update(q="a text")
            module(torch.randn(8, 64)).square().mean().backward()

    return said(train)


def test_a_failed_exchange_ends_the_next_forward_pass_before_its_collectives() -> None:
    """Else this worker would wait in the broadcast of buffers for peers that wait for it."""
    peer, own = run_in_processes(failing, 2, timeout=30)
    assert own.startswith("AttributeError")
    assert peer.startswith("PeerError: Worker 0: all-gather with worker 1 failed")
    assert "a loss that reaches no parameter" in peer


def left_behind(worker: int) -> list[str]:
    """Worker 1 dies between two steps; worker 0 is the first to broadcast the module's buffers."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    module = DistributedDataParallel(nn.Sequential(net(), nn.BatchNorm1d(64)))
    attach(module, TopK(0.1))
    for step in range(4):
        if (worker, step) == (1, 2):
            os._exit(0)
        try:
            module(torch.randn(8, 64)).square().mean().backward()
        except RuntimeError as error:
            return getattr(error, "__notes__", [str(error)])
    return []


def test_an_error_of_ddps_own_collective_names_the_peers() -> None:
    (notes,) = run_in_processes(left_behind, 2, wait_for=1, timeout=60)
    assert len(notes) == 1
    assert notes[0].startswith("Worker 0: a collective of DDP's with worker 1 failed."), notes
