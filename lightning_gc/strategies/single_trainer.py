"""SingleTrainer: refuse a second Trainer for a strategy object, and another package's Trainer."""

from typing import Any

from lightning_gc.flavours import refuse_other_package


class SingleTrainer:
    """Mixin that refuses a second Trainer, at its first access: it reads ``_accelerator``.

    A Trainer or Fabric of another Lightning package is refused when it hands over its accelerator.
    """

    _taken = False
    _owner = "Trainer"

    @property
    def _accelerator(self) -> Any:
        if self._taken:
            raise ValueError(
                f"This {type(self).__name__} already belongs to a {self._owner}, and holds its "
                f"error state. Make a new one for every {self._owner}."
            )
        return self.__dict__.get("_accelerator_in_use")

    @_accelerator.setter
    def _accelerator(self, accelerator: Any) -> None:
        refuse_other_package(self, accelerator)
        self.__dict__["_accelerator_in_use"] = accelerator

    @property
    def accelerator(self) -> Any:
        return self.__dict__.get("_accelerator_in_use")

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def _configure_launcher(self) -> None:
        super()._configure_launcher()  # type: ignore[misc]
        self._taken = True
