"""What users are told: the method at work, and that nothing is compressed."""

from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import TQDMProgressBar

from lightning_gc import QSGD, SimulatedDDPStrategy, SimulatedLocalStepsStrategy, SizeSwitch
from lightning_gc.compressors import Compressor
from tests.support.auto import MENU, Scripted
from tests.support.fitting import quiet_trainer, unwarned
from tests.support.models import Books, own_batches

NOTHING = "Nothing is compressed: all trained tensors have fewer than min_numel elements"


class Small(Books):
    """Its largest tensor has 320 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 40))


class Bar(TQDMProgressBar):
    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        self.shown.append(self.get_metrics(trainer, pl_module).get("method"))


def fitted(strategy: Any, batches: int, model: type[Books] = Books, **settings: Any) -> None:
    with unwarned():
        quiet_trainer(strategy, **settings).fit(model(), own_batches(0, batches))


@pytest.mark.parametrize(
    ("compressor", "model", "settings", "says"),
    [
        (QSGD(4), Small, {}, True),
        ("auto", Small, {}, False),  # its Cast takes all tensors
        (SizeSwitch(QSGD(4), min_numel=5000), Books, {}, True),
        (QSGD(4), Small, {"min_numel": 0}, False),
        (QSGD(4), Books, {}, False),
        ("identity", Small, {}, False),
    ],
)
def test_a_model_that_is_too_small_to_be_compressed_is_told(
    caplog: pytest.LogCaptureFixture,
    compressor: Compressor | str,
    model: type[Books],
    settings: dict[str, Any],
    says: bool,
) -> None:
    caplog.set_level("INFO", "lightning_gc.core.notices")
    kinds: list[Any] = [SimulatedDDPStrategy(compressor, workers=2, **settings)]
    if compressor != "auto":
        kinds += [SimulatedLocalStepsStrategy(compressor, workers=2, every=2, **settings)]
    for strategy in kinds:
        caplog.clear()
        fitted(strategy, 4, model)
        assert len([each for each in caplog.messages if each.startswith(NOTHING)]) == says


@pytest.mark.parametrize("compressor", ["auto", QSGD(4)])
def test_the_progress_bar_names_the_method_that_auto_has_chosen(compressor: Any) -> None:
    controller = Scripted(allow=MENU) if compressor == "auto" else None
    bar, strategy = Bar(), SimulatedDDPStrategy(compressor, workers=2, controller=controller)
    fitted(strategy, 40, callbacks=[bar], enable_progress_bar=True, max_epochs=2)
    if controller is None:
        assert set(bar.shown) == {None}
        return
    assert bar.shown[0] == "uncompressed"
    assert bar.shown[-1] == "powersgd"
    assert None not in bar.shown
