"""Rank of this process among the workers, and the device that it trains on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass
from typing import Any, Self

import torch

from lightning_gc.methods.lightning_flavour import pl

_HOW = """torchrun --nproc-per-node 2 -m lightning_gc {command} config.yaml
On several machines, the same on each, with a number of its own after --node-rank:
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
            raise ValueError(f"{command} compares what several workers do. Start them so:\n  {how}")
        workers = int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_WORLD_SIZE", workers))
        if workers < 2:
            raise ValueError(f"One worker has nobody to send to. Start several:\n  {how}")
        if workers % local:
            raise ValueError(
                f"{workers} workers, of which {local} on this machine: give all machines the same "
                f"--nproc-per-node."
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
            raise ValueError(f"trainer.accelerator={accelerator!r}: known are cpu, gpu and auto.")
        if gpus < self.local_world_size:
            raise ValueError(
                f"{self.local_world_size} workers on this machine, but {gpus} GPUs: start one "
                f"worker per GPU, or set trainer.accelerator to cpu."
            )
        return torch.device("cuda", self.local_rank)


class SigtermCallback(pl.Callback):
    """Exits at once on SIGTERM, where Lightning would wait for the other workers first.

    Args:
        rank: this worker's.
        method: what it measures.
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
            f"lightning-gc: Worker {self.rank} was told to stop while it measured {self.method}; "
            f"if by torchrun, another worker has failed, and its summary says which.\n"
        )
        sys.stderr.flush()
        # No exception: clean-up would wait for the failed worker.
        os._exit(1)
