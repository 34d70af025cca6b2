"""What Lightning 2.6 broadcasts because of SIGTERM: once a round, and never in a signal handler."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)


def broadcast_only(when: Callable[[], bool], trainer: Any) -> Callable[[], None]:
    """Let the loop of a Trainer broadcast before those batches only for which ``when`` is true.

    It must be so on all workers alike. A worker that gets SIGTERM itself stops as before. Returns
    what undoes this.
    """
    name = "_broadcast_sigterm_tensor"  # of Lightning's training loop, from 2.6 on
    loop = trainer.fit_loop.epoch_loop
    broadcast = getattr(type(loop), name, None)
    if broadcast is None:
        return lambda: None
    return _replace(loop, name, lambda: broadcast(loop) if when() else None)


def note_only(trainer: Any) -> Callable[[], None]:
    """Let a Trainer's handler of SIGTERM note the signal, and send nothing to other workers.

    Lightning 2.6 broadcasts in the handler, at whatever line the signal has found the worker. The
    other workers are elsewhere, so that the broadcast waits until the timeout, takes the place of
    another collective, or raises a bare error of the backend. Without it the loop ends after the
    current step, as in Lightning before 2.6. Returns what undoes this.
    """
    connector = trainer._signal_connector

    def note(number: int, _: Any) -> None:
        _log.info("Worker %d has received signal %d and stops.", trainer.global_rank, number)
        launcher = trainer.strategy.launcher
        if launcher is not None and not connector.received_sigterm:
            launcher.kill(number)  # hands it on to the workers that this process has started
        connector.received_sigterm = True

    return _replace(connector, "_sigterm_notifier_fn", note)


def sigterm_exception(trainer: Any) -> SystemExit:
    """Return the exception with which this Trainer's loop ends after SIGTERM; its code is None."""
    name = "SIGTERMException"  # of either package, known where the loop raises it
    homes = (sys.modules[cls.__module__] for cls in type(trainer.fit_loop.epoch_loop).__mro__)
    found: SystemExit = next(getattr(home, name) for home in homes if hasattr(home, name))()
    return found


def _replace(owner: Any, name: str, method: Callable[..., None]) -> Callable[[], None]:
    """Replace a method of one object; return what undoes it, once or several times."""
    setattr(owner, name, method)

    def undo() -> None:
        with contextlib.suppress(AttributeError):
            delattr(owner, name)

    return undo
