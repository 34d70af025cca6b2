"""Register names of our strategies with Lightning, and answer those that are not registered.

Listed are each kind of training, and DDP with each method. Other combinations, such as
``"compressed_hsdp_topk"`` or ``"compressed_ddp_topk_spawn"``, work without being listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_gc.compressors import COMPRESSORS, QSGD, BinMeans, ChunkedTopK, Quantised
from lightning_gc.core.refusal import refuse
from lightning_gc.core.registry import closest
from lightning_gc.exchange.automatic import AUTO
from lightning_gc.local_steps import OuterSGD
from lightning_gc.memories import ErrorFeedback

_ALONE: dict[str, dict[str, Any]] = {"": {}}
_UNUSED: dict[str, dict[str, Any]] = {
    "": {},
    "_find_unused_parameters_false": {"find_unused_parameters": False},
    "_find_unused_parameters_true": {"find_unused_parameters": True},
}
_LAUNCHERS: dict[str, dict[str, Any]] = {
    "": {},
    "_spawn": {"start_method": "spawn"},
    "_fork": {"start_method": "fork"},
    "_notebook": {"start_method": "fork"},
}
_VARIANTS = {
    launcher + unused: how | what
    for launcher, how in _LAUNCHERS.items()
    for unused, what in _UNUSED.items()
}
"""Suffix of ``ddp`` in the names that Lightning's messages advise -> arguments."""

_KINDS: dict[str, tuple[str, Any, dict[str, dict[str, Any]]]] = {
    "ddp": ("DDP with compressed gradients", "cast", _VARIANTS),
    "hsdp": ("HSDP with compressed gradients between replicas", "cast", _ALONE),
    "fsdp": ("FSDP with compressed reduce-scatters", QSGD(8), _ALONE),
}
"""Kind -> what it is, its default compressor, its variants."""

_LOCAL_STEPS: dict[str, dict[str, Any]] = {
    "local_steps": {"compressor": "cast"},
    "diloco": {"compressor": "identity", "every": 100, "outer": OuterSGD.diloco()},
    "sparseloco": {
        "compressor": Quantised(ChunkedTopK(), BinMeans(2)),
        "memory": ErrorFeedback(decay=0.95),
        "every": 30,
    },
}


def register(registry: Any, **strategies: type) -> None:
    """Register the names of these strategies, and let the registry answer all other ones.

    Args:
        registry: of the Trainer's or of Fabric's strategies, of either Lightning package.
        strategies: kind, ``ddp``, ``hsdp``, ``fsdp`` or ``local_steps`` -> class.
    """
    unlisted, ours = type(registry)(), set()
    for kind, name, listed, what, settings in _entries():
        where = registry if listed else unlisted
        if kind in strategies and name not in where:
            words = ", ".join(f"{key}={value!r}" for key, value in settings.items())
            where.register(name, strategies[kind], description=f"{what}: {words}", **settings)
            ours.add(name)
    # Lightning has no hook for names that are not registered.
    registry.__class__ = type("StrategyRegistry", (_Answering, type(registry)), {})
    registry.unlisted, registry.ours = unlisted, ours


def _entries() -> Iterator[tuple[str, str, bool, str, dict[str, Any]]]:
    """Yield kind, name, whether it is listed, what it is, and arguments, of every name."""
    for kind, (what, default, variants) in _KINDS.items():
        for method in (None, *(AUTO if kind != "fsdp" else ()), *COMPRESSORS):
            for variant, arguments in variants.items():
                name = "_".join(filter(None, ("compressed", kind, method))) + variant
                shown = kind == "ddp" and AUTO.get(method or "") is None
                listed = not variant and (shown or method is None)
                first = "gradients" if kind == "fsdp" else "compressor"
                yield kind, name, listed, what, {first: method or default} | arguments
    what = "local steps with compressed exchanges"
    for name, settings in _LOCAL_STEPS.items():
        for launcher, how in _LAUNCHERS.items():
            yield "local_steps", name + launcher, not launcher, what, settings | how


class _Answering(dict[str, Any]):
    """Mixin of Lightning's registry, which refuses a name that it does not list, or lists them all.

    Attributes:
        unlisted: a registry of names that work, but are not shown.
        ours: all names of our strategies.
    """

    unlisted: Any
    ours: set[str]

    def __missing__(self, name: str) -> Any:
        return self.unlisted[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.unlisted

    def get(self, name: str, default: Any = None) -> Any:
        """Return a strategy made by the entry, as Lightning's method does."""
        if default is None:
            self.refuse_misspelt(name)
        return super().get(name, default)

    def available_strategies(self) -> list[str]:
        """Return the listed names. Lightning looks in this list for the name that a user gives."""
        return _Names(self)

    def refuse_misspelt(self, name: object) -> None:
        """Raise ValueError if the name is not known, and closer to one of ours than to others."""
        if name in self:
            return
        whole = f"compressed_ddp_{name}"  # such as "qsgd" or "auto_feedback"
        close = whole if whole in self.ours else closest(name, [*self, *self.unlisted])
        if close in self.ours:
            refuse(
                f"There is no strategy {name!r}; did you mean strategy={close!r}? lightning-gc "
                f"list compressors prints all methods"
            )


class _Names(list[str]):
    """The listed names. A search finds unlisted names too, and refuses misspelt ones."""

    def __init__(self, registry: _Answering) -> None:
        super().__init__(registry)
        self._registry = registry

    def __reduce__(self) -> tuple[type[list[str]], tuple[list[str]]]:
        """Be a plain list in the processes that Lightning spawns, which look up no names."""
        return list, (list(self),)

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str):
            self._registry.refuse_misspelt(name)
        return name in self._registry
