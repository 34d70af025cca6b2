"""A last sentence of a worker that torchrun ends because another one has failed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from lightning_gc.tuning.lightning_flavour import pl


class Farewell(pl.Callback):
    """Answers SIGTERM at once, in place of Lightning, which asks the other workers first.

    Args:
        worker: this worker's number.
        method: what it measures.
    """

    def __init__(self, worker: int, method: str) -> None:
        self.worker, self.method = worker, method
        self.take_over()

    def on_train_start(self, *_: Any) -> None:
        """Lightning has put its own handler in meanwhile."""
        self.take_over()

    def take_over(self) -> None:
        """Put the handler in, where that can be done."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._leave)

    def _leave(self, *_: Any) -> None:
        sys.stderr.write(
            f"lightning-gc: Worker {self.worker} was told to stop while it measured {self.method}; "
            f"where torchrun did that, another worker has failed, and its summary says which.\n"
        )
        sys.stderr.flush()
        # Not by way of an exception: what cleans up would wait for the worker that is gone.
        os._exit(1)
