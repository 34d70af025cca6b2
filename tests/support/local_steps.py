"""Fits with local steps in real processes, and the same by a plain loop and LocalLockstep."""

import copy
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_gc import OuterSGD
from lightning_gc.strategies.for_pytorch_lightning import LocalStepsStrategy
from lightning_gc.testing import LocalLockstep
from tests.support.accelerator import BACKEND
from tests.support.fitting import digest, plain
from tests.support.models import own_batches

RATE, FALL = 0.05, 0.9


def local(compressor: Any, **options: Any) -> LocalStepsStrategy:
    """Return the strategy of a worker that runs in a process of its own."""
    return LocalStepsStrategy(compressor, process_group_backend=BACKEND, **options)


class Learner(pl.LightningModule):
    """Learns to double its input, at a rate that falls with every step.

    Args:
        momentum: of its SGD.
        batch_norm: whether it has running statistics.
        broken: worker and step whose loss is infinite.
        seed: of its weights.
    """

    def __init__(
        self,
        momentum: float = 0.0,
        batch_norm: bool = False,
        broken: tuple[int, int] = (-1, -1),
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        norm = nn.BatchNorm1d(40) if batch_norm else nn.Tanh()
        self.body = nn.Sequential(nn.Linear(8, 40), norm, nn.Linear(40, 40))
        self.head = nn.Linear(40, 4)
        self.momentum, self.broken = momentum, broken
        self.trained: list[str] = []
        self.validated: list[str] = []

    def noted(self) -> dict[str, Any]:
        return {"trained": self.trained, "validated": self.validated}

    def loss(self, batch: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(batch))
        return (output - batch[:, :4] * 2).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.trained.append(digest(self))
        broken = (self.global_rank, self.global_step) == self.broken
        return self.loss(batch) * (float("inf") if broken else 1.0)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(whole_digest(self))
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), lr=RATE, momentum=self.momentum)
        falling = torch.optim.lr_scheduler.ExponentialLR(sgd, FALL)
        return [sgd], [{"scheduler": falling, "interval": "step"}]


def whole_digest(module: nn.Module) -> str:
    """Return a hash of parameters and buffers that are no counters."""
    floats = [b for b in module.buffers() if b.is_floating_point()]
    return digest(module) + "".join(str(b.tolist()) for b in floats)


def by_a_plain_loop(
    workers: int,
    steps: int,
    every: int,
    compressor: Any,
    momentum: float = 0.0,
    outer: OuterSGD = OuterSGD(),  # noqa: B008 - frozen
    memory: Any = None,
    scheme: Any = None,
    verify: int = 0,
) -> list[Any]:
    """Return the parameters after the same training, without Lightning and any strategy."""
    torch.manual_seed(0)
    first = Learner(momentum)
    models = [copy.deepcopy(first) for _ in range(workers)]
    made = [model.configure_optimizers() for model in models]
    lockstep = LocalLockstep(
        workers, dict(first.named_parameters()), compressor, memory, scheme, outer=outer
    )
    data = [list(own_batches(worker, steps)) for worker in range(workers)]
    for step in range(steps):
        for worker, model in enumerate(models):
            (optimizer,), (falling,) = made[worker]
            optimizer.zero_grad()
            model.loss(data[worker][step]).backward()
            optimizer.step()
            falling["scheduler"].step()
        if (step + 1) % every == 0 or step + 1 == steps:
            done = lockstep.round([dict(model.named_parameters()) for model in models])
            for model in models:
                model.load_state_dict(done.weights)
    return [plain(each) for each in models[0].parameters()]
