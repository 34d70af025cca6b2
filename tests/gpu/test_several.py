"""Several GPUs, or two processes on the CPU: equal replicas, and what failing workers leave."""

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gc import QSGD, HardThreshold, Identity, PerParameter, PowerSGD, RandomK, TopK
from lightning_gc.testing.contracts import cases
from tests.support.accelerator import DEVICE, GPUS, SHARED, needs_two
from tests.support.fitting import ddp, digest, fit, quiet_trainer
from tests.support.models import Books, Branches, Plain, own_batches
from tests.support.processes import run_in_processes

pytestmark = [pytest.mark.nightly, pytest.mark.processes, needs_two, pytest.mark.timeout(600)]
ALL_GPUS = GPUS if DEVICE == "cuda" and not SHARED else 2


def trained(worker: int, compressor: Any, steps: int, model: Any = Books, **options: Any) -> Any:
    found = fit(
        ddp(compressor, **options),
        model,
        own_batches(worker, steps),
        devices=ALL_GPUS,
        use_distributed_sampler=False,
    )
    return found["digest"]


def with_options(worker: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return trained(worker, *arguments, **options)


def in_all(*arguments: Any, **options: Any) -> list[str]:
    return run_in_processes(with_options, ALL_GPUS, arguments, options, timeout=500)  # type: ignore[no-any-return]


def test_identity_is_ddp() -> None:
    assert in_all(Identity(), 50) == in_all(None, 50)


@pytest.mark.parametrize(
    "compressor",
    [TopK(0.1), QSGD(4), PowerSGD(1), RandomK(0.1), HardThreshold(1e6)],
    ids=cases.label,
)
def test_replicas_are_equal(compressor: Any) -> None:
    """Of `HardThreshold` nobody sends anything: ragged messages without elements."""
    assert len(set(in_all(PerParameter(compressor), 50))) == 1


class Normed(Plain):
    """Has statistics that workers share, in the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 40), nn.SyncBatchNorm(40), nn.Tanh(), nn.Linear(40, 40)
        )


def connected(worker: int, connections: str, model: str, steps: int) -> str:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
    options = {"find_unused_parameters": True} if model == "branches" else {}
    chosen = Branches if model == "branches" else Normed
    return str(trained(worker, PerParameter(TopK(0.1)), steps, chosen, **options))


@pytest.mark.parametrize("connections", ["1", "8"])
@pytest.mark.parametrize("model", ["branches", "normed"])
def test_two_communicators(connections: str, model: str) -> None:
    if DEVICE == "cpu" and model == "normed":
        pytest.skip("SyncBatchNorm needs GPUs")
    steps = 30 if DEVICE == "cpu" else 300 if SHARED else 3000  # a shared one is slow
    found = run_in_processes(connected, ALL_GPUS, connections, model, steps, timeout=500)
    assert len(set(found)) == 1


class Fails(Plain):
    """Worker 1 ends in the fourth step, in one of several ways."""

    how = ""

    def loss(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3 and self.global_rank == 1:
            if self.how == "raises":
                raise ArithmeticError("worker 1 has had enough")
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(batch, batch_idx)


def failing(worker: int, how: str) -> str:
    """Return what a worker was told."""
    Fails.how = how
    batches = 8 - (how == "ends early" and worker == 1)
    try:
        fit(
            ddp(PerParameter(TopK(0.1)), timeout=timedelta(seconds=20)),
            Fails,
            own_batches(worker, batches),
            devices=ALL_GPUS,
            use_distributed_sampler=False,
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("how", ["raises", "killed", "ends early"])
def test_nobody_waits_for_a_failing_worker(how: str) -> None:
    """The others get an error that names it, or are ended by NCCL's watchdog."""
    # That one ends too, and does not wait for the others; but for the one that is dead.
    last = 1 if how == "killed" or DEVICE == "cuda" else None
    try:
        # NCCL's watchdog waits for a minute between the timeout and the end, for its report.
        ends = run_in_processes(failing, ALL_GPUS, how, wait_for=last, timeout=180)
    except EOFError:
        assert DEVICE == "cuda"
        return
    assert "PeerError" in ends[0], ends
    if how == "raises" and last is None:
        assert "has had enough" in ends[1], ends


class Validated(Plain):
    """Logs a mean over workers."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch, batch_idx), sync_dist=True)


def twice(worker: int) -> str:
    torch.manual_seed(0)
    module = Validated()
    for _ in range(2):
        trainer = quiet_trainer(
            ddp(PerParameter(HardThreshold(0.01))), devices=ALL_GPUS, use_distributed_sampler=False
        )
        trainer.fit(module, own_batches(worker, 5), own_batches(worker, 2))
    return digest(module)


def test_two_fits_and_a_validation() -> None:
    assert len(set(run_in_processes(twice, ALL_GPUS))) == 1
