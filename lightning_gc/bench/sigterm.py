"""SIGTERM handler of a worker that torchrun stops because another one has failed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from lightning_gc.tuning.lightning_flavour import pl


class SigtermCallback(pl.Callback):
    """Exits at once on SIGTERM, where Lightning would wait for the other workers first.

    Args:
        rank: this worker's.
        method: what it measures.
    """

    def __init__(self, rank: int, method: str) -> None:
        self.rank, self.method = rank, method
        self.install()

    def on_train_start(self, *_: Any) -> None:
        """Install the handler again, over Lightning's."""
        self.install()

    def install(self) -> None:
        """Install the handler, in the main thread only."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._exit)

    def _exit(self, *_: Any) -> None:
        sys.stderr.write(
            f"lightning-gc: Worker {self.rank} was told to stop while it measured {self.method}; "
            f"if by torchrun, another worker has failed, and its summary says which.\n"
        )
        sys.stderr.flush()
        # No exception: clean-up would wait for the failed worker.
        os._exit(1)
