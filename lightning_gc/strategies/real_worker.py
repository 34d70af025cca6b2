"""RealWorker: Lightning hooks of strategies that have one worker in each process."""

from typing import Any

from lightning_gc.strategies import process_shutdown
from lightning_gc.strategies.base import CompressedStrategy
from lightning_gc.strategies.joining import Joining
from lightning_gc.strategies.nccl_waits import warn_of_blocking_waits
from lightning_gc.strategies.peer_naming import PeerNaming
from lightning_gc.strategies.shared_memory import unshare
from lightning_gc.synchronizer import Synchronizer


class RealWorker(CompressedStrategy, PeerNaming, Joining):
    """Mixin, before a ``DDPStrategy`` of Lightning's, that joins and leaves the other workers.

    A subclass makes ``_synchronizer`` when a fit begins.
    """

    _synchronizer: Synchronizer | None = None
    _failed = False

    def setup_distributed(self) -> None:
        """Join the other workers with a timeout of at least a minute, then set the user's."""
        with self._patiently():
            super().setup_distributed()  # type: ignore[misc]

    def setup(self, trainer: Any) -> None:
        unshare(self.lightning_module)  # type: ignore[attr-defined]
        warn_of_blocking_waits(trainer)
        super().setup(trainer)

    @property
    def workers(self) -> int:
        return int(self.world_size)

    @property
    def worker(self) -> int:
        return int(self.global_rank)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._failed = True
        process_shutdown.end_children(self._launcher)  # type: ignore[attr-defined]

    def teardown(self) -> None:
        self._close()
        super().teardown()

    def _close(self) -> None:
        if self._synchronizer is not None:
            self._synchronizer.close(self._failed)
        self._synchronizer = None
