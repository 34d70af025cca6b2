"""A fault on one worker is said there at once; nothing waits for the others before it is shown."""

import logging
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import TopK
from lightning_gc.core.flow import Flow
from lightning_gc.exchange import synchronizer
from lightning_gc.transports.peer_error import PeerError
from tests.support.fitting import ddp, fit
from tests.support.models import Books, own_batches
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes


class Hears(logging.Handler):
    """Notes, in the order in which they happen, errors that are logged, and ends of groups."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.events: list[str] = []
        logging.getLogger("lightning_gc").addHandler(self)
        self._destroy = dist.destroy_process_group
        dist.destroy_process_group = self.destroy

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(record.getMessage())

    def destroy(self, group: Any = None) -> None:
        self.events.append("destroy")
        self._destroy(group)


def broken(*_: Any) -> Flow:
    yield from ()
    raise ValueError("a codec has a fault")


class ExchangeFails(Books):
    """Worker 1's exchange fails in its fourth step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == 3:
            self.trainer.strategy._attached._synchronizer._flow = broken  # type: ignore[attr-defined]
        return super().training_step(batch, batch_idx)


class ModuleFails(Books):
    """Worker 1's module fails in its fourth step, as it does without memory."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == 3:
            raise ValueError("out of memory")
        return super().training_step(batch, batch_idx)


def train(worker: int, module: type[Books]) -> tuple[str, str, list[str]]:
    """Return the kind of the error with which a fit ends, the error, and what was heard."""
    hears = Hears()
    synchronizer.waits_for_others = lambda group: True  # as with NCCL
    synchronizer._abort = lambda group: hears.events.append("abort")
    try:
        # Longer than the test may take: nothing here is shown by a timeout.
        strategy = ddp(TopK(0.1), timeout=timedelta(minutes=5))
        batches = own_batches(worker, 10)
        fit(strategy, module, batches, devices=2, use_distributed_sampler=False)
    except (ValueError, PeerError) as error:
        return type(error).__name__, str(error), list(hears.events)
    raise AssertionError("the fit ended as if nothing had happened")


def test_the_error_is_logged_and_raised_before_any_group_is_destroyed() -> None:
    there, here = run_in_processes(train, 2, ExchangeFails)
    kind, error, (said, *ends) = here
    assert (kind, error, ends) == ("ValueError", "a codec has a fault", ["abort"])
    assert said.startswith("Worker 1 of 2 stops")
    assert "ValueError: a codec has a fault" in said
    kind, error, (said, *ends) = there
    assert (kind, ends) == ("PeerError", ["abort"])
    assert said.startswith("Worker 0 of 2 stops")
    assert "with worker 1 failed" in error


def test_the_group_is_not_destroyed_after_an_error_of_the_module() -> None:
    _, (kind, error, events) = run_in_processes(train, 2, ModuleFails)
    assert (kind, error, events) == ("ValueError", "out of memory", ["abort"])


def backward_with_a_failed_future(worker: int) -> str:
    dist.init_process_group("gloo")
    net = DistributedDataParallel(torch.nn.Linear(3, 3))

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        future: Any = torch.futures.Future()
        future.set_exception(RuntimeError("CUDA error: unspecified launch failure"))
        return future

    net.register_comm_hook(None, hook)
    try:
        net(torch.ones(1, 3)).sum().backward()
    except Exception as error:
        return str(error)
    return ""


def test_a_backward_pass_ends_where_a_future_holds_an_exception() -> None:
    """As ``Background`` leaves them when the device has failed."""
    (error,) = run_in_processes(backward_with_a_failed_future, 1)
    assert error
