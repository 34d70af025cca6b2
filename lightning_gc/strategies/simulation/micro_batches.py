"""MicroBatches: convert batches per worker (users, checkpoints) to micro-batches (the Trainer)."""

from __future__ import annotations

from typing import Any

from lightning_gc.synchronizer.pytree import Tree

_PROGRESS = "epoch_loop.batch_progress"


class MicroBatches:
    """Makes a Trainer run W micro-batches for each batch of a real worker.

    During a fit, ``accumulate_grad_batches``, ``limit_train_batches`` and ``val_check_interval``
    are multiplied by W where they are counts.

    Args:
        workers: W.
        trainer: its settings are changed.

    Raises:
        ValueError: ``accumulate_grad_batches`` that W does not divide; a callback that changes it.
    """

    def __init__(self, workers: int, trainer: Any) -> None:
        self.workers = workers
        self.trainer = trainer
        self._given: dict[str, Any] = {}
        given = trainer.accumulate_grad_batches
        if given != 1 and given % workers:
            raise ValueError(
                f"Trainer(accumulate_grad_batches={given}) with {workers} simulated workers: give "
                f"1, or a multiple of {workers}; {workers * given} accumulates {given} for each."
            )
        for callback in trainer.callbacks:
            if hasattr(callback, "going_to_accumulate_grad_batches"):
                raise ValueError(
                    f"{type(callback).__name__} changes accumulate_grad_batches, which simulated "
                    f"workers need for themselves. Remove it; Trainer(accumulate_grad_batches="
                    f"k*{workers}) accumulates k micro-batches for each of {workers} workers."
                )
        self._set("accumulate_grad_batches", workers if given == 1 else given)
        for name in ("limit_train_batches", "val_check_interval"):
            value = getattr(trainer, name)
            if isinstance(value, int):
                self._set(name, value * workers)

    def check_epoch(self) -> None:
        """Raise ValueError if W does not divide the epoch's number of micro-batches."""
        workers, found = self.workers, self.trainer.num_training_batches
        if found != float("inf") and found % workers:
            raise ValueError(
                f"An epoch has {found} micro-batches, and {workers} simulated workers cannot share "
                f"them evenly. Use Trainer(limit_train_batches={found // workers}), which is "
                f"batches of each worker, or let Lightning deal the samples of a DataLoader: "
                f"use_distributed_sampler=True."
            )
        # A share of an epoch, such as val_check_interval=0.25, must end with a whole step.
        every = self.trainer.val_check_batch
        if isinstance(every, int) and every % workers:
            self.trainer.val_check_batch = max(every - every % workers, workers)

    def restore(self) -> None:
        for name, value in self._given.items():
            setattr(self.trainer, name, value)
        self._given.clear()

    def _set(self, name: str, value: Any) -> None:
        self._given[name] = getattr(self.trainer, name)
        setattr(self.trainer, name, value)


def to_batches(checkpoint: Tree, workers: int) -> None:
    """Convert a checkpoint's loop counts to batches per worker, as of a real run; in place."""
    for counts in _counts(checkpoint):
        counts["ready"], counts["started"] = (
            -(-counts[name] // workers) for name in ("ready", "started")
        )
        counts["processed"], counts["completed"] = (
            counts[name] // workers for name in ("processed", "completed")
        )


def to_micro_batches(checkpoint: Tree, workers: int) -> None:
    """Undo ``to_batches``, in place.

    Differences between counts are kept: Lightning derives from them where the run was interrupted.
    """
    for counts in _counts(checkpoint):
        processed = counts["processed"]
        for name in ("ready", "started", "processed", "completed"):
            counts[name] += processed * (workers - 1)


def _counts(checkpoint: Tree) -> list[dict[str, int]]:
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get(_PROGRESS, {})
    return [progress[name] for name in ("total", "current") if name in progress]
