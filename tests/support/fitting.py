"""The one way in which tests train: a quiet Trainer, and what a fit leaves behind."""

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_gc.lightning.for_pytorch_lightning import CompressedDDPStrategy
from tests.support.accelerator import BACKEND, DEVICE, spread


class Crashed(Exception):
    """What a test raises to end a run, as whatever may happen would."""


def quiet_trainer(strategy: Any, **settings: Any) -> pl.Trainer:
    """Return a Trainer that trains an epoch; it logs, prints and saves what it is told to."""
    callbacks = settings.get("callbacks", ())
    quiet: dict[str, Any] = {
        "accelerator": DEVICE,
        "devices": 1,
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": any(isinstance(each, Checkpoint) for each in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    together = quiet | settings
    return pl.Trainer(strategy=strategy, **together | spread(together["devices"]))


def fit(
    strategy: Any,
    module: Callable[[], Any],
    batches: Any,
    validation: Any = None,
    resume: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train from the weights that seed 0 gives; return what the fit has left, {} after a crash.

    Args:
        strategy: of the Trainer.
        module: makes the module, after the seed is set.
        batches: the training data, or what makes it then.
        validation: its data, if any.
        resume: the checkpoint to go on from.
        settings: of the Trainer.
    """
    torch.manual_seed(0)
    model = module()
    trainer = quiet_trainer(strategy, **settings)
    try:
        batches = batches() if callable(batches) else batches
        trainer.fit(model, batches, validation, ckpt_path=resume)
    except Crashed:
        return {}
    return left_by(trainer)


SHARES_OF_TIME = tuple(f"{e}_share" for e in ("compress", "communicate", "decode", "compute"))


def left_by(trainer: pl.Trainer) -> dict[str, Any]:
    """Return plain values and arrays, which travel between processes without sharing memory.

    Of each worker of this process: ``memory`` has all that its memory keeps, as bytes, which are
    the same or not; ``errors`` are numbers to calculate with. Seconds, and shares of them, are
    apart from ``metrics``: no two runs agree on them.
    """
    strategy: Any = trainer.strategy
    module: Any = trainer.lightning_module
    engines = getattr(strategy, "engines", ())
    states = [engine.state_dict() for engine in engines]
    turn = getattr(strategy, "control_loop", None)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    times = {name for name in metrics if "seconds" in name or name.endswith(SHARES_OF_TIME)}
    return {
        "digest": digest(module),
        "parameters": [plain(each) for each in module.parameters()],
        "buffers": [plain(each) for each in module.buffers()],
        "steps": trainer.global_step,
        "rounds": [engine.step for engine in engines],
        "errors": [arrays(engine.errors()) for engine in engines],
        "memory": [
            {
                f"{n} {b}": t.cpu().numpy().tobytes()
                for n, kept in s["memory"].items()
                for b, t in kept.items()
            }
            for s in states
        ],
        "levels": strategy.levels() if engines else None,
        "controller": turn.state if turn else None,
        "reason": turn.decision.reason if turn and turn.decision else "",
        "metrics": {name: value for name, value in metrics.items() if name not in times},
        "seconds": {name: metrics[name] for name in times},
        **(module.noted() if hasattr(module, "noted") else {}),
    }


@contextlib.contextmanager
def unwarned() -> Iterator[None]:
    """Lightning warns of much that is not ours, and warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def ddp(compressor: Any = None, **options: Any) -> DDPStrategy:
    """Return the strategy of a worker that runs in a process of its own.

    With no compressor it is Lightning's own.
    """
    if compressor is None:
        return DDPStrategy(process_group_backend=BACKEND, **options)
    return CompressedDDPStrategy(compressor, process_group_backend=BACKEND, **options)


def arrays(named: dict[str, Tensor]) -> dict[str, Any]:
    """Return what is in float64, by the names that parameters have without ``torch.compile``."""
    return {
        n.replace("_orig_mod.", ""): t.detach().double().cpu().numpy() for n, t in named.items()
    }


def plain(tensor: Tensor) -> Any:
    """Return an array; NumPy has no bfloat16."""
    wide = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
    return tensor.detach().to(wide).cpu().numpy()


def digest(module: nn.Module) -> str:
    """Return a hash of all parameters: two are equal if every bit is."""
    flats = [p.detach().contiguous().view(-1).view(torch.uint8) for p in module.parameters()]
    parts = [flat.cpu().numpy().tobytes() for flat in flats]
    return hashlib.sha256(b"".join(parts)).hexdigest()
