"""What local steps refuse when a fit begins or later, and a worker that dies within a round."""

import functools
import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_gc import Identity, LocalSteps, Together, TopK
from lightning_gc.lightning.for_pytorch_lightning import SimulatedLocalStepsStrategy
from tests.support.accelerator import WORKERS
from tests.support.fitting import digest, fit
from tests.support.local_steps import Learner, fit_local, local
from tests.support.models import own_batches
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes


def refused(worker: int) -> dict[str, str]:
    """A worker alone, in a process of its own."""
    said = {}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "manual": ({}, {}),
        "sync": ({"batch_norm": True}, {"sync_batchnorm": True}),
        "swa": ({}, {"callbacks": [pl.callbacks.StochasticWeightAveraging(1e-2)]}),
        "pruning": ({}, {"callbacks": [pl.callbacks.ModelPruning("l1_unstructured", amount=0.3)]}),
        "unfrozen": ({}, {"callbacks": [Unfreeze()]}),
    }
    for name, (module, trainer) in cases.items():
        try:
            fit(
                local(TopK(0.1), every=2),
                functools.partial(made, name, module),
                own_batches(worker, 4),
                devices=1,
                **trainer,
            )
        except (ValueError, RuntimeError) as error:
            said[name] = str(error)
    left = fit(local(TopK(0.1), every=3), Learner, own_batches(worker, 4), devices=1)
    return said | {"alone": str(left["rounds"])}


def made(name: str, settings: dict[str, Any]) -> Learner:
    learner = Learner(**settings)
    learner.automatic_optimization = name != "manual"
    if name == "unfrozen":
        learner.head.requires_grad_(False)
    return learner


