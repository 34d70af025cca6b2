"""Measure one method: train for some steps, from the same weights as all others."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_gc.bench.baselines import NONE, baseline_strategy, computed_bytes, make_strategy
from lightning_gc.bench.step_timing import WARMUP_STEPS, StepTimer
from lightning_gc.bench.worker_device import SigtermCallback, WorkerRank
from lightning_gc.methods.lightning_flavour import pl
from lightning_gc.methods.method import Method
from lightning_gc.methods.yaml_config import YAMLBuild
from lightning_gc.transports.peer_error import PeerError, is_from_backend

TRAINER_ARGUMENTS = (
    *("precision", "plugins", "gradient_clip_val", "gradient_clip_algorithm", "deterministic"),
    *("accumulate_grad_batches", "use_distributed_sampler", "sync_batchnorm", "benchmark"),
    *("max_epochs", "max_steps", "limit_train_batches"),
)
"""Arguments of the file's Trainer that affect a step; the length of a run is for learning rate
schedules, and does not bound the number of steps."""

_QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
}


class BenchError(RuntimeError):
    """A method has failed; the error is its cause.

    Attributes:
        other_worker: another worker has failed.
    """

    def __init__(self, rank: int, method: str, cause: Exception) -> None:
        text = f"{type(cause).__name__}: {cause}"
        self.other_worker = isinstance(cause, PeerError) or is_from_backend(cause)
        if self.other_worker and not isinstance(cause, PeerError):
            text = f"Another one has died or hangs; its own output says more. {text}"
        super().__init__(f"Worker {rank} cannot go on with {method}. {text}")


@dataclass(frozen=True)
class BenchSetup:
    """Settings of a comparison, the same for all methods.

    Attributes:
        build: makes model, data and the Trainer's arguments.
        worker: ranks of this worker.
        accelerator: ``"cpu"`` or ``"cuda"``.
        backend: ``"gloo"`` or ``"nccl"``.
        steps: measured ones per round.
        timeout: of every collective.
        ddp: further settings of DDP.
        seed: of weights and data.
    """

    build: YAMLBuild
    worker: WorkerRank
    accelerator: str
    backend: str
    steps: int
    timeout: timedelta
    ddp: Mapping[str, Any]
    seed: int = 0


@dataclass(frozen=True)
class Measurement:
    """Results of one worker for one method in one round.

    Attributes:
        seconds: of each measured step.
        nbytes: sent per step.
        loss: mean of the last quarter of the steps; None if the module returns and logs none.
    """

    seconds: list[float]
    nbytes: float
    loss: float | None


def measure(setup: BenchSetup, name: str, method: Method | None) -> Measurement:
    """Train with a method of ours, or if None with the baseline of that name.

    Raises:
        BenchError: the training has failed.
    """
    setup.worker.restore_environment()
    settings = {"process_group_backend": setup.backend, "timeout": setup.timeout, **setup.ddp}
    try:
        if method is None:
            strategy = baseline_strategy(name, **settings)
        else:
            strategy = make_strategy(method, **settings)
        timer, module = train(setup, strategy, WARMUP_STEPS + setup.steps, name)
        dist.barrier()
    except Exception as error:
        raise BenchError(setup.worker.rank, name, error) from error
    if method is None:
        trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
        nbytes = float(computed_bytes(name, trained, setup.worker.world_size))
    else:
        nbytes = timer.bytes_per_step()
    last = timer.losses[-max(1, len(timer.losses) // 4) :]
    loss = sum(last) / len(last) if last else None
    return Measurement(timer.seconds[WARMUP_STEPS:], nbytes, loss)


def train(
    setup: BenchSetup,
    strategy: Any,
    steps: int,
    name: str,
    callbacks: Sequence[Any] = (),
) -> tuple[StepTimer, Any]:
    """Train for so many steps; return what the timer has recorded, and the module.

    Args:
        setup: the same for all methods.
        strategy: a new one.
        steps: of the optimizer.
        name: of the method, for messages.
        callbacks: further ones.

    Raises:
        ValueError: the training ended before.
    """
    pl.seed_everything(setup.seed, verbose=False)
    module, data, arguments = setup.build.make({})
    if name == NONE:
        arguments.pop("sync_batchnorm", None)  # which synchronises
    timer = StepTimer(_sent_bytes, steps)
    trainer = pl.Trainer(
        **(arguments | _QUIET),
        accelerator=setup.accelerator,
        devices=setup.worker.local_world_size,
        num_nodes=setup.worker.world_size // setup.worker.local_world_size,
        strategy=strategy,
        callbacks=[timer, SigtermCallback(setup.worker.rank, name), *callbacks],
    )
    trainer.fit(module, data)
    if len(timer.seconds) < steps:
        raise ValueError(f"The training ended by itself after {len(timer.seconds)} of {steps}.")
    # A Trainer and its model refer to each other; the next method needs the memory.
    trainer.strategy.optimizers = []
    gc.collect()
    return timer, module


def _sent_bytes(trainer: Any) -> int:
    recording = getattr(trainer.strategy, "recording", None)
    return 0 if recording is None else int(recording.sent_bytes)
