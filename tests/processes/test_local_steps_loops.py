"""``LocalSteps`` in a loop of one's own: bit-equal to the strategy, resumed, refused."""

import copy
import importlib
import importlib.util
import io
import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision as FabricPrecision
from pytorch_lightning.plugins import MixedPrecision
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import (
    QSGD,
    GrowingRounds,
    InnerMoments,
    LocalSteps,
    OuterSGD,
    PerParameter,
    TopK,
    Unequal,
    attach,
)
from lightning_gc.controllers import RoundSchedule
from lightning_gc.core.saved_state import checksum, with_checksum
from lightning_gc.local_steps.refusals import _Watch
from tests.processes.test_local_steps_refused import OPTIMIZERS, Holds
from tests.support.accelerator import WORKERS
from tests.support.fitting import arrays, digest, fit, unwarned
from tests.support.local_steps import Learner, local, whole_digest
from tests.support.models import own_batches
from tests.support.processes import run_in_processes, said

pytestmark = pytest.mark.processes
STEPS = 8


class Grouped(Learner):
    """Has two parameter groups with different rates and decays."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.body.parameters(), "lr": 0.03},
            {"params": self.head.parameters(), "weight_decay": 0.1},
        ]
        adam = torch.optim.AdamW(groups, lr=0.05)
        falling = torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)
        return [adam], [{"scheduler": falling, "interval": "step"}]


class Calls(torch.optim.SGD):
    """Makes its step by ``super().step()``, within which torch calls all hooks again."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class CallsOn(Learner):
    """Has an optimizer of that kind."""

    def configure_optimizers(self) -> Any:
        return Calls(self.parameters(), lr=0.05)


class Loop:
    """A training loop of a user's own."""

    def __init__(
        self,
        worker: int,
        module: type[Learner] = Learner,
        amp: bool = False,
        accumulate: int = 1,
        broken: tuple[int, int] = (-1, -1),
        **options: Any,
    ) -> None:
        self.module = module(momentum=0.9)
        made: Any = self.module.configure_optimizers()
        several = isinstance(made, tuple)
        self.optimizer = made[0][0] if several else made
        self.schedulers = [each["scheduler"] for each in made[1]] if several else []
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=amp)
        self.amp, self.accumulate, self.broken = amp, accumulate, broken
        self.prepare()
        self.local = LocalSteps(self.module, self.optimizer, scaler=self.scaler, **options)
        self.data, self.worker = list(own_batches(worker, STEPS * accumulate)), worker

    def prepare(self) -> None:
        """Do what a framework needs."""

    def loss(self, part: int) -> Any:
        with torch.autocast("cpu", torch.float16, enabled=self.amp):
            return self.module.loss(self.data[part], part) / self.accumulate

    def backward(self, loss: Any) -> None:
        self.scaler.scale(loss).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def run(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            for part in range(step * self.accumulate, (step + 1) * self.accumulate):
                broken = (self.worker, step) == self.broken
                self.backward(self.loss(part) * (math.inf if broken else 1.0))
            self.step()
            self.optimizer.zero_grad()
            for scheduler in self.schedulers:
                scheduler.step()

    def saved(self) -> dict[str, Any]:
        """Return a copy of what a file would have."""
        states = [each.state_dict() for each in self.schedulers]
        file = io.BytesIO()
        torch.save({"local": self.local.state_dict(), "schedulers": states}, file)
        file.seek(0)
        loaded: dict[str, Any] = torch.load(file, weights_only=True)
        return loaded

    def load(self, saved: dict[str, Any]) -> None:
        self.local.load_state_dict(saved["local"])
        for scheduler, state in zip(self.schedulers, saved["schedulers"], strict=True):
            scheduler.load_state_dict(state)

    def end(self) -> dict[str, Any]:
        self.local.finish()
        engine = self.local._workers.first
        return {
            "digest": digest(self.module),
            "errors": arrays(dict(engine.errors())),
            "rounds": [engine.step],
        }


class FabricLoop(Loop):
    """The same in Fabric."""

    def prepare(self) -> None:
        precision = FabricPrecision("16-mixed", "cpu", self.scaler) if self.amp else None
        self.fabric = Fabric(accelerator="cpu", strategy="ddp", devices=WORKERS, plugins=precision)
        self.fabric.launch()
        self.fabric.to_device(self.module)
        self.optimizer = self.fabric.setup_optimizers(self.optimizer)

    def loss(self, part: int) -> Any:
        with self.fabric.autocast():
            return self.module.loss(self.data[part], part) / self.accumulate

    def backward(self, loss: Any) -> None:
        self.fabric.backward(loss)

    def step(self) -> None:
        self.optimizer.step()


TOP = PerParameter(TopK(0.1))
CASES: dict[str, dict[str, Any]] = {
    # The last round is shorter than the others.
    "momentum": {"compressor": TOP, "every": 3, "outer": OuterSGD.diloco(), "verify": 2},
    "groups": {"compressor": QSGD(4), "every": 5, "module": Grouped, "accumulate": 2},
    "parts": {"compressor": TOP, "every": 7, "fragments": 3, "delay": 1, "merge": "mix"},
    "growing": {"compressor": TOP, "every": GrowingRounds(0.06, 1)},
    "moments": {"compressor": TOP, "every": 3, "moments": InnerMoments({"momentum_buffer": 2})},
    "skipped": {"compressor": TOP, "every": 4, "amp": True, "broken": (1, 1)},
    "super": {"compressor": TOP, "every": 4, "module": CallsOn},
    "clipped": {
        "compressor": QSGD(4),
        "every": 3,
        "outer": OuterSGD.diloco(),
        "unequal": Unequal(pace="equal", weigh="equal", median_clip=True),
    },
}

IN_FABRIC = dict.fromkeys(("groups", "skipped"), FabricLoop)


def by_the_strategy(
    worker: int,
    module: type[Learner] = Learner,
    amp: bool = False,
    accumulate: int = 1,
    broken: tuple[int, int] = (-1, -1),
    **options: Any,
) -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    left = fit(
        local(**options),
        lambda: module(momentum=0.9, broken=broken),
        own_batches(worker, STEPS * accumulate),
        devices=WORKERS,
        use_distributed_sampler=False,
        accumulate_grad_batches=accumulate,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)] if amp else [],
    )
    return {"digest": left["digest"], "errors": left["errors"][0], "rounds": left["rounds"]}


