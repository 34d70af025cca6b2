"""Name the peers in errors and lines: PeerError if another worker makes a collective fail."""

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch.distributed as dist

from lightning_gc.core.notices import waiting
from lightning_gc.transports import interfaces

_SIGNS = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "Broken pipe")


class PeerError(RuntimeError):
    """A collective failed because of another worker.

    With NCCL it is not raised for a dead or late peer: NCCL's watchdog ends the process.
    """


class MessageError(PeerError, ValueError):
    """Another worker's message is damaged, or has another length than announced."""


class WaitError(RuntimeError):
    """One message was not received or sent.

    Attributes:
        whom: who was to send or to receive it.
    """

    def __init__(self, whom: str, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.whom = whom


def is_from_backend(error: BaseException) -> bool:
    """Return whether an error comes from torch.distributed; Gloo has no exception class."""
    if isinstance(error, dist.DistError | WaitError):
        return True
    return type(error) is RuntimeError and any(sign in str(error) for sign in _SIGNS)


def explained(
    error: RuntimeError, operation: str, during: str, worker: int, workers: int, since: float
) -> PeerError:
    """Return the exception for a failed collective; it names the workers that this one waited for.

    Args:
        error: as the backend raised it.
        operation: the collective's name.
        during: its purpose.
        worker: this worker's index.
        workers: W.
        since: when it began, by ``time.monotonic``.
    """
    waiting = f" waiting for {error.whom}" if isinstance(error, WaitError) else ""
    when = f" after {time.monotonic() - since:.1f} s{waiting}, in {during}"
    why = peers_in_words(error, operation, worker, workers, when)
    return PeerError(f"{why} The backend says: {error}")


def peers_in_words(
    error: BaseException, operation: str, worker: int, workers: int, when: str = ""
) -> str:
    """Describe which workers a failed collective may have waited for, and likely causes."""
    others = ", ".join(str(i) for i in range(workers) if i != worker)
    peers = f"worker{'s'[: workers > 2]} {others}"
    if "connectFullMesh" in str(error):  # Gloo's words while it makes a process group
        return (
            f"Worker {worker} could not connect to {peers}{when}. One of them has died, or Gloo "
            f"announces an address that this machine cannot reach. {interfaces.advice()}"
        )
    return (
        f"Worker {worker}: {operation} with {peers} failed{when}. "
        f"One of them has died, hangs, has fewer batches, has stopped earlier, or has a loss that "
        f"reaches no parameter; its own output says more."
    )


@contextlib.contextmanager
def naming_peers(operation: str, during: str, worker: int, workers: int) -> Iterator[None]:
    """Turn the backend's errors into a PeerError; others stay as they are.

    Args:
        operation: the collective's name.
        during: its purpose.
        worker: this worker's index.
        workers: W.
    """
    since = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if workers == 1 or not is_from_backend(error):
            raise
        raise explained(error, operation, during, worker, workers, since) from error


def awaiting_peers(until: str, worker: int, workers: int) -> AbstractContextManager[None]:
    """Say whom this worker waits for, if the body takes long; see ``waiting``.

    It starts a thread, so it is for what happens once in a fit, an epoch or a save.

    Args:
        until: what the others have yet to do, such as ``"start"``.
        worker: this worker's index.
        workers: W.
    """
    if workers == 1:
        return contextlib.nullcontext()
    others = f"worker {1 - worker}" if workers == 2 else f"the {workers - 1} other workers"
    return waiting(f"Waiting for {others} to {until}")
