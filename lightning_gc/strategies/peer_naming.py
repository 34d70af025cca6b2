"""PeerNaming: collectives of Lightning's and of DDP's that fail end in a PeerError as well."""

from collections.abc import Callable
from typing import Any

from lightning_gc.transports.peer_error import is_from_backend, naming_peers, peers_in_words

_LIGHTNING = "what Lightning shares between workers: metrics, decisions, paths of checkpoints"
_STEP = "a collective of DDP's, of Lightning's or of the module's own"


class PeerNaming:
    """Mixin, before a strategy of Lightning's, that names the peers in the backend's errors.

    Lightning's own collectives all go through four methods of the strategy; Fabric's ``reduce`` is
    called ``all_reduce``. DDP's, such as the
    broadcast of module buffers, and a module's own fail within a step of the module.
    """

    world_size: int
    global_rank: int

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        return self._named("barrier", _LIGHTNING, super().barrier, *args, **kwargs)  # type: ignore[misc]

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        return self._named("broadcast", _LIGHTNING, super().broadcast, *args, **kwargs)  # type: ignore[misc]

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        return self._named("all-reduce", _LIGHTNING, super().reduce, *args, **kwargs)  # type: ignore[misc]

    def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        return self._named("all-reduce", _LIGHTNING, super().all_reduce, *args, **kwargs)  # type: ignore[misc]

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        return self._named("all-gather", _LIGHTNING, super().all_gather, *args, **kwargs)  # type: ignore[misc]

    def setup(self, *args: Any, **kwargs: Any) -> Any:
        return self._named(_STEP, "setting up", super().setup, *args, **kwargs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._named(_STEP, "a training step", super().training_step, *args, **kwargs)  # type: ignore[misc]

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._named(_STEP, "a validation step", super().validation_step, *args, **kwargs)  # type: ignore[misc]

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._named(_STEP, "a test step", super().test_step, *args, **kwargs)  # type: ignore[misc]

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        return self._named(_STEP, "a backward pass", super().backward, *args, **kwargs)  # type: ignore[misc]

    def on_exception(self, exception: BaseException) -> None:
        """Explain an error that comes from elsewhere, such as a hook of the module's."""
        super().on_exception(exception)  # type: ignore[misc]
        if self.world_size > 1 and is_from_backend(exception):
            exception.add_note(peers_in_words(_STEP, self.global_rank, self.world_size))

    def _named(
        self, operation: str, during: str, act: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        with naming_peers(operation, during, self.global_rank, self.world_size):
            return act(*args, **kwargs)
