"""ModuleHook: what is registered with a module; a copy of the module has an empty one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ModuleHook:
    """Calls ``act`` for the module that it is registered with, and for no copy of that module.

    A module's hooks are part of the module: ``copy.deepcopy``, ``pickle`` and ``torch.save`` take
    them along. What we register holds a process group and a thread, which cannot be copied and
    belong to one module. So a copy of this object holds nothing, and nothing of ours is in a file.

    Torch registers no communication hook with the reducer of a copied ``DistributedDataParallel``.
    The copy therefore averages uncompressed gradients over the default process group, and
    ``attach`` may be called on it.

    Args:
        act: the hook; None calls nothing.
    """

    def __init__(self, act: Callable[..., Any] | None = None) -> None:
        self._act = act

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return type(self), ()

    def exchange(self, state, bucket):  # type: ignore[no-untyped-def]
        """Be a communication hook; untyped, as DDP inspects annotations."""
        if self._act is None:
            raise RuntimeError(
                "The communication hook of a copied module exchanges nothing; call attach on the "
                "copy, or train the module that was copied."
            )
        return self._act(state, bucket)

    def watch(self, module: Any, *passed: Any) -> None:
        """Be a hook before or after a module's forward pass."""
        if self._act is not None:
            self._act(module)
