"""A worker that falls silent or dies: the others end with an error, within the timeout."""

import os
import time
from datetime import timedelta
from typing import Any

import pytest

from lightning_gc import TopK
from tests import fits
from tests.processes import spread

pytestmark = pytest.mark.processes
TIMEOUT = timedelta(seconds=3)


class Deserts(fits.Books):
    """Worker 1 never comes back from its sixth step."""

    dies = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == 5:
            if self.dies:
                os._exit(1)
            time.sleep(60)
        return super().training_step(batch, batch_idx)


class Dies(Deserts):
    dies = True


def train_late(worker: int) -> bool:
    time.sleep(2 * TIMEOUT.total_seconds() * worker)
    fits.fit(worker, 2, TopK(0.1), timeout=TIMEOUT)
    return True


def train_with(worker: int, model: str) -> tuple[str, float]:
    fits.Deserts, fits.Dies = Deserts, Dies  # type: ignore[attr-defined]
    started = time.monotonic()
    try:
        fits.fit(worker, 2, TopK(0.1), model=model, timeout=TIMEOUT)
    except RuntimeError as error:
        return str(error), time.monotonic() - started
    raise AssertionError("the fit ended as if nothing had happened")


@pytest.mark.parametrize("model", ["Deserts", "Dies"])
def test_the_others_end_with_an_error(model: str) -> None:
    """It names worker 1, which is killed by the test when worker 0 has reported."""
    message, seconds = spread(train_with, 2, model, timeout=40, wait_for=1)[0]
    assert "Worker 0: all-reduce with worker 1 failed" in message
    assert "imed out" in message or "onnection" in message
    assert seconds < 30


def test_a_worker_may_be_late() -> None:
    """Later than the timeout of a collective: nobody counts as lost before the first one."""
    assert spread(train_late, 2) == [True, True]
