"""The host waits for the GPU no more often than declared, by torch's own account."""

import contextlib
import warnings
from collections import Counter, deque
from collections.abc import Iterator

import pytest
import torch

from lightning_gc.compressors import Compressor
from lightning_gc.core.flow import Flow, Mean, Reply, Request
from lightning_gc.engine.compatibility import waits_of_step
from lightning_gc.testing.contracts import cases
from lightning_gc.transports import Recording, Transport
from lightning_gc.transports.accounting import KEPT
from tests.gpu.on_device import OnDevice
from tests.support.instances import ALL, schemes_for

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
WORKERS = 2


@contextlib.contextmanager
def counted(found: list[str]) -> Iterator[None]:
    """Collect a line for each wait."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [f"{w.filename}:{w.lineno}" for w in seen if "synchronizing" in str(w.message)]


@pytest.mark.parametrize("compressor", ALL, ids=cases.label)
def test_no_more_waits_than_declared(compressor: Compressor) -> None:
    for scheme in schemes_for(compressor):
        found: list[str] = []
        lockstep = OnDevice(WORKERS, compressor, None, scheme, 0, around=lambda: counted(found))  # noqa: B023
        for step in (0, 2):  # kernels are compiled, and numbers of the layout go to the device
            lockstep.step(cases.gradients(WORKERS, step))
        found.clear()
        lockstep.step(cases.gradients(WORKERS, 4))
        tensors = WORKERS * sum(compressor.compresses(s) for s in cases.SHAPES.values())
        limit = waits_of_step(compressor, scheme, WORKERS).limit
        most = tensors * limit + (WORKERS if limit else 0)  # each reads how long messages are, too
        assert len(found) <= most, (scheme, Counter(at.rsplit("/", 1)[-1] for at in found))


class Sleeps(Transport):
    """Each request keeps the device busy for about a millisecond."""

    worker, workers, sent_bytes = 0, 2, 0

    def fulfil(self, request: Request) -> Reply:
        assert isinstance(request, Mean)
        torch.cuda._sleep(2_000_000)
        self.sent_bytes += 4
        return list(request.tensors)


def test_requests_are_timed_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(event: torch.cuda.Event) -> None:
        raise AssertionError("the host waits for an event")

    def asking() -> Flow:
        yield Mean((tensor,))

    monkeypatch.setattr(torch.cuda.Event, "synchronize", refused)
    tensor, recording, found = torch.zeros(1, device="cuda"), Recording(Sleeps()), list[str]()
    recording.exchanges = deque(maxlen=KEPT)
    with counted(found):
        for _ in range(KEPT):
            recording.run(asking(), tensor.device)
            assert recording.exchanges is not None
    assert not found
    torch.cuda.synchronize()
    assert [(each.messages, each.nbytes) for each in recording.exchanges] == [(2, 4)] * KEPT
    assert all(each.seconds > 1e-4 for each in recording.exchanges), "of the device, not of a call"
