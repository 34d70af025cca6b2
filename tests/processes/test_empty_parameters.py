"""Parameters without elements change nothing: not what others become, and not what is resumed."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_gc import QSGD, Int8, TopK, WeightDifferences
from lightning_gc.lightning.for_pytorch_lightning import LocalStepsStrategy, SimulatedDDPStrategy
from tests.processes.test_fsdp import Resumed
from tests.support.accelerator import BACKEND, needs_two
from tests.support.fitting import ddp
from tests.support.fsdp import fsdp
from tests.support.hsdp import Sharded, fit_sharded, hsdp
from tests.support.processes import run_in_processes

pytestmark = [pytest.mark.processes, needs_two]


def add_empty(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    """Use the parameter, as a hook of its module."""
    total: Tensor = output + module.used.sum()  # type: ignore[operator,union-attr]
    return total


class WithEmpty(Sharded):
    """In units with other parameters: one that is used and one that is not."""

    def __init__(self) -> None:
        super().__init__(adam=True)
        self.body[0].register_parameter("unused", nn.Parameter(torch.zeros(0, 8)))
        self.body[2].register_parameter("used", nn.Parameter(torch.zeros(0, 4)))
        self.body[2].register_forward_hook(add_empty)


class Replicated(Sharded):
    """In one piece, with a scalar."""

    def __init__(self, empty: bool = False) -> None:
        super().__init__(adam=True)
        self.scale = nn.Parameter(torch.tensor(1.5))
        for layer in self.body if empty else ():
            layer.register_parameter("used", nn.Parameter(torch.zeros(4, 0)))
            layer.register_forward_hook(add_empty)

    def configure_model(self) -> None:
        pass

    def forward(self, batch: Tensor) -> Tensor:
        return super().forward(batch) * self.scale


REPLICATED = (Replicated, partial(Replicated, empty=True))
SHARDED = (partial(Sharded, adam=True), WithEmpty)
WAYS: dict[str, tuple[Any, Any]] = {
    "DDP": (partial(ddp, TopK(0.1)), REPLICATED),
    "local steps": (
        partial(LocalStepsStrategy, TopK(0.1), every=2, process_group_backend=BACKEND),
        REPLICATED,
    ),
    "HSDP": (partial(hsdp, TopK(0.1)), SHARDED),
    "FSDP": (partial(fsdp, QSGD(8), weights=Int8(block_size=256)), SHARDED),
    "differences": (partial(fsdp, QSGD(4), weights=WeightDifferences()), SHARDED),
}
SIMULATED = partial(SimulatedDDPStrategy, TopK(0.1), workers=2)


def fits(rank: int, ranks: int, folder: str, ways: dict[str, Any]) -> dict[str, Any]:
    """Train without such parameters, with them, and with an interruption."""
    found = {}
    for way, (strategy, (plain, empty)) in ways.items():
        path = str(Path(folder, f"{way}.ckpt"))

        fit = partial(fit_of, rank, ranks, strategy)
        fit(empty, 1, save=path)
        found[way] = [fit(plain, 2), fit(empty, 2), fit(empty, 2, resume=path)]
    return found


def fit_of(
    rank: int, ranks: int, strategy: Any, module: Any, epochs: int, save: str = "", **resume: str
) -> dict[str, Any]:
    settings: dict[str, Any] = {"max_epochs": epochs, "callbacks": [Resumed(save)], **resume}
    return fit_sharded(rank, strategy(), module=module, ranks=ranks, **settings)


def check(found: dict[str, Any]) -> None:
    for way, (plain, empty, resumed) in found.items():
        assert resumed["steps"] == plain["steps"] >= 4, way
        for name, values in plain["whole"].items():
            assert np.array_equal(empty["whole"][name], values), (way, name)
            assert np.array_equal(resumed["whole"][name], values), (way, name)
        assert len(empty["whole"]) > len(plain["whole"]), way
        for name, values in empty["memory"].items():
            assert np.array_equal(resumed["memory"][name], values), (way, name)


@pytest.mark.timeout(300)
def test_empty_parameters_change_nothing(tmp_path: Path) -> None:
    for found in run_in_processes(fits, 2, 2, str(tmp_path), WAYS):
        check(found)


def test_nor_do_they_where_workers_are_simulated(tmp_path: Path) -> None:
    ways = {"simulated": (SIMULATED, REPLICATED)}
    (found,) = run_in_processes(fits, 1, 1, str(tmp_path), ways)
    check(found)
