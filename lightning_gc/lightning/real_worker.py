"""RealWorker: Lightning hooks of strategies that have one worker in each process."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from lightning_gc.lightning import workarounds
from lightning_gc.lightning.base import CompressedStrategy
from lightning_gc.lightning.workarounds import (
    Joining,
    PeerNaming,
    note_only,
    sigterm_exception,
    unshare,
    warn_of_blocking_waits,
)
from lightning_gc.transports.peer_error import PeerError


class RealWorker(CompressedStrategy, PeerNaming, Joining):
    """Mixin, before a ``DDPStrategy`` of Lightning's, that joins and leaves the other workers."""

    _handle_sigterm_as_lightning: Callable[[], None] | None = None

    def setup_distributed(self) -> None:
        """Join the other workers with a timeout of at least a minute, then set the user's."""
        with self._patiently():
            super().setup_distributed()

    def setup(self, trainer: Any) -> None:
        unshare(self.lightning_module)
        warn_of_blocking_waits(trainer)
        self._handle_sigterm_as_lightning = note_only(trainer)
        super().setup(trainer)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._stopping_with_peers():
            return super().optimizer_step(*args, **kwargs)

    def _named(self, *args: Any, **kwargs: Any) -> Any:
        with self._stopping_with_peers():
            return super()._named(*args, **kwargs)

    @contextlib.contextmanager
    def _stopping_with_peers(self) -> Iterator[None]:
        """After SIGTERM, end as the signal asks where a peer that got it too has left before.

        Workers that all get the signal leave one after the other, and some wait for those.
        """
        try:
            yield
        except PeerError as error:
            trainer = self.lightning_module.trainer
            if not trainer.received_sigterm:
                raise
            raise sigterm_exception(trainer) from error

    @property
    def workers(self) -> int:
        return int(self.world_size)

    @property
    def worker(self) -> int:
        return int(self.global_rank)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._failed = True
        workarounds.end_children(self._launcher)

    def teardown(self) -> None:
        if self._handle_sigterm_as_lightning is not None:
            self._handle_sigterm_as_lightning()
        self._handle_sigterm_as_lightning = None  # a closure could not be sent to a process
        super().teardown()
