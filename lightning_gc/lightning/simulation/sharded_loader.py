"""Sharded loader: interleave W workers' DataLoaders, sharded as Lightning would for W processes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)


class Dealt:
    """Interleaves the workers' loaders: batch i is worker ``i % W``'s.

    Other attributes, such as ``batch_size`` and ``dataset``, are read from worker 0's loader.

    Args:
        loaders: one per worker, of equal length.
    """

    def __init__(self, loaders: Sequence[Any]) -> None:
        self.loaders = loaders
        self.sampler = self  # Lightning calls ``sampler.set_epoch``

    def __getattr__(self, name: str) -> Any:
        # Names with an underscore are each loader's own state, which Lightning and copies replace.
        if name.startswith("_") or name == "loaders":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loaders[0], name)

    def set_epoch(self, epoch: int) -> None:
        for loader in self.loaders:
            for holder in (loader, getattr(loader, "batch_sampler", None)):
                set_epoch = getattr(getattr(holder, "sampler", None), "set_epoch", None)
                if callable(set_epoch):
                    set_epoch(epoch)

    def __len__(self) -> int:
        return sum(len(loader) for loader in self.loaders)

    def __iter__(self) -> Iterator[Any]:
        return _interleaved([iter(loader) for loader in self.loaders])


class StatefulDealt(Dealt):
    """``Dealt`` of loaders that resume within an epoch; between steps all are equally far."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.loaders[0].state_dict()  # worker 0's, as in a real run
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for loader in self.loaders:
            loader.load_state_dict(state)


class Replayed:
    """Sampler that replays one epoch's indices to each of W workers."""

    def __init__(self, sampler: Any, workers: int) -> None:
        self._sampler = sampler
        self._workers = workers
        self._passes = 0
        self._indices: list[Any] = []

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        if self._passes % self._workers == 0:
            self._indices = list(self._sampler)
        self._passes += 1
        return iter(self._indices)


def deal(loader: Any, workers: int, trainer: Any, flavour: Any) -> Any:
    """Return a loader that shards samples as Lightning would for W processes.

    Like Lightning, this returns ``loader`` itself if it has a ``DistributedSampler`` or an iterable
    dataset, or is not a ``DataLoader``; its batch i goes to worker ``i % W``.

    Args:
        loader: the user's.
        workers: W.
        trainer: the Trainer, for ``use_distributed_sampler``.
        flavour: the strategy class, with Lightning's ``_sampler``, ``_with_sampler`` and
            ``_seed_workers``.
    """
    if not trainer._accelerator_connector.use_distributed_sampler or not is_dealable(loader):
        return loader
    _warn_of_repeated(loader, workers)
    given: Any = loader.sampler
    if not isinstance(given, RandomSampler | SequentialSampler):
        given = Replayed(given, workers)
    loaders = []
    for worker in range(workers):
        sampler = flavour._sampler(
            SimpleNamespace(sampler=given, dataset=loader.dataset),
            shuffle=True,  # as Lightning always does for training data
            overfit_batches=trainer.overfit_batches,
            mode=trainer.state.stage,
            num_replicas=workers,
            rank=worker,
        )
        loaders.append(flavour._with_sampler(loader, sampler, mode=trainer.state.stage))
        flavour._seed_workers(loaders[-1], worker)
    stateful = all(hasattr(each, "state_dict") for each in loaders)
    return StatefulDealt(loaders) if stateful else Dealt(loaders)


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


def _interleaved(iterators: Sequence[Iterator[Any]]) -> Iterator[Any]:
    end = object()
    while True:
        for iterator in iterators:
            batch = next(iterator, end)
            if batch is end:
                return
            yield batch
