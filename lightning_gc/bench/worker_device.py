"""Which of the workers this process is, and on what device it trains."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self

import torch

_HOW = """torchrun --nproc-per-node 2 -m lightning_gc bench config.yaml
On several machines, the same on each, with a number of its own after --node-rank:
  torchrun --nnodes 2 --node-rank 0 --master-addr ADDRESS_OF_THE_FIRST --nproc-per-node 1 \\
    -m lightning_gc bench config.yaml"""


@dataclass(frozen=True)
class Place:
    """A worker among all, and among those on its machine.

    Attributes:
        worker: its number.
        workers: how many there are.
        local_worker: its number on this machine.
        local_workers: how many there are on this machine, and on any other.
    """

    worker: int
    workers: int
    local_worker: int
    local_workers: int

    @classmethod
    def from_environment(cls) -> Self:
        """Read what torchrun, or something like it, has set.

        Raises:
            ValueError: nothing has, or there is one worker only, or machines have unequal numbers.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if not all(name in os.environ for name in names):
            raise ValueError(f"bench compares what several workers do. Start them so:\n  {_HOW}")
        workers = int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_WORLD_SIZE", workers))
        if workers < 2:
            raise ValueError(f"One worker has nobody to send to. Start several:\n  {_HOW}")
        if workers % local:
            raise ValueError(
                f"{workers} workers, of which {local} on this machine: give all machines the same "
                f"--nproc-per-node."
            )
        return cls(int(os.environ["RANK"]), workers, int(os.environ["LOCAL_RANK"]), local)

    def restore(self) -> None:
        """Set the variables again of which Lightning clears some after every fit."""
        os.environ |= {
            "WORLD_SIZE": str(self.workers),
            "LOCAL_RANK": str(self.local_worker),
            "NODE_RANK": str(self.worker // self.local_workers),
        }

    def device(self, accelerator: object = "auto") -> torch.device:
        """Return the device that a Trainer's ``accelerator`` means here.

        Raises:
            ValueError: one that is not for DDP, or fewer GPUs than workers.
        """
        gpus = torch.cuda.device_count()
        if accelerator == "cpu" or (accelerator == "auto" and gpus < self.local_workers):
            return torch.device("cpu")
        if accelerator not in ("auto", "gpu", "cuda"):
            raise ValueError(f"trainer.accelerator={accelerator!r}: bench knows cpu, gpu and auto.")
        if gpus < self.local_workers:
            raise ValueError(
                f"{self.local_workers} workers on this machine, but {gpus} GPUs: start one worker "
                f"per GPU, or set trainer.accelerator to cpu."
            )
        return torch.device("cuda", self.local_worker)