def both_ways(worker: int) -> dict[str, Any]:
    """Run each case by the strategy, by a loop, and by a loop that is stopped and resumed."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        with unwarned():
            found[name] = [by_the_strategy(worker, **case)]
        with unwarned():
            straight = IN_FABRIC.get(name, Loop)(worker, **case)
        first = Loop(worker, **case)
        straight.run(0, STEPS)
        first.run(0, 5)
        saved = first.saved()
        first.run(5, 6)  # what was saved is a copy
        first.local.close()
        second = Loop(worker, **case)
        second.load(saved)
        second.run(5, STEPS)
        found[name] += [straight.end(), second.end()]
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run_in_processes(both_ways, WORKERS, timeout=200)
    return results


@pytest.mark.parametrize("name", CASES)
def test_it_equals_the_strategy_and_resumes(found: list[dict[str, Any]], name: str) -> None:
    """Weights, errors and the number of rounds, bit for bit; in Fabric too."""
    for worker in found:
        strategy, straight, resumed = worker[name]
        for loop in (straight, resumed):
            assert loop["digest"] == strategy["digest"]
            assert loop["rounds"] == strategy["rounds"]
            assert loop["errors"].keys() == strategy["errors"].keys()
            for param, error in strategy["errors"].items():
                np.testing.assert_array_equal(loop["errors"][param], error, param)
    assert found[0][name][0]["digest"] == found[1][name][0]["digest"]


def handled(worker: int) -> dict[str, Any]:
    """Look at common weights, load the mean state, and leave by an exception."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    made: dict[str, Any] = {"compressor": TOP, "outer": OuterSGD(0.9, 0.5)}
    loop = Loop(worker, every=4, controller=RoundSchedule((4, 2)), **made)
    loop.local.begin_epoch(0, max_epochs=2, total_steps=STEPS)
    loop.run(0, 4)
    common = whole_digest(loop.module)
    loop.run(4, 6)
    own = whole_digest(loop.module)
    with loop.local.common_weights():
        found["common"] = [whole_digest(loop.module) == common, said(loop.run, 6, 7)]
    loop.optimizer.zero_grad()
    found["back"] = whole_digest(loop.module) == own != common
    state, mean = loop.saved()["local"], loop.local.state_dict("mean")
    found["mean"] = checksum(mean["own"]["local_steps"]["weights"])
    second = Loop(worker, every=4, controller=RoundSchedule((4, 2)), **made)
    second.local.load_state_dict(mean)
    found["loaded"] = [digest(second.module), second.local.rounds.position]
    wrong = {name: part for name, part in state.items() if name not in ("sha256", "exchanged")}
    found["damaged"] = said(second.local.load_state_dict, with_checksum(wrong))
    loop.local.begin_epoch(1)
    found["epoch 1"] = loop.local.rounds.every
    loop.run(6, STEPS)
    found["bytes"] = loop.local.account().wire_bytes
    loop.local.finish()
    loop.local.finish()
    with pytest.raises(LookupError), second.local:
        raise LookupError
    after = whole_digest(second.module)
    second.run(6, STEPS)  # alone: nobody hears it
    found["left"] = whole_digest(second.module) != after
    return found


