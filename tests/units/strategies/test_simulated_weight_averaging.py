"""Weight averaging of simulated workers: refused where statistics need an epoch of their own."""

from typing import Any

import pytest
from pytorch_lightning.callbacks import StochasticWeightAveraging
from torch import Tensor, nn

from lightning_gc import TopK
from lightning_gc.lightning.for_pytorch_lightning import SimulatedDDPStrategy
from tests.support.fitting import fit, unwarned
from tests.support.models import Plain, common_batches


class Normalised(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(common_batches(4, 4).dataset[0].numel())

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(self.norm(batch), batch_idx)


def train(module: Any) -> dict[str, Any]:
    callbacks = [StochasticWeightAveraging(0.01, swa_epoch_start=1)]
    strategy = SimulatedDDPStrategy(TopK(0.1), workers=2)
    with unwarned():
        return fit(strategy, module, common_batches(48, 4), max_epochs=3, callbacks=callbacks)


def test_running_statistics_are_refused_before_training() -> None:
    words = r"StochasticWeightAveraging .*norm.*CompressedDDPStrategy with processes.*GroupNorm"
    with pytest.raises(ValueError, match=words):
        train(Normalised)


def test_a_model_without_them_is_averaged() -> None:
    assert train(Plain)["steps"] == 18
