"""Callback for the Trainer of transformers, and for TRL's, which derive from it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "lightning_gc.huggingface needs transformers, which is not installed. Install the extra: "
        "pip install 'lightning-gc[huggingface]'."
    ) from error

from lightning_gc.attachment.attached import Attached
from lightning_gc.attachment.plain_torch import attach, refuse_unknown
from lightning_gc.core.refusal import refuse
from lightning_gc.transports.base import all_reduce_bytes


class CompressedGradients(TrainerCallback):
    """Compresses the gradients that a Trainer of transformers exchanges; adds itself to it.

    When training begins it attaches to the model, which the Trainer has wrapped in
    ``DistributedDataParallel`` by then. Every checkpoint gets a file of each worker with its
    errors, ``compression-worker0.pt`` and so on. ``resume_from_checkpoint`` reads them, so that a
    resumed run with as many workers continues bit for bit. A new ``train()`` begins without errors.

    Each entry of the Trainer's log with a loss of training gets three figures since training began:
    ``compression/total_wire_bytes`` are worker 0's bytes, ``compression/total_dense_bytes`` plain
    DDP's, and ``compression/total_ratio`` is their ratio. Nothing else in the log changes.

    Args:
        trainer: a ``transformers.Trainer``, such as ``trl.SFTTrainer``.
        settings: of ``attach``: compressor, memory, scheme, controller.
        options: further ones, such as ``min_numel=0``. Optimizer and scaler are the Trainer's.

    Attributes:
        handle: of ``attach``; None before training.

    Raises:
        ValueError: when training begins: the model is not in ``DistributedDataParallel``, since
            there is one worker, or FSDP or DeepSpeed.

    Example:
        >>> CompressedGradients(trainer, QSGD(bits=4))  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(self, trainer: Any, *settings: Any, **options: Any) -> None:
        refuse_unknown("CompressedGradients", options)
        self.trainer, self.settings, self.options = trainer, settings, options
        self.handle: Attached | None = None
        self._sent = self._dense = self._first = 0
        trainer.add_callback(self)
        # First, so that W&B and TensorBoard see our figures, and uploads of checkpoints our file.
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop())

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Attach to the wrapped model; load this worker's errors if a run is resumed."""
        if self.handle is not None:  # of a training that an exception has ended
            self.handle.end(failed=True)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            raise RuntimeError(
                "CompressedGradients: this process trains alone, so nothing is sent. Start it by "
                "torchrun --nproc-per-node 2, or leave CompressedGradients out."
            )
        scaler = self.trainer.accelerator.scaler
        self.handle = attach(
            self.trainer.model_wrapped,
            *self.settings,
            optimizers=self.trainer.optimizer,
            scaler=scaler,
            **self.options,
        )
        self.handle.advise(
            bypassed="Call the wrapped model in compute_loss, not the one that it was made of",
            unused="TrainingArguments(ddp_find_unused_parameters=True)",
            elsewhere="A loss with parameters belongs into the model, as a submodule of it.",
        )
        trained = [p for p in self.trainer.model.parameters() if p.requires_grad]
        nbytes = sum(param.numel() * param.element_size() for param in trained)
        self._dense = all_reduce_bytes(nbytes, dist.get_world_size())
        self._sent, self._first = 0, state.global_step
        if state.global_step:
            self.handle.load_state_dict(read_state(own_file(resumed_from(self.trainer))))

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Let a controller decide, if a decision is due."""
        handle = self._attached()
        if handle.control is not None:
            share = state.global_step / max(state.max_steps, 1)
            handle.begin_batch(int(state.epoch or 0), progress=share, total_steps=state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        """Add what was sent to an entry with a loss of training; see ``Trainer.log``."""
        # Not by a log of our own: the Trainer would then take this step as logged.
        if self.handle is not None and {"loss", "train_loss"} & {*(logs or ())}:
            figures = self._figures(state)
            for entry in (logs, *state.log_history[-1:]):  # the Trainer has kept a copy
                entry.update(figures)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Save what this worker has not sent yet; the other workers have other errors."""
        file = own_file(saved_to(self.trainer))
        file.parent.mkdir(parents=True, exist_ok=True)  # on its own disk this worker may be first
        torch.save(self._attached().state_dict(), file)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Stop the exchange."""
        self._attached().close()

    def _attached(self) -> Attached:
        if self.handle is None:
            raise RuntimeError(
                "CompressedGradients was added while the Trainer trained, so it is not attached. "
                "Make it before trainer.train()."
            )
        return self.handle

    def _figures(self, state: Any) -> dict[str, float]:
        self._sent += self._attached().account().wire_bytes
        dense = self._dense * (state.global_step - self._first)
        return {
            "compression/total_wire_bytes": self._sent,
            "compression/total_dense_bytes": dense,
            "compression/total_ratio": dense / max(self._sent, 1),
        }


def saved_to(hosting: Any) -> Path:
    """Return the folder of the checkpoint that a Trainer writes at this step."""
    folder = Path(hosting._get_output_dir(getattr(hosting, "_trial", None)))  # of a search, its run
    return folder / f"checkpoint-{hosting.state.global_step}"


def resumed_from(trainer: Any) -> Path:
    """Return the folder of the checkpoint that a Trainer resumes from, as training begins.

    It hands the path from method to method and keeps it nowhere, so this reads its caller's. A path
    noted in the checkpoint itself would be false once the folder is moved.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        path = frame.f_locals.get("resume_from_checkpoint")
        if frame.f_locals.get("self") is trainer and isinstance(path, str | Path):
            return Path(path)
    return saved_to(trainer)


def own_file(folder: Path) -> Path:
    """Return where this worker keeps its errors in a checkpoint."""
    return folder / f"compression-worker{dist.get_rank()}.pt"


def read_state(path: Path) -> Any:
    """Return a worker's state.

    Raises:
        ValueError: the checkpoint has no file of this worker.
    """
    if not path.is_file():
        found = sorted(each.name for each in path.parent.glob("compression-worker*.pt"))
        cause = (
            f"the checkpoint has only {', '.join(found)}: fewer workers wrote it, or other machines"
            if found
            else "no worker's errors are in the checkpoint, which was written without "
            "CompressedGradients"
        )
        refuse(
            f"{path} is missing, so this worker's errors cannot be resumed: {cause}. Start from "
            "the checkpoint's weights without resume_from_checkpoint"
        )
    return torch.load(path, weights_only=True, map_location="cpu")
