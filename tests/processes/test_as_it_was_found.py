"""After a fit a process is as plain DDP leaves it: hooks, patches, filters, logs, streams."""

import logging
import os
import random
import signal
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

from lightning_gc import (
    QSGD,
    CompressedDDPStrategy,
    CompressionMonitor,
    LocalSteps,
    LocalStepsStrategy,
    SimulatedDDPStrategy,
    SimulatedLocalStepsStrategy,
    TopK,
    attach,
)
from lightning_gc.controllers import Accordion
from tests.support.fitting import quiet_trainer
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes


def found() -> dict[str, Any]:
    """Return what hooks, patches and settings of the process are now, by name."""
    loggers = [
        logging.getLogger(),
        *map(logging.getLogger, sorted(logging.root.manager.loggerDict)),
    ]
    return {
        "filters": list(warnings.filters),
        "showwarning": warnings.showwarning,
        "environment": dict(os.environ),
        "handlers": {
            each.name: (each.handlers[:], each.level) for each in loggers if each.handlers
        },
        "signals": {each: signal.getsignal(each) for each in signal.valid_signals()},
        "optimizer hooks": [
            len(optimizers._global_optimizer_pre_hooks),
            len(optimizers._global_optimizer_post_hooks),
        ],
        "module hooks": {
            name: len(value)
            for name, value in vars(modules).items()
            if name.startswith("_global_") and name.endswith("_hooks")
        },
        "modes": torch._C._len_torch_dispatch_stack(),
        "functions": torch._C._len_torch_function_stack(),
        "settings": (
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_anomaly_enabled(),
        ),
        "finders": len(sys.meta_path),
        "excepthook": sys.excepthook,
        "random": (random.getstate(), torch.get_rng_state().tolist()),
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index]
    }


def patched(trainer: Any) -> dict[str, list[str]]:
    """Return what functions objects of a Trainer have; Lightning's DDP leaves a ``forward``."""
    held = {
        "trainer": trainer,
        "loop": trainer.fit_loop,
        "epoch loop": trainer.fit_loop.epoch_loop,
        "signals": trainer._signal_connector,
        "module": trainer.lightning_module,
    }
    return {
        name: sorted(n for n, v in vars(each).items() if callable(v) and n != "forward")
        for name, each in held.items()
    } | {"settings": [f"{trainer.accumulate_grad_batches} {trainer.limit_train_batches}"]}


def left_by(strategy: Any, devices: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a fit has changed in this process, and what it has left in its Trainer."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    module = BoringModel()
    # A callback of ours is in the Trainer with our strategies only.
    ours = type(strategy) is not DDPStrategy and strategy != "auto"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = quiet_trainer(
            strategy,
            accelerator="cpu",
            devices=devices,
            limit_train_batches=4,
            limit_val_batches=2,
            callbacks=[CompressionMonitor()] if ours else [],
        )
        before = found()
        trainer.fit(module)
        after = found()
    drawn = {name: after.pop(name) for name in ("random", "numpy")}
    changed = sorted(name for name, value in after.items() if value != before[name])
    return drawn, {**patched(trainer), "changed": changed}


def compressed() -> Any:
    controller = Accordion(low=0.2, high=0.1, interval=1)
    return CompressedDDPStrategy(
        TopK(0.2), controller=controller, min_numel=0, process_group_backend="gloo"
    )


def by_lightning(worker: int) -> None:
    left_by(DDPStrategy(process_group_backend="gloo"), 2)  # Lightning's own first time
    plain = left_by(DDPStrategy(process_group_backend="gloo"), 2)
    assert left_by(compressed(), 2) == plain
    local = LocalStepsStrategy(QSGD(4), every=2, min_numel=0, process_group_backend="gloo")
    assert left_by(local, 2) == plain


def test_after_a_fit_of_real_workers() -> None:
    run_in_processes(by_lightning, 2)


def simulated(worker: int) -> None:
    left_by("auto", 1)
    _, plain = left_by("auto", 1)
    for strategy in (
        SimulatedDDPStrategy(TopK(0.2), workers=2, min_numel=0),
        SimulatedLocalStepsStrategy(QSGD(4), every=2, workers=2, min_numel=0),
    ):
        assert left_by(strategy, 1)[1] == plain


def test_after_a_fit_of_simulated_workers() -> None:
    run_in_processes(simulated, 1)


def by_loop(worker: int) -> None:
    dist.init_process_group("gloo")

    def train(net: Any, optimizer: Any) -> None:
        net(torch.ones(2, 32)).square().mean().backward()
        optimizer.step()

    torch.manual_seed(0)
    plain = nn.Linear(32, 8)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    train(plain, optimizer)
    ddp = DistributedDataParallel(plain)
    before = found()
    handle = attach(ddp, TopK(0.2), min_numel=0)
    train(ddp, optimizer)
    handle.close()
    assert found() == before
    local = nn.Linear(32, 8)
    its = torch.optim.SGD(local.parameters(), 0.1)
    before = found()
    with LocalSteps(local, its, QSGD(4), every=2, min_numel=0):
        train(local, its)
        train(local, its)
    assert found() == before
    assert not local._forward_pre_hooks
    assert not its._optimizer_step_pre_hooks


def test_after_a_loop_of_plain_torch() -> None:
    run_in_processes(by_loop, 2)
