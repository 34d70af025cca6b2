"""One loader that deals micro-batches to simulated workers, as W loaders would have."""

from __future__ import annotations

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
    """Takes a batch of each worker's loader in turn: number i is worker ``i % W``'s.

    Args:
        loaders: of the workers, all of one length.
    """

    def __init__(self, loaders: Sequence[Any]) -> None:
        self.loaders = loaders
        self.sampler = self  # where Lightning looks for ``set_epoch``

    def set_epoch(self, epoch: int) -> None:
        """Shuffle anew, in every worker's loader."""
        for loader in self.loaders:
            for holder in (loader, getattr(loader, "batch_sampler", None)):
                set_epoch = getattr(getattr(holder, "sampler", None), "set_epoch", None)
                if callable(set_epoch):
                    set_epoch(epoch)

    def __len__(self) -> int:
        return sum(len(loader) for loader in self.loaders)

    def __iter__(self) -> Iterator[Any]:
        return _turns([iter(loader) for loader in self.loaders])


class StatefulDealt(Dealt):
    """One whose loaders can go on within an epoch; between steps they all have come equally far."""

    def state_dict(self) -> dict[str, Any]:
        """Return worker 0's state, which is what a real run saves."""
        state: dict[str, Any] = self.loaders[0].state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with it in every worker's loader."""
        for loader in self.loaders:
            loader.load_state_dict(state)


class Replayed:
    """A sampler that is asked by W workers in a row and tells all of them the same."""

    def __init__(self, sampler: Any, workers: int) -> None:
        self._sampler = sampler
        self._workers = workers
        self._asked = 0
        self._said: list[Any] = []

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        if self._asked % self._workers == 0:
            self._said = list(self._sampler)
        self._asked += 1
        return iter(self._said)


def deal(loader: Any, workers: int, trainer: Any, flavour: Any) -> Any:
    """Return a loader that deals the samples as Lightning would to W processes, or ``loader``.

    Lightning leaves alone what has a ``DistributedSampler`` already, iterable datasets, and what is
    no ``DataLoader``; so do we, and the batches of such a loader go to the workers in turn.

    Args:
        loader: the user's.
        workers: W.
        trainer: a Trainer with ``use_distributed_sampler``, or without.
        flavour: has Lightning's own ``_sampler``, ``_with_sampler`` and ``_seed_workers``.
    """
    if (
        not trainer._accelerator_connector.use_distributed_sampler
        or not isinstance(loader, DataLoader)
        or isinstance(loader.sampler, DistributedSampler)
        or isinstance(loader.dataset, IterableDataset)
    ):
        return loader
    given: Any = loader.sampler
    if not isinstance(given, RandomSampler | SequentialSampler):
        given = Replayed(given, workers)
    loaders = []
    for worker in range(workers):
        sampler = flavour._sampler(
            SimpleNamespace(sampler=given, dataset=loader.dataset),
            shuffle=True,  # of training data always, whatever the loader says
            overfit_batches=trainer.overfit_batches,
            mode=trainer.state.stage,
            num_replicas=workers,
            rank=worker,
        )
        loaders.append(flavour._with_sampler(loader, sampler, mode=trainer.state.stage))
        flavour._seed_workers(loaders[-1], worker)
    stateful = all(hasattr(each, "state_dict") for each in loaders)
    return StatefulDealt(loaders) if stateful else Dealt(loaders)


def _turns(iterators: Sequence[Iterator[Any]]) -> Iterator[Any]:
    end = object()
    while True:
        for iterator in iterators:
            batch = next(iterator, end)
            if batch is end:
                return
            yield batch
