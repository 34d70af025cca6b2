"""Outside of the exchange of gradients too, an error of a collective names the peers."""

import traceback
import warnings
from datetime import timedelta
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_gc import TopK
from lightning_gc.transports.peer_error import PeerError
from tests.support.fitting import Crashed, ddp, fit
from tests.support.models import own_batches
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes
TIMEOUT = timedelta(seconds=4)


class Ends(pl.LightningModule):
    """Worker 1 ends at a given place of its second epoch, by an exception."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.net = nn.Linear(8, 40)
        self.norm = nn.BatchNorm1d(40) if place == "before a forward pass" else nn.Identity()
        self.mean = MeanMetric()

    def reach(self, place: str) -> None:
        if (place, self.global_rank, self.current_epoch) == (self.place, 1, 1):
            raise Crashed

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if self.place == "gathering":
            self.reach("gathering")
            with warnings.catch_warnings():  # Lightning uses what torch 2.13 deprecates
                warnings.simplefilter("ignore", FutureWarning)
                self.all_gather(torch.ones(1))
        loss: Tensor = self.norm(self.net(batch)).square().mean()
        if self.place == "a metric of the loop":
            self.log("loss", loss, sync_dist=True, on_step=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.reach("before a forward pass")
        self.reach("a metric of the loop")

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.reach("validation")
        self.log("seen", batch.mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.mean.update(torch.ones(()))
        self.reach("a metric's own collective")
        self.mean.compute()

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.reach("saving")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


class Loader:
    """Batches; worker 1 fails to load one in the second epoch."""

    def __init__(self, worker: int, place: str, mine: str) -> None:
        self.fails, self.epoch = worker == 1 and place == mine, 0
        self.batches = own_batches(worker, 3)

    def __iter__(self) -> Any:
        self.epoch += 1
        for index, batch in enumerate(self.batches):
            if self.fails and self.epoch == 2 and index == 1:
                raise Crashed
            yield batch

    def __len__(self) -> int:
        return 3


def train(worker: int, place: str, folder: str) -> tuple[bool, str]:
    """Return whether a fit ends in a PeerError, and the error with its notes, as printed."""
    save = [ModelCheckpoint(folder, every_n_epochs=1, save_on_train_epoch_end=False)]
    try:
        fit(
            ddp(TopK(0.1), timeout=TIMEOUT),
            lambda: Ends(place),
            Loader(worker, place, "the loader"),
            Loader(worker, place, "the validation's loader"),
            devices=2,
            max_epochs=3,
            use_distributed_sampler=False,
            callbacks=save if place == "saving" else [],
        )
    except RuntimeError as error:
        return isinstance(error, PeerError), "".join(traceback.format_exception_only(error))
    return False, "nothing"


OFTEN = ("validation", "before a forward pass", "a metric's own collective", "saving")
RARELY = ("gathering", "the loader", "the validation's loader", "a metric of the loop")
PLACES = [*OFTEN, *(pytest.param(place, marks=pytest.mark.nightly) for place in RARELY)]


@pytest.mark.parametrize("place", PLACES)
def test_the_other_worker_is_named(place: str, tmp_path: Any) -> None:
    (found,) = run_in_processes(train, 2, place, str(tmp_path), timeout=60, wait_for=1)
    is_ours, error = found
    # torchmetrics calls torch.distributed by itself; its error gets a note.
    assert is_ours or place == "a metric's own collective", error
    assert "with worker 1 failed" in error, error
    assert "its own output says more" in error, error
