"""Workers of one parameter in one process, without Lightning, and a loop that controls them."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from lightning_gc import PerParameter, TopK
from lightning_gc.compressors import Compressor
from lightning_gc.control.control_loop import ControlLoop, Moment
from lightning_gc.controllers import Controller, Decision, Needs, Observation
from lightning_gc.exchange import Workers
from lightning_gc.exchange.compression import Compression
from lightning_gc.exchange.peers import Peers
from lightning_gc.transports.simulated import Ledger

CPU = torch.device("cpu")
NUMEL = 40


class Listens(Controller):
    """Remembers its observations, and always sets the same level."""

    needs = Needs(gradients="epoch sum", moments=True)
    level = 0.1

    def __init__(self) -> None:
        self.told: list[Observation] = []

    def init(self) -> dict[str, Any]:
        return {}

    def decide(
        self, observation: Observation, state: dict[str, Any]
    ) -> tuple[Decision, dict[str, Any]]:
        self.told.append(observation)
        return Decision(self.level), state


class Training:
    """W workers of one parameter in one process, without Lightning."""

    sgd: ClassVar = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

    def __init__(
        self,
        workers: int,
        compressor: Compressor | None = None,
        numel: int = NUMEL,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        compressor = compressor or PerParameter(TopK(0.1))
        self.workers = Workers(Compression(compressor).configured("test"))
        self.workers.names = {torch.nn.Parameter(torch.zeros(shape or numel)): "w"}
        self.ledger = Ledger(workers)
        self.workers.start(self.ledger.pages, revocable=False)

    def step(self, gradients: np.ndarray) -> None:
        """Exchange one gradient per worker, ``(W, NUMEL)``."""
        rows = torch.tensor(gradients, dtype=torch.float32)
        flows = [
            self.workers.flow(engine, row.clone(), self.workers.shapes)
            for engine, row in zip(self.workers.engines, rows, strict=True)
        ]
        self.workers.end_round([self.workers.shapes])
        self.ledger.run(flows, CPU)


def loop(
    training: Training, controller: Controller, total_steps: int | None = None
) -> Callable[[int], None]:
    """Return what lets the controller decide before a batch of an epoch."""
    control = ControlLoop(controller, training.workers)
    control.attach()
    peers = Peers(True, CPU, mean=lambda tensor: tensor)
    now = Moment({}, total_steps=total_steps)
    return lambda epoch: control.decide(epoch, [training.sgd], lambda: now, peers)
