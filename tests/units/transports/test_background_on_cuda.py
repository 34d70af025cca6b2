"""On CUDA the exchange waits for its gradient, its result for the exchange, and every future ends.

Shown without a GPU, by streams, events and futures that keep a log.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_gc.core.flow import Flow, Reply, Request
from lightning_gc.transports import Recording, Transport
from lightning_gc.transports.background import Background
from tests.support.pretended_cuda import CUDA, PretendedCuda


class Silent(Transport):
    """For flows that request nothing."""

    worker, workers, sent_bytes = 1, 2, 0

    def fulfil(self, request: Request) -> Reply:
        raise AssertionError


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> PretendedCuda:
    return PretendedCuda(monkeypatch)


def exchanging(cuda: PretendedCuda, name: str) -> Flow:
    cuda.note(cuda.current(), "exchanges", name)
    yield from ()


def in_a_thread(name: str, call: Callable[[], Any]) -> Any:
    """Call in another thread, as DDP calls its hook."""
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append((call(), torch.cuda.current_stream(CUDA))), name=name
    )
    thread.start()
    thread.join(20)
    return found[0]


def test_gradient_then_exchange_then_result(cuda: PretendedCuda) -> None:
    background, results = Background(Recording(Silent()), CUDA), [torch.zeros(1), torch.zeros(1)]
    own = background._stream
    hooks = []
    for name, result in zip("ab", results, strict=True):
        submit = lambda n=name, r=result: background.submit(exchanging(cuda, n), r)  # noqa: E731
        hooks.append(in_a_thread(f"autograd {name}", submit))
    assert [future.wait() for future, _ in hooks] == results
    assert background.close()
    for name, result, (_, theirs) in zip("ab", results, hooks, strict=True):
        (recorded,) = [e for e in cuda.log if e[:3] == (f"autograd {name}", theirs, "records")]
        event = recorded[3]
        steps = [
            recorded,
            ("lightning_gc", own, "waits", event),
            ("lightning_gc", own, "exchanges", name),
            ("lightning_gc", own, "completes", result),
        ]
        places = [next(i for i, e in enumerate(cuda.log) if e is s or same(e, s)) for s in steps]
        assert places == sorted(places)


def test_a_flow_that_never_waits_runs_where_it_is_submitted(cuda: PretendedCuda) -> None:
    """No thread takes part, the flow's stream waits for the gradient, and buckets keep order."""
    background, result = Background(Recording(Silent()), CUDA, waits=False), torch.zeros(1)
    own = background._stream
    for name in "ab":
        submit = lambda n=name: background.submit(exchanging(cuda, n), result)  # noqa: E731
        future, theirs = in_a_thread(f"autograd {name}", submit)
        assert future.done()
        assert future.wait() is result
        mine = [entry for entry in cuda.log if entry[0] == f"autograd {name}"]
        event = mine[0][3]
        assert mine[:3] == [
            (f"autograd {name}", theirs, "records", event),
            (f"autograd {name}", own, "waits", event),
            (f"autograd {name}", own, "exchanges", name),
        ]
        assert mine[-1][1:3] == (own, "completes")
    assert {entry[0] for entry in cuda.log} == {"autograd a", "autograd b"}
    assert background.close()


def test_after_an_error_where_it_is_submitted(cuda: PretendedCuda) -> None:
    """The backward pass goes on, later flows are not run, and the error is raised afterwards."""
    background = Background(Recording(Silent()), CUDA, waits=False)

    def failing() -> Flow:
        yield from ()
        raise RuntimeError("CUDA error: out of memory")

    for flow in (failing(), exchanging(cuda, "later")):
        background.submit(flow, torch.zeros(1)).wait()
    assert not [entry for entry in cuda.log if entry[2] == "exchanges"]
    with pytest.raises(RuntimeError, match="out of memory"):
        background.check()
    assert background.close()


def same(a: Any, b: Any) -> bool:
    """Compare entries of the log, tensors by identity."""
    return bool(a[:3] == b[:3] and (a[3] is b[3] or (isinstance(b[3], str) and a[3] == b[3])))


FAILURES = {
    "waiting for the gradient": {"wait_event"},
    "the exchange": set[str](),
    "the device, from then on": {"wait_event", "record_event"},
    "the result only": {"record_event"},
}


@pytest.mark.parametrize("what", FAILURES)
def test_every_future_ends_whatever_raises(
    what: str, cuda: PretendedCuda, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of later buckets too; the first error is logged at once, once, and raised."""
    background = Background(Recording(Silent()), CUDA)
    queued = threading.Event()

    def failing() -> Flow:
        assert queued.wait(20)
        cuda.broken |= FAILURES[what]
        if what != "the result only":
            raise RuntimeError("CUDA error: device-side assert triggered")
        yield from ()

    with caplog.at_level(logging.ERROR, "lightning_gc"):
        futures = [background.submit(failing(), torch.zeros(1))]
        futures += [background.submit(exchanging(cuda, "later"), torch.zeros(1)) for _ in range(2)]
        queued.set()
        for future in futures:
            if "record_event" in FAILURES[what]:
                with pytest.raises(RuntimeError, match="CUDA error"):
                    future.wait()
            else:
                future.wait()
    assert not [entry for entry in cuda.log if entry[2] == "exchanges"]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "Worker 1 of 2 stops" in said
    assert "CUDA error" in said
    with pytest.raises(RuntimeError, match="CUDA error"):
        background.check()
    assert background.close()


def test_a_device_that_fails_at_once(cuda: PretendedCuda) -> None:
    cuda.broken = {"set_device"}
    background = Background(Recording(Silent()), CUDA)
    background.submit(exchanging(cuda, "never"), torch.zeros(1)).wait()
    with pytest.raises(RuntimeError, match="CUDA error"):
        background.check()
    assert not [entry for entry in cuda.log if entry[2] == "exchanges"]
    assert background.close()
