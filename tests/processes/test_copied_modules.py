"""A module with our hooks is copied and pickled as one without; the copy exchanges nothing."""

import copy
import io
import pickle
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import PowerSGD, TopK, attach
from tests.processes.test_attach import Net, batches
from tests.support.fitting import ddp, digest, fit, unwarned
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes


def through_a_file(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Any] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),  # noqa: S301
    "torch.save": through_a_file,
}


def step(module: Any, worker: int) -> list[Any]:
    """Return the gradients of one backward pass on this worker's data."""
    module.zero_grad()
    x = batches(worker)[0]
    (module(x) - x[:, :4]).square().mean().backward()
    return [param.grad.clone() for param in module.parameters()]


def same(some: list[Any], others: list[Any]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def copied(worker: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    plain = DistributedDataParallel(copy.deepcopy(net))
    dense = step(plain, worker)
    ours = DistributedDataParallel(net)
    handle = attach(ours, PowerSGD(1))
    found: dict[str, Any] = {}
    for name, way in WAYS.items():
        made = way(ours)
        handle.account()
        found[name] = same(step(made, worker), dense)
        found[f"{name} sends nothing by us"] = handle.account().wire_bytes == 0
        own = attach(made, PowerSGD(1))
        found[f"{name} attached"] = not same(step(made, worker), dense)
        found[f"{name} attached sends"] = own.account().wire_bytes > 0
        own.close()
    found["goes on"] = not same(step(ours, worker), dense) and handle.account().wire_bytes > 0
    handle.close()
    for name, way in WAYS.items():
        found[f"{name} after close"] = same(step(way(ours), worker), dense)
    return found


def test_a_copy_is_plain_ddp_until_attached() -> None:
    """By ``deepcopy``, ``pickle`` and ``torch.save``, while the handle is open and afterwards."""
    for found in run_in_processes(copied, 2):
        assert [name for name, held in found.items() if not held] == []


class Teacher(pl.Callback):
    """Copies the wrapped module within the fit, as for a teacher or an average of weights."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *passed: Any) -> None:
        for way in WAYS.values():
            made = way(trainer.model)
            self.seen.append(
                isinstance(made, DistributedDataParallel) and digest(made.module) == digest(module)
            )


def taught(worker: int) -> tuple[str, str, list[bool]]:
    data: Any = torch.utils.data.DataLoader(list(batches(worker)[:4]), batch_size=None)  # type: ignore[arg-type]
    settings: dict[str, Any] = {"devices": 2, "use_distributed_sampler": False}
    with unwarned():
        alone = fit(ddp(TopK(0.05)), Net, data, **settings)
        teacher = Teacher()
        beside = fit(ddp(TopK(0.05)), Net, data, callbacks=[teacher], **settings)
    return alone["digest"], beside["digest"], teacher.seen


def test_a_callback_copies_the_wrapped_module_and_changes_nothing() -> None:
    for alone, beside, seen in run_in_processes(taught, 2):
        assert alone == beside
        assert seen == [True] * 12


def sharded_copies(worker: int) -> list[tuple[str, str]]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    found = []
    for way in WAYS.values():
        said = []
        for attached in (False, True):
            model: Any = nn.Sequential(nn.Linear(64, 64))
            fully_shard(model, mesh=mesh)
            handle: Any = attach(model, TopK(0.1)) if attached else None
            with pytest.raises(Exception, match=r"deepcopy|pickle") as caught:
                way(model)
            said.append(f"{type(caught.value).__name__}: {caught.value}")
            if handle is not None:
                handle.close()
        found.append((said[0], said[1]))
    return found


@pytest.mark.filterwarnings("ignore:One worker")
def test_models_in_shards_are_copied_no_worse_than_torchs() -> None:
    """FSDP2 itself refuses all three; ours must not answer with an error of its own."""
    for plain, ours in run_in_processes(sharded_copies, 1)[0]:
        assert ours == plain
