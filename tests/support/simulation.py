"""The same fit by real processes and by simulated workers, and what is left of it to compare."""

import types
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gc.strategies.for_pytorch_lightning import (
    CompressedDDPStrategy,
    CompressionMonitor,
    SimulatedDDPStrategy,
)
from tests.fits import digest
from tests.resumes import Crashed


class Plain(pl.LightningModule):
    """Learns to double its input, and notes which rows it has seen."""

    def __init__(self, rate: float = 0.02) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 40))
        self.head = nn.Linear(40, 4)
        self.rate = rate
        self.seen: list[list[float]] = []
        self.levels: list[dict[str, float | None]] = []

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        output: Tensor = self.head(self.body(batch))
        return (output - batch[:, :4] * 2).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch[:, 0].tolist())
        return self.loss(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.levels.append(self.trainer.strategy.levels())  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)


def rows(count: int = 120) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(7))


def loader(count: int = 120, size: int = 4, **arguments: Any) -> DataLoader[Tensor]:
    return DataLoader(rows(count), size, **arguments)  # type: ignore[arg-type]


def fit(
    strategy: Any,
    module: type[pl.LightningModule] = Plain,
    batch_size: int = 4,
    devices: int = 1,
    data: Any = None,
    resume: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Fit on an ordinary shuffled DataLoader."""
    torch.manual_seed(0)
    model = module()
    settings = {
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        **settings,
    }
    settings["callbacks"] = [CompressionMonitor(), *settings.get("callbacks", [])]
    trainer = pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **settings)
    data = loader(size=batch_size, shuffle=True) if data is None else data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning has advice for fits as small as these
        try:
            trainer.fit(model, data, ckpt_path=resume)
        except Crashed:
            return {}
    assert all(p.isfinite().all() for p in model.parameters()), "nothing to compare"
    metrics = {n: float(v) for n, v in trainer.callback_metrics.items()}
    return {
        "digest": digest(model),
        "parameters": [p.detach().numpy() for p in model.parameters()],
        "buffers": [b.detach().numpy() for b in model.buffers()],
        "seen": getattr(model, "seen", None),
        "levels": getattr(model, "levels", None),
        "owed": getattr(model, "owed", None),
        "steps": trainer.global_step,
        "errors": [
            {n: e.numpy().tobytes() for n, e in engine.errors().items()}
            for engine in strategy.engines
        ],
        "metrics": {n: v for n, v in metrics.items() if "seconds" not in n},
        "seconds": {n: v for n, v in metrics.items() if "seconds" in n},
        "controller": strategy.control_loop.state if strategy.control_loop else None,
    }


def real(worker: int, workers: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit each case as one of several processes."""
    results = []
    for case in cases:
        case = dict(case)
        options = case.pop("options", {})
        strategy = CompressedDDPStrategy(
            case.pop("compressor"), process_group_backend="gloo", **options
        )
        results.append(fit(strategy, devices=workers, **made(case)))
    return results


def simulated(workers: int, case: dict[str, Any]) -> dict[str, Any]:
    """Fit one case with simulated workers, on one thread, as the real ones have."""
    case = dict(case)
    options = case.pop("options", {})
    strategy = SimulatedDDPStrategy(case.pop("compressor"), workers=workers, **options)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return fit(strategy, **made(case))
    finally:
        torch.set_num_threads(threads)


def made(case: dict[str, Any]) -> dict[str, Any]:
    """Call what has to be made anew for each fit, in the process that it is for."""
    lazy = types.FunctionType
    return {name: value() if isinstance(value, lazy) else value for name, value in case.items()}
