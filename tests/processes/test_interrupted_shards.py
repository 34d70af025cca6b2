"""An exception that is caught within a backward pass: the next pass is refused in a sentence."""

import contextlib
from typing import Any

import pytest
import torch

from lightning_gc import QSGD, TopK
from tests.support.accelerator import needs_two
from tests.support.fsdp import fsdp
from tests.support.hsdp import Sharded, fit_sharded, hsdp
from tests.support.processes import run_in_processes

pytestmark = [pytest.mark.processes, needs_two]
RANKS = 2


class Interrupted(Sharded):
    """Catches what its first layer raises, after the gradients of others have been exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        hook = self.body[0].register_full_backward_pre_hook(fail)
        with contextlib.suppress(ArithmeticError):
            self.manual_backward(super().training_step(batch, batch_idx))
        hook.remove()


def fail(*_: Any) -> None:
    raise ArithmeticError


def refused(rank: int) -> list[str]:
    """Return what fits say in which a second pass follows an interrupted one."""
    said = []
    for strategy in (fsdp(QSGD(8)), hsdp(TopK(0.1))):
        with pytest.raises(RuntimeError) as raised:
            fit_sharded(rank, strategy, 2, Interrupted, ranks=RANKS)
        said.append(str(raised.value))
    return said


def test_the_next_pass_is_refused() -> None:
    """FSDP would draw the same random numbers in all further steps, HSDP leave zeros."""
    for said in run_in_processes(refused, RANKS):
        assert all("interrupted by an exception" in sentence for sentence in said), said
