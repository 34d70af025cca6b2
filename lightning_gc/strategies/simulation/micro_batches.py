"""Between batches of a worker, which users and checkpoints count, and micro-batches of them all."""

from __future__ import annotations

from typing import Any

from lightning_gc.strategies.checkpoint.pytree import Tree

_PROGRESS = "epoch_loop.batch_progress"


class MicroBatches:
    """Makes a Trainer count W micro-batches where it is told to count one batch of a real worker.

    ``accumulate_grad_batches``, ``limit_train_batches`` and ``val_check_interval`` are multiplied
    by W where they are counts, for the time of a fit.

    Args:
        workers: W.
        trainer: whose settings are changed.

    Raises:
        ValueError: a number of accumulated batches that W workers cannot share; a callback that
            changes it.
    """

    def __init__(self, workers: int, trainer: Any) -> None:
        self.workers = workers
        self.trainer = trainer
        self._given: dict[str, Any] = {}
        given = trainer.accumulate_grad_batches
        if given != 1 and given % workers:
            raise ValueError(
                f"Trainer(accumulate_grad_batches={given}) with {workers} simulated workers: every "
                f"step takes the same number of micro-batches of each, so give 1, or a multiple "
                f"of {workers}; {workers * given} accumulates {given} for each worker."
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
        """Refuse an epoch that workers cannot share; call it when the training data is there.

        Raises:
            ValueError: a number of micro-batches that W does not divide.
        """
        workers, found = self.workers, self.trainer.num_training_batches
        if found != float("inf") and found % workers:
            raise ValueError(
                f"An epoch has {found} micro-batches, and {workers} simulated workers cannot share "
                f"them evenly. Use Trainer(limit_train_batches={found // workers}), which is "
                f"batches of each worker, or let Lightning deal the samples of a DataLoader: "
                f"use_distributed_sampler=True."
            )
        # A share of an epoch, such as val_check_interval=0.25, ends with a whole step's workers.
        every = self.trainer.val_check_batch
        if isinstance(every, int) and every % workers:
            self.trainer.val_check_batch = max(every - every % workers, workers)

    def restore(self) -> None:
        """Give the Trainer the user's settings back."""
        for name, value in self._given.items():
            setattr(self.trainer, name, value)
        self._given.clear()

    def _set(self, name: str, value: Any) -> None:
        self._given[name] = getattr(self.trainer, name)
        setattr(self.trainer, name, value)


def to_batches(checkpoint: Tree, workers: int) -> None:
    """Count batches of a worker in a checkpoint's loops, as a real worker's has them; in place."""
    for counts in _counts(checkpoint):
        counts["ready"], counts["started"] = (
            -(-counts[name] // workers) for name in ("ready", "started")
        )
        counts["processed"], counts["completed"] = (
            counts[name] // workers for name in ("processed", "completed")
        )


def to_micro_batches(checkpoint: Tree, workers: int) -> None:
    """Undo ``to_batches``, in place.

    Lightning looks at the differences to see what was under way: they stay as they are.
    """
    for counts in _counts(checkpoint):
        ready, processed = counts["ready"], counts["processed"]
        last = (ready if processed == ready else processed) * workers
        for name in ("ready", "started", "processed", "completed"):
            counts[name] = last + counts[name] - (ready if processed == ready else processed)


def _counts(checkpoint: Tree) -> list[dict[str, int]]:
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get(_PROGRESS, {})
    return [progress[name] for name in ("total", "current") if name in progress]
