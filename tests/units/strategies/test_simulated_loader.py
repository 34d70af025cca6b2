"""The loader of simulated workers shows what a user's own would."""

import copy
import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
from torch.utils.data import DataLoader

from lightning_gc import TopK
from lightning_gc.lightning.for_pytorch_lightning import SimulatedDDPStrategy
from lightning_gc.lightning.simulation.sharded_loader import Dealt
from tests.support.fitting import fit, unwarned
from tests.support.models import Plain, common_batches


class Looks(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, _: Any) -> None:
        self.loader = trainer.train_dataloader


def test_it_has_the_batch_size_and_data_of_a_workers_loader() -> None:
    looks = Looks()
    batches: Any = common_batches(48, 4)
    with unwarned():
        fit(SimulatedDDPStrategy(TopK(0.1), workers=2), Plain, batches, callbacks=[looks])
    assert isinstance(looks.loader, Dealt)
    assert looks.loader.batch_size == 4
    assert looks.loader.dataset is batches.dataset
    assert looks.loader.num_workers == 0
    with pytest.raises(AttributeError, match="no attribute 'batch_sise'"):
        looks.loader.batch_sise  # noqa: B018


def test_what_is_a_loaders_own_is_not_shown() -> None:
    """Lightning shuts down ``loader._iterator`` and sets it to None, on what it has asked."""
    loaders: list[Any] = [DataLoader([1, 2]), DataLoader([3, 4])]  # type: ignore[arg-type]
    dealt = Dealt(loaders)
    assert not hasattr(dealt, "_iterator")
    assert not hasattr(dealt, "state_dict")
    assert copy.deepcopy(dealt).batch_size == 1


def test_more_workers_than_samples_are_said() -> None:
    """Lightning repeats samples then, here as with processes."""
    few: Any = common_batches(6, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(SimulatedDDPStrategy(TopK(0.1), workers=8), Plain, few)
    (said,) = (str(each.message) for each in caught if "8 workers share" in str(each.message))
    assert "6 samples of an epoch. As with processes, 2 of them repeat another worker's" in said
