"""Run flows in bucket order, in parallel to the backward pass: on a thread, or on a stream."""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lightning_gc.core import Flow
from lightning_gc.core.copies import Single
from lightning_gc.core.flow import undisturbed
from lightning_gc.transports.accounting import Recording
from lightning_gc.transports.peer_error import awaiting_peers

_log = logging.getLogger(__name__)


class Background(Single):
    """Runs flows one after the other and completes a future for each.

    On the host a thread runs them. Callbacks chained on Gloo's own futures would dead-lock with
    several buckets and two requests each; a single thread cannot.

    On CUDA they use a stream of their own, which waits for the gradient. Waiting for the future
    blocks the device, not the host. A flow that never waits for the device is run by the thread
    that submits it: it only queues work. Handing it to another thread would take longer than most
    kernels, as both need the interpreter's lock. A flow that waits is run by the thread.

    After a flow has failed, its exception is logged at once, ``check`` raises it and later flows
    are not run: the group's workers no longer agree on the next collective. Every future ends, also
    after an error, because DDP waits for it and cannot be interrupted.

    Args:
        transport: used by the flows only, from the first ``submit`` on.
        device: of the gradients.
        waits: whether flows, or their collectives, make the host wait. Ignored on the host.
    """

    def __init__(self, transport: Recording, device: torch.device, *, waits: bool = True) -> None:
        self.transport = transport
        self.device = device
        self.error: BaseException | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread: threading.Thread | None = None
        if self._stream is None or waits:
            # A daemon: a process that exits while a peer hangs must not wait for the timeout.
            self._thread = threading.Thread(target=self._work, name="lightning_gc", daemon=True)
            self._thread.start()

    def promise(self) -> torch.futures.Future[Tensor]:
        """Return a future for a later ``submit``."""
        return torch.futures.Future(devices=[self.device] if self._stream is not None else None)

    def submit(
        self,
        flow: Flow,
        result: Tensor,
        future: torch.futures.Future[Tensor] | None = None,
        transport: Recording | None = None,
    ) -> torch.futures.Future[Tensor]:
        """Queue a flow; return a future that is completed with ``result`` when the flow ends.

        It is completed even if the flow fails: DDP's reducer finishes, and ``check`` raises the
        original exception. If a failed device allows no result, it is completed with an exception.

        Args:
            flow: to be run.
            result: of the future.
            future: a promised one; None: a new one.
            transport: that the flow is to use, with an account of its own; None: as the others.

        Raises:
            RuntimeError: after ``close``.
        """
        if self._closed:
            raise RuntimeError(
                "A gradient arrived after the exchange was closed. Close it after the last "
                "backward pass, or attach again before further ones."
            )
        promised = self.promise() if future is None else future
        ready = torch.cuda.current_stream(self.device).record_event() if self._stream else None
        run = partial(self._run, flow, ready, promised, result, transport or self.transport)
        if self._thread is None:
            self._run_here(run)
        else:
            self._jobs.put(run)
        return promised

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> bool:
        """Finish the queued flows, stop the thread, and return whether it has stopped.

        With a hanging peer it stops at the group's timeout only, or with the process.
        """
        self._closed = True
        if self._thread is None:
            return True
        self._jobs.put(None)
        who = self.transport.worker, self.transport.workers
        with awaiting_peers("finish the last exchange", *who):
            self._thread.join(timeout=1.0 if self.error else 30.0)
        return not self._thread.is_alive()

    def _work(self) -> None:
        with torch.no_grad():
            if self._stream is None:
                self._drain()
                return
            try:
                torch.cuda.set_device(self.device)
                with torch.cuda.stream(self._stream):
                    self._drain()
            except Exception as error:  # of a device that has failed
                self._fail(error)
                self._drain()

    def _run_here(self, run: Callable[[], None]) -> None:
        """Run a flow in this thread, on the flows' stream."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(undisturbed())
            try:
                stack.enter_context(torch.cuda.stream(self._stream))
            except Exception as error:  # of a device that has failed
                self._fail(error)
            run()

    def _drain(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _run(
        self,
        flow: Flow,
        ready: torch.cuda.Event | None,
        promised: torch.futures.Future[Tensor],
        result: Tensor,
        transport: Recording,
    ) -> None:
        """Run a flow unless one has failed; end its future, also after an error."""
        try:
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
            if self.error is None:
                transport.run(flow, self.device)
        except BaseException as error:  # raised in the training thread by check()
            self._fail(error)
        try:
            if self._stream is not None:
                # The future records an event once it counts as completed. If that raised, nobody
                # would ever be told, so it is seen beforehand whether the device can.
                self._stream.record_event()
            promised.set_result(result)
        except Exception as error:
            self._fail(error)
            if not promised.done():
                failure = RuntimeError(f"{type(error).__name__}: {error}")
                promised.set_exception(failure)  # type: ignore[arg-type]

    def _fail(self, error: BaseException) -> None:
        """Keep the first error and log it: it may be long until ``check`` can raise it."""
        if self.error is None:
            self.error = error
            _log.error(
                "Worker %d of %d stops, for its exchange of gradients has failed: %s: %s",
                *(self.transport.worker, self.transport.workers, type(error).__name__, error),
                exc_info=error,
            )
