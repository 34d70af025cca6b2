"""Measure one method: train for some steps, from the same weights as every other method."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_gc.bench.baselines import NONE, baseline_strategy, computed_bytes, make_strategy
from lightning_gc.bench.preparation import BenchError, BenchSetup, SigtermCallback
from lightning_gc.core.refusal import refuse
from lightning_gc.kernels import dispatch
from lightning_gc.methods.lightning_flavour import pl
from lightning_gc.methods.method import Method
from lightning_gc.transports.peer_error import awaiting_peers

WARMUP_STEPS = 4
"""Unmeasured steps: DDP rebuilds its buckets, and PowerSGD's hook sends dense gradients."""


class StepTimer(pl.Callback):
    """Records seconds, loss and bytes of every step of the optimizer.

    With accumulated gradients a step has several batches. The time between batches, when data are
    fetched, is left out.

    Args:
        sent_bytes: ``(trainer) -> bytes sent so far``; called when a step begins.
        steps: stop after this number of steps, ignoring the Trainer's limits; None obeys them.

    Attributes:
        seconds: of each step.
        losses: of each step, this worker's; empty if the module neither returns nor logs one.
        sent: bytes sent before each step.
    """

    def __init__(self, sent_bytes: Callable[[Any], int], steps: int | None = None) -> None:
        self.sent_bytes, self.steps = sent_bytes, steps
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.sent: list[int] = []
        self._spent: list[float] = []  # seconds of the batches of this step
        self._losses: list[float] = []
        self._step = 0

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Wait for compiled kernels; remove what could end the run before its last step."""
        dispatch.host.wait()
        if self.steps is not None:
            # Schedulers exist already, and have read the length of the run.
            trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_loop.max_steps = -1
            # These would need a validation, and none is run.
            schedulers = trainer.strategy.lr_scheduler_configs
            schedulers[:] = [each for each in schedulers if not each.reduce_on_plateau]

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Start the clock."""
        if not self._spent:
            self.sent.append(self.sent_bytes(trainer))
        _wait(trainer)
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, _: Any, outputs: Any, *rest: Any) -> None:
        """Stop the clock; at the end of a step, record it."""
        _wait(trainer)
        self._spent.append(time.perf_counter() - self.started)
        loss = _loss(trainer, outputs)
        self._losses += [] if loss is None else [float(loss)]
        if trainer.global_step == self._step:
            return
        self.seconds.append(sum(self._spent))
        # Lightning divides losses by the number of accumulated batches.
        self.losses += [sum(self._losses)] if self._losses else []
        self._step, self._spent, self._losses = trainer.global_step, [], []
        if len(self.seconds) == self.steps:
            trainer.should_stop = True

    def bytes_per_step(self, warmup: int = WARMUP_STEPS) -> float:
        """Return the mean bytes of a step, without the first ``warmup`` steps."""
        return (self.sent[-1] - self.sent[warmup]) / (len(self.sent) - warmup - 1)


def _loss(trainer: Any, outputs: Any) -> Any:
    """Return the loss that the module returned, or logged, as in manual optimisation."""
    if isinstance(outputs, dict) and "loss" in outputs:
        return outputs["loss"]
    logged = trainer.callback_metrics
    return next((value for name, value in logged.items() if name.endswith("loss")), None)


def _wait(trainer: Any) -> None:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()


_QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
}


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
    """Train with a method, or with the baseline called ``name`` if ``method`` is None.

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
        with awaiting_peers(f"finish {name}", setup.worker.rank, setup.worker.world_size):
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
    """Train for this number of steps; return the timer and the module.

    Args:
        setup: the same for all methods.
        strategy: a new one.
        steps: optimizer steps.
        name: of the method, for messages.
        callbacks: further ones.

    Raises:
        ValueError: the training ended earlier.
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
        refuse(f"The training ended after {len(timer.seconds)} of {steps} steps. Give it more data")
    # A Trainer and its model refer to each other; the next method needs the memory.
    trainer.strategy.optimizers = []
    gc.collect()
    return timer, module


def _sent_bytes(trainer: Any) -> int:
    recording = getattr(trainer.strategy, "recording", None)
    return 0 if recording is None else int(recording.sent_bytes)
