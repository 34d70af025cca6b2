"""A parameter that is trained but not exchanged ends the fit, whoever unfroze or added it."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from pytorch_lightning.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import CompressedFabricStrategy, SimulatedDDPStrategy, TopK, attach
from tests.support.fitting import ddp, digest, quiet_trainer, unwarned
from tests.support.models import Plain, own_batches
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes


class Finetuned(Plain):
    """Trains the head, and from epoch 1 on the body as well."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(x))
        return output

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=self.rate)


class Unfreezing(BaseFinetuning):
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.body)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.body, optimizer, lr=0.02)


class Changing(pl.Callback):
    def __init__(self, change: Callable[[Any, Any], None]) -> None:
        self.change = change

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            self.change(pl_module, trainer.optimizers[0])


def unfreeze(module: Any, optimizer: Any) -> None:
    module.body.requires_grad_(True)
    optimizer.add_param_group({"params": list(module.body.parameters())})


def add(module: Any, optimizer: Any) -> None:
    module.head = nn.Sequential(module.head, nn.Linear(4, 4))
    optimizer.add_param_group({"params": list(module.head[1].parameters())})


def swap(module: Any, optimizer: Any) -> None:
    module.head = nn.Linear(40, 4)
    optimizer.param_groups[0]["params"] = list(module.head.parameters())


def outside(module: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


CHANGES: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "unfrozen": (unfreeze, "body.0.weight was unfrozen, added or replaced"),
    "added": (add, "head.1.weight was unfrozen, added or replaced"),
    "swapped": (swap, "head.weight was unfrozen, added or replaced"),
    "outside": (outside, r"Parameter group 1 of SGD has a tensor of shape \(3,\)"),
}
ALL = {name: sentence for name, (_, sentence) in CHANGES.items()}
ALL["finetuning"] = ALL["unfrozen"]


def frozen() -> Any:
    torch.manual_seed(0)
    model = Finetuned()
    model.body.requires_grad_(False)
    return model


def said_by(strategy: Any, callback: Any, worker: int) -> str:
    """Return the error that ended the fit, or the weights' digest."""
    model = frozen()
    devices = 1 if isinstance(strategy, SimulatedDDPStrategy) else 2
    settings: dict[str, Any] = {"max_epochs": 2, "use_distributed_sampler": False}
    trainer = quiet_trainer(strategy, devices=devices, callbacks=[callback], **settings)
    try:
        trainer.fit(model, own_batches(worker, 2))
    except RuntimeError as error:
        return str(error)
    return digest(model)


def in_lightning(worker: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with unwarned():
        found["finetuning"] = said_by(ddp(TopK(0.1)), Unfreezing(), worker)
        for name, (change, _) in CHANGES.items():
            found[name] = said_by(ddp(TopK(0.1)), Changing(change), worker)
        # The way that the sentence shows: a fit for the head, and one for all.
        model, trainer = frozen(), quiet_trainer(ddp(TopK(0.1)), devices=2)
        trainer.fit(model, own_batches(worker, 2))
        model.body.requires_grad_(True)
        before = digest(model.body)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, own_batches(worker, 2))
        found["two fits"] = digest(model), digest(model.body) != before
    return found


def test_the_fit_ends_on_all_workers() -> None:
    zero, one = run_in_processes(in_lightning, 2)
    assert zero == one
    for name, sentence in ALL.items():
        assert re.match(sentence, zero[name]), (name, zero[name])
    assert zero["two fits"][1], "the second fit trains the body"


def test_simulated_workers() -> None:
    for change, sentence in CHANGES.values():
        strategy = SimulatedDDPStrategy(TopK(0.1), workers=2)
        with unwarned():
            assert re.match(sentence, said_by(strategy, Changing(change), 0))


def attached(worker: int) -> dict[str, str]:
    dist.init_process_group("gloo")
    found = {}
    for name, (change, _) in CHANGES.items():
        model = frozen()
        optimizer = model.configure_optimizers()
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        handle = attach(wrapped, TopK(0.1), optimizers=optimizer)
        try:
            for step in range(4):
                if step == 2:
                    change(model, optimizer)
                optimizer.zero_grad()
                wrapped(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
        except RuntimeError as error:
            found[name] = str(error)
        handle.close()
    return found


def test_attach() -> None:
    """ "swapped": none of DDP's parameters gets a gradient any more, so that no hook is called."""
    zero, one = run_in_processes(attached, 2)
    assert zero == one
    for name, (_, sentence) in CHANGES.items():
        assert re.match(sentence, zero.get(name, "nothing")), name


def trained_together(worker: int) -> str:
    """One optimizer has the parameters of two modules, until the handle of one is closed."""
    dist.init_process_group("gloo")
    modules = [DistributedDataParallel(nn.Linear(8, 8)) for _ in range(2)]
    optimizer = torch.optim.SGD([p for each in modules for p in each.parameters()], lr=0.1)
    handles = [attach(each, TopK(0.1), optimizers=optimizer) for each in modules]
    one, two = modules
    two(one(torch.randn(4, 8))).square().mean().backward()
    handles[1].close()
    try:
        one(torch.randn(4, 8))
    except RuntimeError as error:
        return str(error)
    finally:
        handles[0].close()
    return "nothing"


def test_attached_modules_may_share_an_optimizer() -> None:
    for said in run_in_processes(trained_together, 2):
        assert re.match(r"Parameter group 0 of SGD has a tensor of shape \(8, 8\)", said)


def set_up_twice(worker: int) -> str:
    """The second time with a frozen body, which is unfrozen later."""
    strategy = CompressedFabricStrategy(TopK(0.1))
    with unwarned():
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        model = frozen()
        model.body.requires_grad_(True)
        fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model.body.requires_grad_(False)
        wrapped, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.body.requires_grad_(True)
    try:
        wrapped(torch.randn(4, 8))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_what_fabric_exchanged_before_is_not_exchanged_now() -> None:
    for said in run_in_processes(set_up_twice, 2):
        assert re.match("body.0.weight was unfrozen, added or replaced", said)
