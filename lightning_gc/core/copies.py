"""Single, Renewed and Missing: how objects with a group, a thread or a lock are copied."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn


class Single:
    """Base of what holds a process group, a thread or a lock, and so belongs to one process.

    ``copy.deepcopy``, ``pickle`` and ``torch.save`` of an object that holds one succeed, as
    without this library. The copy has a ``Missing`` in its place.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return Missing, (type(self).__name__,)


class Renewed:
    """Base of what holds a lock or events of a device: a copy has new ones.

    ``_copied`` names the attributes that a copy has, too.
    """

    _copied: ClassVar[tuple[str, ...]] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (), {name: getattr(self, name) for name in self._copied}


class Missing:
    """Stands for a ``Single`` in a copy, and raises when it is used.

    Args:
        kind: class of what the copy lacks.
    """

    def __init__(self, kind: str) -> None:
        self.__dict__["kind"] = kind

    def __repr__(self) -> str:
        return f"<no {self.kind} in a copy>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # torch, copy and pickle look for what is optional
        raise RuntimeError(
            f"{self.kind}.{name}: this is a copy of what trained, and has no connection to other "
            f"workers. Use the original; to train the copy, call fit, or attach to its module."
        )

    def __setattr__(self, name: str, value: object) -> None:
        self.__getattr__(name)

    def __call__(self, *_: object) -> NoReturn:
        """Raise, as any other use."""
        self.__getattr__("call")