def test_common_weights_states_and_ends() -> None:
    one, other = run_in_processes(handled, WORKERS)
    for found in (one, other):
        assert found["common"][0]
        assert "train after it" in found["common"][1]
        assert found["back"]
        assert found["left"]
        assert found["bytes"] > 0
        assert "exchanged='gradients', but here it is 'weights'" in found["damaged"]
        assert found["epoch 1"] == 2
        assert found["loaded"][1] == 2, "two steps of the round"
    assert one["mean"] == other["mean"]
    assert one["loaded"] == other["loaded"]


def saved_by(worker: int, folder: str) -> tuple[list[float], list[float]]:
    """Save within a round; return the common weights, and the mean of the workers' own."""
    dist.init_process_group("gloo")
    loop = Loop(worker, every=4, compressor=TOP, outer=OuterSGD(0.9, 0.5))
    loop.run(0, 6)
    torch.save(loop.local.state_dict(), f"{folder}/{worker}.pt")
    found = weights_of(loop)
    loop.local.finish()
    return found


def loaded_by(worker: int, folder: str, workers: int) -> tuple[list[float], list[float]]:
    dist.init_process_group("gloo")
    loop = Loop(worker, every=4, compressor=TOP, outer=OuterSGD(0.9, 0.5))
    files = (f"{folder}/{each}.pt" for each in range(workers))
    loop.local.load_state_dict([torch.load(each, weights_only=True) for each in files])
    assert loop.local.rounds.position == 2
    assert loop.optimizer.state_dict()["state"], "worker 0's"
    found = weights_of(loop)
    loop.run(6, STEPS)
    loop.local.finish()
    return found


def weights_of(loop: Loop) -> tuple[list[float], list[float]]:
    own = torch.cat([each.detach().view(-1) for each in loop.module.parameters()])
    dist.all_reduce(own)
    with loop.local.common_weights():
        common = torch.cat([each.detach().view(-1) for each in loop.module.parameters()])
        return common.tolist(), (own / dist.get_world_size()).tolist()


@pytest.mark.nightly
def test_other_numbers_of_workers_keep_common_weights_and_the_mean(tmp_path: Path) -> None:
    saved = run_in_processes(saved_by, 3, str(tmp_path))
    loaded = run_in_processes(loaded_by, 2, str(tmp_path), 3)
    for common, own in loaded:
        assert common == saved[0][0]
        np.testing.assert_allclose(own, saved[0][1], rtol=0, atol=1e-6)


class Functional(torch.optim.SGD):
    """Averages gradients in ``step`` by functional collectives, as DTensors and compilers do."""

    def step(self, closure: Any = None) -> Any:
        closure().result()
        for param in self.param_groups[0]["params"]:
            all_reduce(torch.ones_like(param), "sum", dist.distributed_c10d._get_default_group())
        return super().step()


