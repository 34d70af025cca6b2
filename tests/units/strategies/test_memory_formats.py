"""Parameters in another order in memory, or of complex numbers: trained alike, or refused."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gc import CSER, SAEF, MomentumCorrection, PerParameter, StepAhead, TopK
from lightning_gc.core.bucket import in_memory_order
from lightning_gc.lightning.for_pytorch_lightning import SimulatedDDPStrategy
from lightning_gc.memories import Memory
from tests.support.fitting import quiet_trainer, unwarned


class Pictures(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output: Tensor = self.net(batch)
        return (output.mean((2, 3)) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(module: pl.LightningModule, memory: Memory | None, compressor: Any = None) -> None:
    compressor = compressor or PerParameter(TopK(0.1))
    draw = torch.Generator().manual_seed(1)
    batches: Any = DataLoader(torch.randn(24, 3, 6, 6, generator=draw), 2)  # type: ignore[arg-type]
    strategy = SimulatedDDPStrategy(compressor, memory, workers=2)
    with unwarned():
        quiet_trainer(strategy).fit(module, batches)


@pytest.mark.parametrize(
    "memory", [MomentumCorrection(weight_decay=0.1), StepAhead(), CSER(every=3), SAEF()], ids=repr
)
def test_weights_are_those_of_the_usual_order(memory: Memory) -> None:
    """By memories that add weights to gradients, or move weights by errors."""
    usual, other = Pictures(), Pictures().to(memory_format=torch.channels_last)
    for module in (usual, other):
        train(module, memory)
    for one, two in zip(usual.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_elements_as_they_lie_in_memory() -> None:
    whole = torch.arange(24.0).view(2, 3, 2, 2)
    last = whole.to(memory_format=torch.channels_last)
    assert in_memory_order(whole) is whole
    moved = in_memory_order(last)
    assert moved.shape == last.shape
    assert moved.data_ptr() == last.data_ptr()
    assert moved.flatten().tolist() == whole.permute(0, 2, 3, 1).flatten().tolist()
    gaps = torch.arange(24.0)[::2]  # of which a gradient has none
    assert in_memory_order(gaps) is gaps


def test_complex_parameters_are_exchanged_uncompressed_only() -> None:
    module = Pictures()
    module.phase = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"phase is complex.*torch\.view_as_real"):
        train(module, None)
