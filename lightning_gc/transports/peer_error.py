"""PeerError: a collective failed because of another worker; it names peers and what to look at."""

from __future__ import annotations

import time

import torch.distributed as dist

_SIGNS = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL", "Broken pipe")


class PeerError(RuntimeError):
    """A collective failed because of another worker."""


class MessageError(PeerError, ValueError):
    """What another worker sent is damaged, or not as long as it announced."""


class WaitError(RuntimeError):
    """One message has not come or gone.

    Attributes:
        peer: the other worker.
    """

    def __init__(self, peer: int, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.peer = peer


def is_from_backend(error: BaseException) -> bool:
    """Return whether an error comes from torch.distributed; Gloo's have no class of their own."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(sign in str(error) for sign in _SIGNS)


def explained(
    error: RuntimeError, operation: str, during: str, worker: int, workers: int, since: float
) -> PeerError:
    """Return what to raise for a collective's error: it names whom this worker waited for.

    Args:
        error: as the backend raised it.
        operation: the collective's name.
        during: what it was for.
        worker: this worker's index.
        workers: W.
        since: when it began, by ``time.monotonic``.
    """
    seconds = time.monotonic() - since
    peers = ", ".join(str(i) for i in range(workers) if i != worker)
    waiting = f" waiting for worker {error.peer}" if isinstance(error, WaitError) else ""
    return PeerError(
        f"Worker {worker}: {operation} with worker{'s'[: workers > 2]} {peers} failed after "
        f"{seconds:.1f} s{waiting}, in {during}. One of them has died, hangs, or has fewer batches "
        f"or has stopped earlier than the others; its own output says more. The backend says: "
        f"{error}"
    )