class NoHooks(torch.optim.SGD):
    """Does not call the constructor of ``Optimizer``."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params), "lr": 0.1}]


def refused(worker: int) -> dict[str, str]:
    net = nn.Linear(4, 4)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    found = {"no group": said(LocalSteps, net, sgd, "topk")}
    dist.init_process_group("gloo")

    def given(model: Any = net, optimizer: Any = sgd, method: Any = "topk", **options: Any) -> str:
        return said(LocalSteps, model, optimizer, method, **options)

    mesh = init_device_mesh("cpu", (1,))
    meta = nn.Linear(4, 4, device="meta")
    normed = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    held = Holds(net.parameters(), OPTIMIZERS["post-local"](list(net.parameters())))
    found |= {
        "ddp": given(DistributedDataParallel(nn.Linear(4, 4))),
        "holds ddp": given(nn.Sequential(DistributedDataParallel(nn.Linear(4, 4)))),
        "shards": given(fully_shard(nn.Linear(4, 4), mesh=mesh)),
        "norm": given(normed, torch.optim.SGD(normed.parameters(), lr=0.1)),
        "zero": given(optimizer=OPTIMIZERS["ZeRO"](list(net.parameters()))),
        "post-local": given(optimizer=held),
        "no hooks": given(optimizer=NoHooks(net.parameters())),
        "no optimizer": given(optimizer=0.1),
        "other": given(optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)),
        "frozen": given(copy.deepcopy(net).requires_grad_(False)),
        "vote": given(method="signum"),
        "unknown": given(evry=4),
        "every": given(every=0),
        "pace": given(unequal=Unequal()),
        "tokens": given(unequal=Unequal(pace="equal", weigh="tokens")),
        "meta": given(meta, torch.optim.SGD(meta.parameters(), lr=0.1)),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one worker
        with LocalSteps(net, sgd, "topk", every=2) as local:
            found["twice"] = given()
            with torch.no_grad():
                net.weight.add_(1.0)
            net(torch.ones(4)).sum().backward()
            found["loaded later"] = said(sgd.step)
            local.reset()
            common = net.weight.detach().clone()
            sgd.step()
            with local.common_weights():
                found["reset"] = f"{torch.equal(net.weight, common)} {local.rounds.position}"
        gathers = OPTIMIZERS["gathers"](net.parameters())
        with LocalSteps(net, gathers, "topk", every=2):
            found["gathers"] = said(gathers.step, lambda: None)
            found["attach"] = said(attach, net, "topk")
        functional = Functional(net.parameters(), lr=0.1)
        with LocalSteps(net, functional, "topk", every=2), ThreadPoolExecutor(1) as other:
            found["functional"] = said(functional.step, lambda: other.submit(dist.barrier))
        assert not _Watch._kernels, "no operator keeps a kernel of ours"
        scaler = torch.amp.GradScaler("cpu")
        with LocalSteps(net, sgd, "topk", scaler=scaler) as local:
            found["unscaled"] = said(sgd.step)
        found["controller"] = said(local.begin_epoch, 0)
    return found


WORDS = {
    "no group": "init_process_group",
    "ddp": "ddp.module",
    "holds ddp": "ddp.module",
    "shards": "keeps the weights in shards",
    "norm": "SyncBatchNorm",
    "zero": "ZeroRedundancyOptimizer",
    "post-local": "PostLocalSGDOptimizer",
    "no hooks": "super().__init__(params, defaults)",
    "no optimizer": "give the optimizer",
    "other": "not a parameter of the model",
    "frozen": "no parameter is trained",
    "vote": "workers vote",
    "unknown": "(did you mean 'every'?)",
    "every": "LocalSteps(every=0)",
    "pace": "none can be skipped; use pace='equal'",
    "tokens": "use weigh='equal', or LocalStepsStrategy",
    "meta": "the default process group has the backend",
    "twice": "exchanged already",
    "loaded later": "Load weights before you make it",
    "reset": "True 1",
    "gathers": "Gathers calls c10d.allreduce_",
    "attach": "wrap the model first",
    "functional": "Functional calls _c10d_functional.all_reduce",
    "unscaled": "Call scaler.step(optimizer)",
    "controller": "Give LocalSteps both",
}


def test_what_cannot_work_is_refused() -> None:
    (found,) = run_in_processes(refused, 1)
    assert found.keys() == WORDS.keys()
    for name, words in WORDS.items():
        assert words in found[name], (name, found[name])


class Echo(nn.Module):
    """Notes what it is given, as a Trainer chooses the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Learner()
        self.seen: list[Any] = []

    def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
        self.seen.append(x.detach().clone())
        return {"loss": self.net.loss(x, 0)}


def in_frameworks(worker: int, folder: str) -> dict[str, tuple[str, str]]:
    """Train with Accelerate and with a Trainer; train on the same batches in a plain loop."""
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments

    example = importlib.import_module("examples.local_transformers")
    made: dict[str, Any] = {"compressor": TOP, "every": 3, "outer": OuterSGD.diloco()}
    found = {}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    theirs = Echo()
    model = accelerator.prepare_model(theirs, evaluation_mode=True)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
    with LocalSteps(model, optimizer, **made):
        for x in own_batches(worker, 2 * STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(model(x)["loss"])
                optimizer.step()
                optimizer.zero_grad()
    found["accelerate"] = digest(theirs), by_hand(theirs.seen, 2, made)

    theirs = Echo()
    data: Any = [{"x": row, "labels": row} for row in torch.randn(64, 8).unbind()]
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        weight_decay=0.01,
        lr_scheduler_type="constant",
        average_tokens_across_devices=False,
        max_grad_norm=0.0,
        use_cpu=True,
        ddp_backend="gloo",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
    )
    groups: Any = torch.optim.AdamW(theirs.parameters(), lr=0.01), None
    trainer = Trainer(theirs, arguments, train_dataset=data, optimizers=groups)
    example.LocalTraining(trainer, **made)
    trainer.train()
    found["transformers"] = digest(theirs), by_hand(theirs.seen, 1, made)
    return found


def by_hand(batches: list[Any], accumulate: int, made: dict[str, Any]) -> str:
    ours = Echo()
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01)
    with LocalSteps(ours, optimizer, **made):
        for number, x in enumerate(batches, 1):
            (ours(x)["loss"] / accumulate).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return digest(ours)


@pytest.mark.nightly
def test_hugging_face_loops_are_the_plain_one(tmp_path: Path) -> None:
    for needs in ("accelerate", "transformers"):
        if not importlib.util.find_spec(needs):
            pytest.skip(f"{needs} is not installed: pip install 'lightning-gc[huggingface]'")
    one, other = run_in_processes(in_frameworks, WORKERS, str(tmp_path), timeout=220)
    for name, (theirs, ours) in one.items():
        assert theirs == ours == other[name][0] == other[name][1], name
