"""Advise whether compression would speed up a model: time the link, the module and methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_gc.advice.advising import Advice as Advice
    from lightning_gc.advice.advising import advise as advise

__all__ = ["Advice", "advise"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used; parts of this package need no Lightning."""
    if name in __all__:
        from lightning_gc.advice import advising

        return getattr(advising, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
