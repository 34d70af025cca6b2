"""Fits with local steps in real processes, and the same by a plain loop and LocalLockstep."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gc import GrowingRounds, OuterSGD
from lightning_gc.lightning.for_pytorch_lightning import LocalStepsStrategy
from lightning_gc.local_steps.common_weights import in_fragments
from lightning_gc.testing import LocalLockstep
from tests.support.accelerator import BACKEND, DEVICE, WORKERS
from tests.support.fitting import digest, fit, plain
from tests.support.models import Doubling, own_batches

RATE, FALL = 0.05, 0.9


def local(compressor: Any, **options: Any) -> LocalStepsStrategy:
    """Return the strategy of a worker that runs in a process of its own."""
    return LocalStepsStrategy(compressor, process_group_backend=BACKEND, **options)


class Learner(Doubling):
    """Trained at a rate that falls with every step.

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
        torch.manual_seed(seed)
        super().__init__()
        if batch_norm:
            self.body[1] = nn.BatchNorm1d(40)
        self.momentum, self.broken = momentum, broken
        self.trained: list[str] = []
        self.validated: list[str] = []

    def noted(self) -> dict[str, Any]:
        return {"trained": self.trained, "validated": self.validated}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.trained.append(digest(self))
        broken = (self.global_rank, self.global_step) == self.broken
        return self.loss(batch, batch_idx) * (float("inf") if broken else 1.0)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(whole_digest(self))
        self.log("val_loss", self.loss(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), lr=RATE, momentum=self.momentum)
        falling = torch.optim.lr_scheduler.ExponentialLR(sgd, FALL)
        return [sgd], [{"scheduler": falling, "interval": "step"}]


def fit_local(
    worker: int,
    steps: int = 8,
    momentum: float = 0.0,
    module: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    validation: bool = False,
    strategy: Any = local,
    **options: Any,
) -> dict[str, Any]:
    """Fit as one of two processes."""
    return fit(
        strategy(**options),
        lambda: Learner(momentum, **(module or {})),
        own_batches(worker, steps),
        own_batches(worker, 1) if validation else None,
        devices=WORKERS,
        use_distributed_sampler=False,
        **(trainer or {}),
    )


def whole_digest(module: nn.Module) -> str:
    """Return a hash of parameters and buffers that are no counters."""
    floats = [b for b in module.buffers() if b.is_floating_point()]
    return digest(module) + "".join(str(b.tolist()) for b in floats)


def by_a_plain_loop(
    workers: int,
    steps: int,
    every: int | GrowingRounds,
    compressor: Any,
    momentum: float = 0.0,
    outer: OuterSGD = OuterSGD(),  # noqa: B008 - frozen
    memory: Any = None,
    scheme: Any = None,
    verify: int = 0,
    delay: int = 0,
    merge: str = "rebase",
    fragments: int = 1,
) -> list[Any]:
    """Return the parameters after the same training, without Lightning and any strategy."""
    torch.manual_seed(0)
    first = Learner(momentum).to(DEVICE)
    models = [copy.deepcopy(first) for _ in range(workers)]
    named = [dict(model.named_parameters()) for model in models]
    made = [model.configure_optimizers() for model in models]
    parts = [list(part.params) for part in in_fragments(named[0], fragments, outer)]
    locksteps = [
        LocalLockstep(
            workers, {n: named[0][n] for n in part}, compressor, memory, scheme, outer=outer
        )
        for part in parts
    ]
    data = [[b.to(DEVICE) for b in own_batches(worker, steps)] for worker in range(workers)]
    under_way: list[tuple[int, Any, Any]] = []  # steps left, common weights to be, what was sent

    def send(part: int, left: int) -> None:
        own = [{n: each[n].detach().clone() for n in parts[part]} for each in named]
        under_way.append((left, locksteps[part].round(own).weights, own))

    def take_over(at_once: bool) -> None:
        for left, common, sent in list(under_way):
            if left and not at_once:
                continue
            for own, before in zip(named, sent, strict=True):
                for n, weight in common.items():
                    since = own[n].detach() - before[n]
                    rebased = weight + since
                    mixed = 0.5 * own[n].detach() + 0.5 * weight
                    own[n].data.copy_(mixed if merge == "mix" else rebased)
        under_way[:] = [each for each in under_way if each[0] and not at_once]

    length = every if isinstance(every, int) else every.base
    position, rate = 0, None
    for step in range(steps):
        for worker, model in enumerate(models):
            (optimizer,), (falling,) = made[worker]
            optimizer.zero_grad()
            model.loss(data[worker][step], step).backward()
            optimizer.step()
            falling["scheduler"].step()
        under_way[:] = [(left - 1, common, sent) for left, common, sent in under_way]
        ends = step + 1 == steps
        take_over(at_once=ends)
        position += 1
        for part in range(fragments):
            if ends or position == -(-(part + 1) * length // fragments):
                send(part, delay)
        if position == length:
            position = 0
            if isinstance(every, GrowingRounds):
                before, rate = rate, RATE * FALL**step
                grown = max(every.base, int((every.alpha / rate) ** 2 + 1e-9))
                length = every.base if before is None else grown
        if ends or not delay:
            for _, common, _ in under_way:
                for own in named:
                    for n, weight in common.items():
                        own[n].data.copy_(weight)
            under_way.clear()
    return [plain(each) for each in models[0].parameters()]
