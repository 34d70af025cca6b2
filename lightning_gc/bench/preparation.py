"""Prepare a measurement: rank and device, the setup from a YAML file, and the process group."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from lightning_gc.core.refusal import refuse
from lightning_gc.exchange.validation import check_agreement
from lightning_gc.methods.lightning_flavour import pl
from lightning_gc.methods.text_table import print_line as print_line
from lightning_gc.methods.yaml_config import YAMLBuild
from lightning_gc.transports.distributed import Distributed
from lightning_gc.transports.interfaces import named_interface
from lightning_gc.transports.peer_error import PeerError, awaiting_peers, is_from_backend

_HOW = """torchrun --nproc-per-node 2 -m lightning_gc {command} config.yaml
On several machines run it on each, with a different number after --node-rank:
  torchrun --nnodes 2 --node-rank 0 --master-addr ADDRESS_OF_THE_FIRST --nproc-per-node 1 \\
    -m lightning_gc {command} config.yaml"""


@dataclass(frozen=True)
class WorkerRank:
    """Ranks of a worker, as torchrun numbers them.

    Attributes:
        rank: among all workers.
        world_size: number of workers.
        local_rank: among the workers on this machine.
        local_world_size: number of workers on each machine.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls, command: str) -> Self:
        """Read the environment variables of torchrun, or of another launcher.

        ``command`` is the one that is run, for messages.

        Raises:
            ValueError: they are not set, or there is one worker, or unequal numbers of workers.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        how = _HOW.format(command=command)
        if not all(name in os.environ for name in names):
            raise ValueError(f"{command} measures several workers. Start them like this:\n  {how}")
        workers = int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_WORLD_SIZE", workers))
        if workers < 2:
            raise ValueError(f"One worker sends nothing. Start several:\n  {how}")
        if workers % local:
            refuse(
                f"{workers} workers with {local} on this machine: give all machines the same "
                "--nproc-per-node"
            )
        return cls(int(os.environ["RANK"]), workers, int(os.environ["LOCAL_RANK"]), local)

    def restore_environment(self) -> None:
        """Set the variables again: Lightning clears some after every fit."""
        os.environ |= {
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "NODE_RANK": str(self.rank // self.local_world_size),
        }

    def device(self, accelerator: object = "auto") -> torch.device:
        """Return the device that a Trainer's ``accelerator`` means here.

        Raises:
            ValueError: an accelerator that DDP does not run on, or fewer GPUs than workers.
        """
        gpus = torch.cuda.device_count()
        if accelerator == "cpu" or (accelerator == "auto" and gpus < self.local_world_size):
            return torch.device("cpu")
        if accelerator not in ("auto", "gpu", "cuda"):
            refuse(f"trainer.accelerator={accelerator!r}: use cpu, gpu or auto")
        if gpus < self.local_world_size:
            refuse(
                f"{self.local_world_size} workers on this machine, but {gpus} GPUs: start one "
                "worker per GPU, or set trainer.accelerator to cpu"
            )
        return torch.device("cuda", self.local_rank)


class SigtermCallback(pl.Callback):
    """Callback that exits immediately on SIGTERM; Lightning would wait for the other workers.

    Args:
        rank: this worker's.
        method: name of the measured method.
    """

    def __init__(self, rank: int, method: str) -> None:
        self.rank, self.method = rank, method
        self.install()

    def on_train_start(self, *_: Any) -> None:
        """Install the handler again, over Lightning's."""
        self.install()

    def install(self) -> None:
        """Install the handler, in the main thread only."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._exit)

    def _exit(self, *_: Any) -> None:
        sys.stderr.write(
            f"lightning-gc: Worker {self.rank} was told to stop while it measured {self.method}. "
            f"If torchrun stopped it, another worker has failed: see torchrun's summary.\n"
        )
        sys.stderr.flush()
        # No exception: clean-up would wait for the failed worker.
        os._exit(1)


TRAINER_ARGUMENTS = (
    *("precision", "plugins", "gradient_clip_val", "gradient_clip_algorithm", "deterministic"),
    *("accumulate_grad_batches", "use_distributed_sampler", "sync_batchnorm", "benchmark"),
    *("max_epochs", "max_steps", "limit_train_batches"),
)
"""Arguments of the file's Trainer that affect a step; the length of a run is for learning rate
schedules, and does not bound the number of steps."""


class BenchError(RuntimeError):
    """A method has failed; the cause is its error.

    Attributes:
        other_worker: the failure is another worker's.
    """

    def __init__(self, rank: int, method: str, cause: Exception) -> None:
        text = f"{type(cause).__name__}: {cause}"
        self.other_worker = isinstance(cause, PeerError) or is_from_backend(cause)
        if self.other_worker and not isinstance(cause, PeerError):
            text = f"Another worker has died or hangs. See its output. {text}"
        super().__init__(f"Worker {rank} cannot continue with {method}. {text}")


@dataclass(frozen=True)
class BenchSetup:
    """Settings of a benchmark, equal for all methods.

    Attributes:
        build: makes model, data and the Trainer's arguments.
        worker: ranks of this worker.
        accelerator: ``"cpu"`` or ``"cuda"``.
        backend: ``"gloo"`` or ``"nccl"``.
        steps: measured steps per round.
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


