"""MicroBatches: convert batches per worker (users, checkpoints) to micro-batches (the Trainer)."""

from __future__ import annotations

from typing import Any

from lightning_gc.core.pytree import Tree
from lightning_gc.lightning.simulation.sharded_loader import is_dealable

_PROGRESS = "epoch_loop.batch_progress"


class MicroBatches:
    """Makes a Trainer run W micro-batches for each batch of a real worker.

    During a fit, ``accumulate_grad_batches``, ``limit_train_batches`` and ``val_check_interval``
    are multiplied by W where they are counts, and rounded to whole steps where they are shares.

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
            elif isinstance(value, float) and 0 < value < 1:
                given_as = name
                if name == "limit_train_batches" and trainer.overfit_batches > 0:
                    given_as = "overfit_batches"
                self._set(name, Share.of(value, workers, given_as))

    def check_epoch(self) -> None:
        """Raise ValueError if W does not divide the epoch's number of micro-batches."""
        workers, found = self.workers, self.trainer.num_training_batches
        if found == float("inf") or found % workers == 0:
            return
        fixes = []
        if found > workers:
            fixes.append(
                f"Trainer(limit_train_batches={found // workers}), in batches of each worker, "
                f"which leaves out the rest"
            )
        if not self.trainer._accelerator_connector.use_distributed_sampler:
            loaders = self.trainer.fit_loop._combined_loader.flattened
            if all(is_dealable(loader) for loader in loaders):
                fixes.append("Trainer(use_distributed_sampler=True), which shares out the samples")
        fixes = fixes or [f"at least {workers} batches"]
        raise ValueError(
            f"An epoch has {found} micro-batches, and {workers} simulated workers cannot share "
            f"them evenly. Use {', or '.join(fixes)}."
        )

    def restore(self) -> None:
        for name, value in self._given.items():
            setattr(self.trainer, name, value)
        self._given.clear()

    def _set(self, name: str, value: Any) -> None:
        self._given[name] = getattr(self.trainer, name)
        setattr(self.trainer, name, value)


class Share(float):
    """Share of an epoch that Lightning multiplies by the epoch's number of micro-batches.

    The product is W times what a real worker's Lightning computes, ``int(batches * share)``, also
    where a product of floats is a little less than a whole number.
    """

    workers: int
    given_as: str

    @classmethod
    def of(cls, share: float, workers: int, given_as: str) -> Share:
        made = cls(share)
        made.workers, made.given_as = workers, given_as
        return made

    def __mul__(self, micro_batches: Any) -> Any:
        own = micro_batches // self.workers
        batches = int(own * float(self))
        if self.given_as == "val_check_interval":
            batches = max(batches, 1)  # as Lightning does
        if batches == 0:
            raise ValueError(
                f"Trainer({self.given_as}={float(self)}) is less than one of the {own} batches "
                f"that each of {self.workers} simulated workers has. Use a larger share, or a "
                f"number of batches of each worker, such as {self.given_as}=1."
            )
        return batches * self.workers

    __rmul__ = __mul__


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
