"""Modules that Muon and AdamW train: as one optimizer, or each by hand."""

from typing import Any

import torch
from torch.optim import lr_scheduler as lrs

from lightning_gc import Together
from tests.support.models import Plain

MUON: Any = getattr(torch.optim, "Muon", torch.optim.SGD)
"""Muon, with torch 2.9 or later."""


def parts(module: torch.nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Return Muon for the matrices of the body, and AdamW for all other parameters."""
    muon = [p for name, p in module.named_parameters() if p.ndim == 2 and "body" in name]
    adam = [p for name, p in module.named_parameters() if p.ndim != 2 or "body" not in name]
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    return MUON(muon, **settings), torch.optim.AdamW(adam, lr=0.01)


class Joined(Plain):
    """Trained by both as one, each at its own schedule."""

    def configure_optimizers(self) -> Any:
        muon, adam = parts(self)
        optimizer = Together([muon, adam])
        schedulers = [lrs.ExponentialLR(muon, 0.9), lrs.LinearLR(adam, 0.1, total_iters=8)]
        line = optimizer.scheduler(schedulers)
        return [optimizer], [{"scheduler": line, "interval": "step"}]


class ByHand(Plain):
    """The same by manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        both: Any = self.optimizers()
        for optimizer in both:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch, batch_idx))
        for optimizer in both:
            optimizer.step()
        lines: Any = self.lr_schedulers()
        for line in lines:
            line.step()

    def configure_optimizers(self) -> Any:
        muon, adam = parts(self)
        return [muon, adam], [lrs.ExponentialLR(muon, 0.9), lrs.LinearLR(adam, 0.1, total_iters=8)]