class Unfreeze(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.head.requires_grad_(True)


def test_what_is_refused_when_a_fit_begins() -> None:
    (said,) = run_in_processes(refused, 1)
    assert "return Together([muon, adamw])" in said["manual"]
    assert "body.1 is SyncBatchNorm" in said["sync"]
    assert "remove the callback" in said["swa"]
    assert "prune after the fit, or use CompressedDDPStrategy" in said["pruning"]
    assert "head.weight was unfrozen" in said["unfrozen"]
    assert said["alone"] == "[2]", "one worker goes through the same path"


class Die(pl.Callback):
    """Ends worker 1 at once, within a round."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            os._exit(1)


def with_one_that_dies(worker: int) -> str:
    try:
        fit_local(
            worker,
            compressor=TopK(0.1),
            every=4,
            timeout=timedelta(seconds=4),
            trainer={"callbacks": [Die()]},
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


@pytest.mark.nightly
def test_a_dead_worker_is_noticed_at_the_next_exchange() -> None:
    (said,) = run_in_processes(with_one_that_dies, 2, wait_for=1, timeout=60)
    assert said.startswith("PeerError: "), said


def with_optimizer(kind: str) -> type[Learner]:
    """Return a module whose optimizer is of this kind."""

    class Chosen(Learner):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if kind == "LBFGS":  # the module may communicate, an optimizer may not
                self.log("loss", loss, sync_dist=True)
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if kind == "LBFGS":
                norm = torch.cat([each.grad.view(-1) for each in self.parameters()]).norm()  # type: ignore[union-attr]
                self.log("norm", norm, sync_dist=True)

        def configure_optimizers(self) -> Any:
            return OPTIMIZERS[kind](list(self.parameters()))

    return Chosen


class Gathers(torch.optim.SGD):
    """Averages gradients in ``step``, as optimizers do that keep parts of their state apart."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for param in self.param_groups[0]["params"]:
            dist.all_reduce(param.grad)
        super().step()
        return loss


class Muon(torch.optim.SGD):
    """Shares its work out among all workers in ``step``, as distributed Muon does."""

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            dist.all_reduce(param.grad)
        return super().step(closure)


class Holds(torch.optim.SGD):
    """Holds another optimizer, as Lookahead does."""

    def __init__(self, params: Any, held: Any) -> None:
        super().__init__(params, lr=0.05)
        self.held = [held]


class Later(torch.optim.SGD):
    """Has a group of all workers, with which it is to communicate in its second step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)
        self._process_group = dist.group.WORLD


class Averages(torch.optim.SGD):
    """Moves weights to their average for a validation, as schedule-free optimizers do."""

    def train(self) -> None:
        pass

    eval = train


class Unreadable(torch.optim.SGD):
    """Has its state on worker 0 only, after a call that Lightning makes."""

    def consolidate_state_dict(self) -> None:
        pass

    def state_dict(self) -> Any:
        if dist.get_rank() == 1:
            raise LookupError("the state is elsewhere")
        return super().state_dict()


def zero(params: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(params, optimizer_class=torch.optim.AdamW, lr=0.01)


def post_local(params: Any) -> Any:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    return PostLocalSGDOptimizer(torch.optim.SGD(params, 0.05), PeriodicModelAverager(4))


OPTIMIZERS: dict[str, Any] = {
    "ZeRO": zero,
    "held": lambda params: Holds(params, Holds(params, zero(params))),
    # Lightning itself does not take it, for it lacks ``defaults``.
    "post-local": lambda params: Holds(params, post_local(params)),
    "later": Later,
    "together": lambda params: Together([Later(params[:1]), torch.optim.SGD(params[1:], 0.05)]),
    "muon": lambda params: Together([torch.optim.SGD(params[1:], 0.05), Muon(params[:1], 0.05)]),
    "averages": lambda params: Averages(params, lr=0.05),
    "gathers": lambda params: Gathers(params, lr=0.05),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.05),
    "unreadable": lambda params: Unreadable(params, lr=0.05),
}


def with_optimizers(worker: int) -> dict[str, str]:
    """Return how a fit with each optimizer ends, and whether the weights are the first ones."""
    said = {}
    torch.manual_seed(0)
    first = digest(Learner())
    for kind in (each for each in OPTIMIZERS if each not in ("muon", "unreadable")):
        module = with_optimizer(kind)()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fit(
                    local(Identity(), every=2, timeout=timedelta(minutes=5)),
                    lambda module=module: module,  # type: ignore[misc]
                    own_batches(worker, 4),
                    devices=WORKERS,
                    use_distributed_sampler=False,
                )
        except ValueError as error:
            assert digest(module) == first
            said[kind] = str(error)
    net = torch.nn.Linear(4, 4)
    optimizer = OPTIMIZERS["muon"](list(net.parameters()))
    with LocalSteps(net, optimizer, Identity(), every=2):
        net(torch.ones(4)).sum().backward()
        try:
            optimizer.step()
        except ValueError as error:
            said["muon"] = str(error)
    simulated = SimulatedLocalStepsStrategy(Identity(), workers=2, every=2)
    try:
        fit(simulated, with_optimizer("ZeRO"), own_batches(worker, 4))
    except ValueError as error:
        said["simulated"] = str(error)
    return said


def test_optimizers_that_communicate_are_refused_on_all_workers() -> None:
    """By class as a fit begins, also held by another; by what they do in the first step."""
    for said in run_in_processes(with_optimizers, WORKERS):
        assert "or holds a ZeroRedundancyOptimizer" in said["ZeRO"]
        assert "or holds a PostLocalSGDOptimizer" in said["post-local"]
        assert said["held"].startswith("Holds is or holds a ZeroRedundancyOptimizer")
        for kind, name in (("later", "Later"), ("together", "Later in Together")):
            assert said[kind].startswith(f"{name} has a ProcessGroup of 2 workers as _process_grou")
        assert said["averages"].startswith("Averages has train() and eval()")
        assert said["gathers"].startswith("Gathers calls c10d.allreduce_")
        assert said["muon"].startswith("Muon in Together calls c10d.allreduce_")
        assert "such as torch.optim.Muon or SingleDeviceMuon" in said["muon"]
        assert "With SimulatedLocalStepsStrategy a worker" in said["simulated"]
        assert "LBFGS" not in said, "a closure and what Lightning shares are not the optimizer's"


def saved(worker: int, folder: str) -> str:
    try:
        fit(
            local(Identity(), every=2),
            with_optimizer("unreadable"),
            own_batches(worker, 4),
            devices=WORKERS,
            use_distributed_sampler=False,
            callbacks=[ModelCheckpoint(folder)],
        )
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_optimizer_whose_state_cannot_be_read_is_named(tmp_path: Path) -> None:
    """On all workers, and nothing is said of a file that could not be written."""
    for said in run_in_processes(saved, WORKERS, str(tmp_path)):
        assert said.startswith("Worker 1 of 2 could not read its state"), said
        assert "Unreadable.state_dict() failed (LookupError: the state is elsewhere)" in said
        assert "could not write" not in said
