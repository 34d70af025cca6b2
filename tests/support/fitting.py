"""A Lightning module that keeps its own books, and the fits that tests make of it."""

import hashlib
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gc.strategies.for_pytorch_lightning import CompressedDDPStrategy

Grads = dict[str, Tensor]


class Books(pl.LightningModule):
    """Adds up what every worker's own gradient was and what the optimizer was given.

    ``local`` is computed beside DDP by ``torch.autograd.grad``, ``applied`` is read from ``.grad``
    after synchronisation. Steps whose gradient is not finite count in neither, as AMP skips them.
    """

    def __init__(self, compiled: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 40))
        if compiled:
            self.body = torch.compile(self.body, backend="eager")  # type: ignore[assignment]
        self.head = nn.Linear(40, 4)
        self.local: Grads = {}
        self.applied: Grads = {}
        self.pending: Grads = {}
        self.losses: list[float] = []
        self.skipped = 0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x))
        return result

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch) - batch[:, :4] * 2).square().mean()

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


def add(sums: Grads, name: str, value: Tensor) -> None:
    sums[name] = sums.get(name, torch.zeros_like(value)) + value.detach()


def data(worker: int, batches: int, loud: int | None = None) -> DataLoader[Tensor]:
    """Different batches for every worker; ``loud``: the worker whose first ones are too large."""
    g = torch.Generator().manual_seed(worker)
    rows = torch.randn(batches * 16, 8, generator=g)
    if loud == worker:
        rows[16 * 6 : 16 * 7] *= 1e4
    return DataLoader(rows, batch_size=16)  # type: ignore[arg-type]


def fit(
    worker: int,
    workers: int,
    compressor: Any = None,
    model: str = "Books",
    steps: int = 20,
    precision: Any = None,
    accumulate: int = 1,
    loud: int | None = None,
    compiled: str = "",
    **arguments: Any,
) -> dict[str, Any]:
    """Fit in this process as one of several; ``compressor=None`` is Lightning's own DDP."""
    torch.manual_seed(0)
    module = Books(compiled=True) if compiled == "inside" else globals()[model]()
    if compressor is None:
        strategy: DDPStrategy = DDPStrategy(process_group_backend="gloo", **arguments)
    else:
        strategy = CompressedDDPStrategy(compressor, process_group_backend="gloo", **arguments)
    settings: dict[str, Any] = {"precision": precision} if isinstance(precision, str) else {}
    if precision is not None and not settings:
        settings["plugins"] = [precision]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=workers,
        strategy=strategy,
        max_steps=steps * (2 if model == "Manual" else 1),
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    whole = torch.compile(module, backend="eager") if compiled == "outside" else module
    trainer.fit(whole, data(worker, steps * accumulate, loud))  # type: ignore[arg-type]
    engine = getattr(strategy, "engine", None)
    errors = {}
    if engine is not None:
        engine.loss_scaling.settle()
        errors = {name: error.double() for name, error in engine.errors().items()}
    return {
        "parameters": digest(module),
        "losses": module.losses,
        "local": numbers(module.local),
        "applied": numbers(module.applied),
        "errors": numbers(errors),
        "skipped": module.skipped,
        "rounds": engine.step if engine else None,
    }


def numbers(named: Grads) -> dict[str, Any]:
    """Plain arrays, which travel between processes without sharing memory."""
    return {name.replace("_orig_mod.", ""): t.detach().numpy() for name, t in named.items()}


def digest(module: nn.Module) -> str:
    flats = [p.detach().contiguous().view(-1).view(torch.uint8) for p in module.parameters()]
    parts = [flat.numpy().tobytes() for flat in flats]
    return hashlib.sha256(b"".join(parts)).hexdigest()
