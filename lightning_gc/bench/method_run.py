"""One method trains for some steps, from the same weights as any other."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_gc.bench.baseline_bytes import computed_bytes
from lightning_gc.bench.baselines import NONE, peer
from lightning_gc.bench.methods import strategy_of
from lightning_gc.bench.sigterm import Farewell
from lightning_gc.bench.step_timing import SKIPPED, Watch
from lightning_gc.bench.worker_device import Place
from lightning_gc.transports.distributed import PeerError
from lightning_gc.tuning.lightning_flavour import pl
from lightning_gc.tuning.method import Method
from lightning_gc.tuning.yaml_config import FromFile

KEPT = (
    *("precision", "plugins", "gradient_clip_val", "gradient_clip_algorithm", "deterministic"),
    *("accumulate_grad_batches", "use_distributed_sampler", "sync_batchnorm", "benchmark"),
    *("max_epochs", "max_steps", "limit_train_batches"),
)
"""Arguments of the file's Trainer that a step depends on; the others are left aside. How long a run
would be is for learning rates that follow from it; it does not bound the turn."""

_QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
}


class BenchError(RuntimeError):
    """A method has not got through; its cause is the error.

    Attributes:
        elsewhere: what went wrong did so on another worker.
    """

    def __init__(self, worker: int, method: str, cause: Exception) -> None:
        said = f"{type(cause).__name__}: {cause}"
        self.elsewhere = isinstance(cause, (PeerError, dist.DistError)) or any(
            sign in said for sign in _NETWORK
        )
        if self.elsewhere and not isinstance(cause, PeerError):
            said = f"Another one has died or hangs; its own output says more. {said}"
        super().__init__(f"Worker {worker} cannot go on with {method}. {said}")


_NETWORK = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL")
"""Signs in what DDP raises: for Gloo it has no class of its own."""


@dataclass(frozen=True)
class Ground:
    """What all methods have in common.

    Attributes:
        build: makes model, data and the Trainer's arguments.
        place: this worker's.
        accelerator: ``"cpu"`` or ``"cuda"``.
        backend: ``"gloo"`` or ``"nccl"``.
        steps: measured ones of a turn.
        timeout: of every collective.
        ddp: further settings of DDP.
        seed: of weights and data.
    """

    build: FromFile
    place: Place
    accelerator: str
    backend: str
    steps: int
    timeout: timedelta
    ddp: Mapping[str, Any]
    seed: int = 0


@dataclass(frozen=True)
class Taken:
    """What one worker has seen in one turn.

    Attributes:
        seconds: of each measured step.
        nbytes: sent per step.
        loss: mean of the last quarter of the steps; None where the module tells none.
    """

    seconds: list[float]
    nbytes: float
    loss: float | None


def turn(ground: Ground, name: str, method: Method | None) -> Taken:
    """Train with a method of ours, or where None with the peer of that name.

    Raises:
        BenchError: what went wrong is its cause.
    """
    ground.place.restore()
    settings = {"process_group_backend": ground.backend, "timeout": ground.timeout, **ground.ddp}
    try:
        strategy = peer(name, **settings) if method is None else strategy_of(method, **settings)
        watch, module = _train(ground, strategy, SKIPPED + ground.steps, name)
        dist.barrier()
    except Exception as error:
        raise BenchError(ground.place.worker, name, error) from error
    if method is None:
        nbytes = float(computed_bytes(name, _trained(module), ground.place.workers))
    else:
        nbytes = watch.bytes_per_step()
    last = watch.losses[-max(1, len(watch.losses) // 4) :]
    return Taken(watch.seconds[SKIPPED:], nbytes, sum(last) / len(last) if last else None)


def _train(ground: Ground, strategy: Any, steps: int, name: str) -> tuple[Watch, Any]:
    pl.seed_everything(ground.seed, verbose=False)
    module, data, arguments = ground.build.make({})
    if name == NONE:
        arguments.pop("sync_batchnorm", None)  # that would be a synchronisation
    watch = Watch(_counter, steps)
    trainer = pl.Trainer(
        **(arguments | _QUIET),
        accelerator=ground.accelerator,
        devices=ground.place.local_workers,
        num_nodes=ground.place.workers // ground.place.local_workers,
        strategy=strategy,
        callbacks=[watch, Farewell(ground.place.worker, name)],
    )
    trainer.fit(module, data)
    if len(watch.seconds) < steps:
        raise ValueError(f"The training ended by itself after {len(watch.seconds)} of {steps}.")
    # A Trainer and its model refer to each other; the next turn needs the memory.
    trainer.strategy.optimizers = []
    gc.collect()
    return watch, module


def _counter(trainer: Any) -> int:
    recording = getattr(trainer.strategy, "recording", None)
    return 0 if recording is None else int(recording.sent_bytes)


def _trained(module: Any) -> list[Any]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