def prepare(
    sections: Mapping[str, Any],
    worker: WorkerRank,
    steps: int,
    timeout: float,
    *,
    find_unused_parameters: bool,
    say: Callable[[str], None],
) -> tuple[BenchSetup, torch.device]:
    """Return the setup that a file describes, and this worker's device.

    Args:
        sections: the file's.
        worker: ranks of this worker.
        steps: measured steps per round.
        timeout: of every collective, in seconds.
        find_unused_parameters: as for DDP.
        say: called with a line that lists ignored settings.

    Raises:
        ValueError: an invalid file, or a device that DDP does not run on.
    """
    given = dict(sections.get("trainer") or {})
    device = worker.device(given.get("accelerator", "auto"))
    kept = {name: value for name, value in given.items() if name in TRAINER_ARGUMENTS}
    parts = {name: sections.get(name) for name in ("model", "data")} | {"trainer": kept}
    build = YAMLBuild(parts, ())
    build.check()
    seed = sections.get("seed_everything", 0)
    setup = BenchSetup(
        build,
        worker,
        accelerator=device.type,
        backend="nccl" if device.type == "cuda" else "gloo",
        steps=steps,
        timeout=timedelta(seconds=timeout),
        ddp={"find_unused_parameters": True} if find_unused_parameters else {},
        seed=seed if type(seed) is int else 0,
    )
    ignored = sorted(given.keys() - kept.keys() - {"accelerator"})
    if ignored:
        say(f"Ignored settings of the file's trainer: {', '.join(ignored)}.")
    return setup, device


@contextmanager
def process_group(
    setup: BenchSetup, device: torch.device, agreed: Mapping[str, str]
) -> Iterator[None]:
    """Create the default process group, check that workers agree, and destroy it at the end.

    Gloo uses the interface that leads to worker 0 if it would announce a loopback address.

    Args:
        setup: with backend and timeout.
        device: this worker's.
        agreed: name -> text that must be equal on all workers, besides the file's sections.

    Raises:
        ValueError: on all workers, if they differ.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    named: AbstractContextManager[None] = nullcontext()
    if setup.backend == "gloo" and setup.worker.local_world_size < setup.worker.world_size:
        say = print_line if setup.worker.local_rank == 0 else lambda text: None
        named = named_interface(os.environ["MASTER_ADDR"], say)
    with named:
        with awaiting_peers("start", setup.worker.rank, setup.worker.world_size):
            dist.init_process_group(setup.backend, timeout=setup.timeout)
        same = {**agreed, "the file's sections": repr(dict(setup.build.sections))}
        check_agreement(same, Distributed(), device)
        before = signal.getsignal(signal.SIGTERM)
        yield
    # Not after an error: destroying the group would wait for dead workers.
    signal.signal(signal.SIGTERM, before)
    dist.destroy_process_group()


@contextmanager
def explained() -> Iterator[None]:
    """Print the traceback of a method's failure, and raise it.

    Another worker prints its own traceback.
    """
    try:
        yield
    except BenchError as error:
        if not error.other_worker:
            traceback.print_exception(error.__cause__)
        raise
