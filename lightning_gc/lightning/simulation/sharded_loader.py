"""Sharded loader: interleave W workers' DataLoaders, sharded as Lightning would for W processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
)

from lightning_gc.core.copies import Single
from lightning_gc.lightning.simulation.own_state import is_stream, own_stream


class Dealt:
    """Interleaves the workers' loaders: batch i is worker ``i % W``'s.

    Other attributes, such as ``batch_size`` and ``dataset``, are read from worker 0's loader.

    Args:
        loaders: one per worker, of equal length.
        turn: begins a worker's turn, in which its loader draws random numbers; with None no one's.
    """

    def __init__(
        self, loaders: Sequence[Any], turn: Callable[[int | None], None] = lambda worker: None
    ) -> None:
        self.loaders, self._turn = loaders, turn
        self.sampler = self  # Lightning calls ``sampler.set_epoch``

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_turn": repr}  # a copy takes no part in a fit

    def __getattr__(self, name: str) -> Any:
        # Names with an underscore are each loader's own state, which Lightning and copies replace.
        if name.startswith("_") or name == "loaders":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loaders[0], name)

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers of each worker, in its turn."""
        for worker, loader in enumerate(self.loaders):
            self._turn(worker)
            holders = (loader, getattr(loader, "batch_sampler", None))
            samplers = [getattr(each, "sampler", None) for each in holders]
            for sampler in {id(each): each for each in samplers}.values():  # each once
                if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                    set_epoch(epoch)
        self._turn(None)

    def __len__(self) -> int:
        return sum(len(loader) for loader in self.loaders)

    def __iter__(self) -> Iterator[Any]:
        first, *others = (vars(loader).get("batch_sampler") for loader in self.loaders)
        if first is not None:  # a number that the user has set, by ``trainer.train_dataloader``
            numbers = {n: v for n, v in vars(first).items() if isinstance(v, int | float | str)}
            for each in others:
                vars(each).update(numbers)
        iterators = []
        for worker, loader in enumerate(self.loaders):
            self._turn(worker)
            iterators.append(iter(loader))
        self._turn(None)
        return Interleaved(iterators, self._turn)


class Interleaved(Single, Iterator[Any]):
    """Batches of the workers' iterators in turn."""

    def __init__(
        self, iterators: Sequence[Iterator[Any]], turn: Callable[[int | None], None]
    ) -> None:
        self._iterators, self._turn, self._worker = iterators, turn, 0

    def __next__(self) -> Any:
        self._turn(self._worker)
        try:
            batch = next(self._iterators[self._worker])
        except StopIteration:
            self._turn(None)
            raise
        self._worker = (self._worker + 1) % len(self._iterators)
        return batch


class StatefulDealt(Dealt):
    """``Dealt`` of loaders that resume within an epoch; between steps all are equally far."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.loaders[0].state_dict()  # worker 0's, as in a real run
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for loader in self.loaders:
            loader.load_state_dict(state)


def deal(
    loader: Any,
    workers: int,
    trainer: Any,
    flavour: Any,
    turn: Callable[[int | None], None],
) -> Any:
    """Return a loader that shards samples as Lightning would for W processes.

    Like Lightning, this returns ``loader`` itself if it has a ``DistributedSampler`` or an iterable
    dataset, or is not a ``DataLoader``; its batch i goes to worker ``i % W``.

    Args:
        loader: the user's.
        workers: W.
        trainer: the Trainer, for ``use_distributed_sampler``.
        flavour: the strategy class, with Lightning's ``_sampler``, ``_with_sampler`` and
            ``_seed_workers``.
        turn: as for ``Dealt``.
    """
    if not trainer._accelerator_connector.use_distributed_sampler or not is_dealable(loader):
        return loader
    _warn_of_repeated(loader, workers)
    loaders = []
    for worker in range(workers):
        sampler = flavour._sampler(
            SimpleNamespace(sampler=loader.sampler, dataset=loader.dataset),
            shuffle=True,  # as Lightning always does for training data
            overfit_batches=trainer.overfit_batches,
            mode=trainer.state.stage,
            num_replicas=workers,
            rank=worker,
        )
        loaders.append(flavour._with_sampler(loader, sampler, mode=trainer.state.stage))
        flavour._seed_workers(loaders[-1], worker)
        for holder in (loaders[-1], loaders[-1].batch_sampler) if worker else ():
            fields = getattr(holder, "__dict__", {})  # with streams that go on by themselves
            fields |= {name: own_stream(each) for name, each in fields.items() if is_stream(each)}
    stateful = all(hasattr(each, "state_dict") for each in loaders)
    kind = StatefulDealt if stateful else Dealt
    return kind(loaders, turn)


def _warn_of_repeated(loader: Any, workers: int) -> None:
    samples = len(loader.sampler)
    if 0 < samples < workers:
        warnings.warn(
            f"{workers} workers share {samples} samples of an epoch. As with processes, "
            f"{workers - samples} of them repeat another worker's sample, so a step sees the data "
            f"of {samples} workers. Use workers={samples} or fewer, or more data.",
            stacklevel=2,
        )


def is_dealable(loader: Any) -> bool:
    """Return whether Lightning would shard its samples, if ``use_distributed_sampler`` is true."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.sampler, DistributedSampler)
        and not isinstance(loader.dataset, IterableDataset)
    )
