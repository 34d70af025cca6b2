"""FirstCallback: runs before all other callbacks where a strategy's own hooks come too late."""

from collections.abc import Callable
from typing import Any


class FirstCallback:
    """Mixin, before Lightning's ``Callback``, that is the first of a Trainer's during a fit.

    Lightning calls hooks of callbacks, of the module and of the strategy in this order, where
    something begins and also where it ends. What a strategy does at the beginning and undoes at
    the end would lie across what callbacks do and undo, such as to swap averaged weights in for a
    validation; done by the first callback it lies around all of them.

    Args:
        on_validation_start: called as validation begins.
        on_train_end: called as training ends.
    """

    def __init__(
        self, on_validation_start: Callable[[], None], on_train_end: Callable[[], None]
    ) -> None:
        super().__init__()
        self._on_validation_start, self._on_train_end = on_validation_start, on_train_end
        self._trainer: Any = None

    def join(self, trainer: Any) -> None:
        """Become the Trainer's first callback."""
        self.leave()
        self._trainer = trainer
        trainer.callbacks = [self, *trainer.callbacks]

    def leave(self) -> None:
        """Leave the Trainer's callbacks; again does nothing."""
        if self._trainer is not None:
            others = [each for each in self._trainer.callbacks if each is not self]
            self._trainer.callbacks = others
        self._trainer = None

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._on_validation_start()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._on_train_end()
