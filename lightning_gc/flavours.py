"""Which of the two Lightning packages the program uses, and the strategies' names in both.

Names such as ``"compressed_ddp"`` are registered by importing our adaptor: at once if Lightning is
imported already, else by an import hook, as Lightning has no entry point for strategies.
"""

from __future__ import annotations

import copyreg
import importlib
import sys
from abc import ABCMeta
from collections.abc import Mapping
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, new_class
from typing import Any, ClassVar, Self

ADAPTORS = {
    "pytorch_lightning": "lightning_gc.lightning.for_pytorch_lightning",
    "lightning.pytorch": "lightning_gc.lightning.for_lightning",
}
"""Lightning package -> module that registers our strategies for it."""

FABRICS = {
    "lightning_fabric": "lightning_gc.lightning.fabric_for_pytorch_lightning",
    "lightning.fabric": "lightning_gc.lightning.fabric_for_lightning",
}
"""Package of Fabric -> the same for that."""

_ALL = ADAPTORS | FABRICS


def lightning(among: Mapping[str, str] = ADAPTORS) -> str:
    """Return the Lightning package that the program has imported, else one that is installed."""
    installed = (name for name in among if find_spec(name.partition(".")[0]))
    return _imported(among) or next(installed, next(iter(among)))


def _imported(among: Mapping[str, str]) -> str | None:
    return next((name for name in among if sys.modules.get(name)), None)


class EitherLightning(metaclass=ABCMeta):  # noqa: B024 - not ABC: a base would reorder the others
    """Mixin that one module per Lightning package joins with a class of that package.

    Calling the mixin, or a user's subclass of it, makes an object for ``lightning()``: the package
    is chosen when the object is made, not when the name is imported.
    The class for one package counts as a base of the class for the other. So either Trainer takes
    an object for the other package far enough for ``refuse_other_package`` to explain.
    """

    _packages: ClassVar[Mapping[str, str]] = ADAPTORS

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return an object for the Lightning package that the program has imported."""
        joined = cls if package_of(cls) else class_for(cls, lightning(cls._packages))
        made: Self = super().__new__(joined)
        return made

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        ours = cls.__module__ in _ALL.values()
        return True if ours and cls.__bases__[0] in other.__mro__ else NotImplemented

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Name the user's class and the package for pickle, which cannot import their join."""
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        make, arguments, *state = reduced
        if make is copyreg.__newobj__ and "_parts" in vars(type(self)):  # type: ignore[attr-defined]
            make, arguments = _make, vars(type(self))["_parts"]
        return (make, arguments, *state)


@cache
def class_for(mixin: Any, package: str) -> Any:
    """Return the mixin, or a user's subclass of the mixin, joined with a class of the package."""
    home = _ALL[package]
    ours = vars(importlib.import_module(home)).values()
    joined = {each.__bases__[0]: each for each in ours if getattr(each, "__module__", "") == home}
    base = next(each for each in mixin.__mro__ if each in joined)
    if base is mixin:
        return joined[base]
    names = ("__module__", "__qualname__", "__doc__")
    members = {name: getattr(mixin, name) for name in names} | {"_parts": (mixin, package)}
    return new_class(mixin.__name__, (mixin, joined[base]), {}, lambda body: body.update(members))


def _make(mixin: Any, package: str) -> Any:
    joined = class_for(mixin, package)
    return joined.__new__(joined)


def package_of(cls: type) -> str | None:
    """Return the Lightning package that a base of the class is from; None for a mixin alone."""
    homes = [base.__module__ for base in cls.__mro__]
    found = (name for name in _ALL if any(home.startswith(f"{name}.") for home in homes))
    return next(found, None)


def public_class(mixin: Any) -> Any:
    """Return the class for the package that is imported, or, before any is, the mixin.

    Tools such as LightningCLI look at signatures and base classes, which the mixin lacks.
    """
    package = _imported(mixin._packages)
    return class_for(mixin, package) if package else mixin


def refuse_other_package(ours: object, theirs: object) -> None:
    """Raise ValueError if an object is given to a Trainer or Fabric of another package.

    Args:
        ours: a strategy.
        theirs: an object that the Trainer or Fabric has made, such as the accelerator.
    """
    wanted, found = package_of(type(ours)), package_of(type(theirs))
    if wanted is None or found is None or wanted == found:
        return
    public = [each.__name__ for each in type(ours).__mro__ if each.__module__ in _ALL.values()]
    lines = [
        f" For {each}: `from {_ALL[each]} import {name}`."
        for name in public[:1]
        for each in (found, wanted)
    ]
    raise ValueError(
        f"This {type(ours).__name__} is for {wanted}, but it was given to {found}.{''.join(lines)}"
    )


def register_names() -> None:
    """Register our strategies in each Lightning package, now or as soon as it is imported."""
    for name, module in _ALL.items():
        if sys.modules.get(name):
            importlib.import_module(module)
    sys.meta_path.insert(0, _RegisterAfterImport())


class _RegisterAfterImport(MetaPathFinder):
    """Imports our adaptor after a Lightning package."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return what the other finders find, with a loader that imports the adaptor as well."""
        if name not in _ALL:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (each.find_spec(name, path, target) for each in others)), None)
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                importlib.import_module(_ALL[name])

            # Of this instance: another loader in its place would hide the sources of the package.
            loader.exec_module = exec_module
        return spec
