"""Small modules that keep their own books of what was computed and applied, and their data."""

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.fitting import arrays, digest

Sums = dict[str, Tensor]


class Doubling(pl.LightningModule):
    """Learns to double its input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 40))
        self.head = nn.Linear(40, 4)

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        output: Tensor = self.head(self.body(batch))
        return (output - batch[:, :4] * 2).square().mean()


class Books(Doubling):
    """Adds up what every worker's own gradient was and what the optimizer was given.

    ``local`` is computed beside DDP by ``torch.autograd.grad``, ``applied`` is read from ``.grad``
    after synchronisation. Steps whose gradient is not finite count in neither, as AMP skips them.
    """

    def __init__(self, compiled: bool = False) -> None:
        super().__init__()
        if compiled:
            self.body = torch.compile(self.body, backend="eager")  # type: ignore[assignment]
        self.local: Sums = {}
        self.applied: Sums = {}
        self.pending: Sums = {}
        self.losses: list[float] = []
        self.skipped = 0

    def noted(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "local": arrays(self.local),
            "applied": arrays(self.applied),
            "skipped": self.skipped,
        }

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch, batch_idx)
        self.note_local(loss, 1 / self.trainer.accumulate_grad_batches)
        self.losses.append(float(loss.detach()))
        return loss

    def note_local(self, loss: Tensor, weight: float = 1.0) -> None:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        scale = scaler.get_scale() if scaler else 1.0
        trained = [(n, p) for n, p in self.named_parameters() if p.requires_grad]
        names, params = zip(*trained, strict=True)
        grads = torch.autograd.grad(loss * scale, params, retain_graph=True, allow_unused=True)
        for name, grad in zip(names, grads, strict=True):
            if grad is not None:
                add(self.pending, name, grad.double() * weight / scale)

    def note_applied(self) -> None:
        grads = {n: p.grad for n, p in self.named_parameters() if p.grad is not None}
        if all(grad.isfinite().all() for grad in grads.values()):
            for name, grad in grads.items():
                add(self.applied, name, grad.double())
            for name, grad in self.pending.items():
                add(self.local, name, grad)
        else:
            self.skipped += 1
        self.pending = {}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.automatic_optimization:
            self.note_applied()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Votes(Books):
    """At a rate for gradients of ±1 in every element."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.002)


class Scheduled(Books):
    """Counts in units of the update: learning rate times gradient, the rate falling each step."""

    def note_applied(self) -> None:
        rate = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
        for name, p in self.named_parameters():
            add(self.applied, name, rate * p.grad.double())  # type: ignore[union-attr]
            add(self.local, name, rate * self.pending[name])
        self.pending = {}
        self.last_rate = rate

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), lr=0.1)
        falling = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.8)
        return [sgd], [{"scheduler": falling, "interval": "step"}]

    def on_train_end(self) -> None:
        for error in self.trainer.strategy.engine.errors().values():  # type: ignore[attr-defined]
            error.mul_(self.last_rate)


class Ahead(Books):
    """Notes the weights that each forward pass sees, as a digest."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def noted(self) -> dict[str, Any]:
        return super().noted() | {"seen": self.seen}

    def loss(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(digest(self))
        return super().loss(batch, batch_idx)


class Branches(Books):
    """Uses one of two heads by turns; worker 1 turns one step later, so some are used by one."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(40, 4)

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        turn = (batch_idx + (self.global_rank if batch_idx % 4 == 3 else 0)) % 2
        head = self.other if turn else self.head
        return (head(self.body(batch)) - batch[:, :4] * 2).square().mean()


class Manual(Books):
    """Two optimizers and two backwards a step, like a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        body, head = self.optimizers()  # type: ignore[misc, attr-defined]
        for optimizer, weight in ((body, 1.0), (head, 0.5)):
            optimizer.zero_grad()
            self.zero_grad()
            loss = self.loss(batch, batch_idx) * weight
            self.note_local(loss)
            self.manual_backward(loss)
            self.note_applied()
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.body.parameters(), lr=0.1),
            torch.optim.SGD(self.head.parameters(), lr=0.1),
        ]


class Plain(Doubling):
    """Notes which rows it has seen, and the level of every step."""

    def __init__(self, rate: float = 0.02) -> None:
        super().__init__()
        self.rate = rate
        self.seen: list[list[float]] = []
        self.levels: list[dict[str, float | None]] = []

    def noted(self) -> dict[str, Any]:
        return {"seen": self.seen, "levels of steps": self.levels}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch[:, 0].tolist())
        return self.loss(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.levels.append(self.trainer.strategy.levels())  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)


class PlainSGD(Plain):
    """SGD without momentum, with whatever else is asked for."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate, **self.arguments)


def add(sums: Sums, name: str, value: Tensor) -> None:
    sums[name] = sums.get(name, torch.zeros_like(value)) + value.detach()


def own_batches(worker: int, batches: int, loud: int | None = None) -> DataLoader[Tensor]:
    """Return other rows for every worker; ``loud``: the batch that is too large for float16."""
    rows = torch.randn(batches * 16, 8, generator=torch.Generator().manual_seed(worker))
    if loud is not None:
        rows[16 * loud : 16 * (loud + 1)] *= 1e4
    return DataLoader(rows, batch_size=16)  # type: ignore[arg-type]


def common_rows(count: int = 120) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(7))


def common_batches(count: int = 120, size: int = 4, **arguments: Any) -> DataLoader[Tensor]:
    """Return rows that the Trainer shares out to workers."""
    return DataLoader(common_rows(count), size, **arguments)  # type: ignore[arg-type]


class GoesOn(DataLoader[Tensor]):
    """Goes on within an epoch, as torchdata's StatefulDataLoader does."""

    given = start = 0

    def __iter__(self) -> Any:
        start, self.start = self.start, 0
        self.given = start
        for number, batch in enumerate(super().__iter__()):
            if number >= start:
                self.given += 1
                yield batch
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["given"]
