"""Find the Lightning package that the program uses, and register our strategies in both packages.

Importing our adaptor registers names such as ``"compressed_ddp"``. If Lightning is not imported
yet, an import hook in ``sys.meta_path`` imports the adaptor right after Lightning.

Three other ways do not serve. Importing Lightning here would make ``import lightning_gc`` load
torch. Lightning's entry points are for callbacks, and are read after the Trainer has looked up the
strategy. Registering at the first use of our names is too late, because
``strategy="compressed_ddp"`` uses none of them.
"""

from __future__ import annotations

import copyreg
import importlib
import sys
from abc import ABCMeta
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import FrameType, FunctionType, ModuleType, new_class
from typing import Any, ClassVar, Self

ADAPTORS = {
    "pytorch_lightning": "lightning_gc.lightning.for_pytorch_lightning",
    "lightning.pytorch": "lightning_gc.lightning.for_lightning",
}
"""``{Lightning package: module that registers our strategies for it}``."""

FABRICS = {
    "lightning_fabric": "lightning_gc.lightning.fabric_for_pytorch_lightning",
    "lightning.fabric": "lightning_gc.lightning.fabric_for_lightning",
}
"""``{package of Fabric: module that registers our strategies for it}``."""

_ALL = ADAPTORS | FABRICS


def lightning(among: Mapping[str, str] = ADAPTORS) -> str:
    """Return the Lightning package that the program uses, else an installed one."""
    installed = (name for name in among if find_spec(name.partition(".")[0]))
    return _imported(among) or next(installed, next(iter(among)))


def _imported(among: Mapping[str, str]) -> str | None:
    """Return the package that has been imported; of several, the one that the program uses.

    A library, such as MLflow, may import the other one. So where both are there, look who asks:
    the nearest caller with variables of one package only, then the program's own file.
    """
    found = [name for name in among if sys.modules.get(name)]
    if len(found) < 2:
        return next(iter(found), None)
    for names in _namespaces():
        homes = {home for value in names.values() for home in _homes(value)}
        new, old = "lightning" in homes, bool(homes & {"pytorch_lightning", "lightning_fabric"})
        if new != old:
            return next(name for name in found if name.startswith("lightning.") == new)
    return found[0]


def _namespaces() -> Iterator[dict[str, Any]]:
    """Yield the variables of each caller outside of this library, and of the program's file."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if not f"{frame.f_globals.get('__name__')}.".startswith("lightning_gc."):
            yield {**frame.f_globals, **frame.f_locals}
        frame = frame.f_back
    yield vars(sys.modules["__main__"])


def _homes(value: object) -> set[str]:
    """Return the packages of a module, a function, or a class's or an object's bases; not ours."""
    if isinstance(value, ModuleType):
        names = {value.__name__}
    elif isinstance(value, FunctionType):
        names = {value.__module__}
    else:
        cls: Any = value if issubclass(type(value), type) else type(value)
        names = {base.__module__ for base in cls.__mro__}
    homes = {str(name).partition(".")[0] for name in names}
    return set() if "lightning_gc" in homes else homes


class EitherLightning(metaclass=ABCMeta):  # noqa: B024 - not ABC: a base would reorder the others
    """Choose the Lightning package of a strategy when the object is made, not at import.

    One module per Lightning package joins a mixin with a class of that package. Calling the mixin,
    or a user's subclass of it, makes an object for ``lightning()``.
    ``issubclass`` takes the class for one package as a subclass of the class for the other. So a
    Trainer accepts an object for the other package until ``refuse_other_package`` explains.
    """

    _packages: ClassVar[Mapping[str, str]] = ADAPTORS

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return an object for the Lightning package that the program uses."""
        made: Self = super().__new__(cls.as_called())
        return made

    @classmethod
    def as_called(cls) -> Any:
        """Return the class with the name that users call, joined with their package's."""
        return cls if package_of(cls) else class_for(cls, lightning(cls._packages))

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        ours = cls.__module__ in _ALL.values()
        return True if ours and cls.__bases__[0] in other.__mro__ else NotImplemented

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the user's class and the package, as the joined class cannot be imported."""
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        make, arguments, *state = reduced
        if make is copyreg.__newobj__ and "_parts" in vars(type(self)):  # type: ignore[attr-defined]
            make, arguments = _make, vars(type(self))["_parts"]
        return (make, arguments, *state)


@cache
def class_for(mixin: Any, package: str) -> Any:
    """Return the mixin, or a user's subclass of it, joined with the package's class."""
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
    """Return the Lightning package of the class's bases, or None for a mixin alone."""
    homes = [base.__module__ for base in cls.__mro__]
    found = (name for name in _ALL if any(home.startswith(f"{name}.") for home in homes))
    return next(found, None)


def public_class(mixin: Any) -> Any:
    """Return the class for the imported package, or the mixin if none is imported yet.

    Tools such as LightningCLI read signatures and base classes, which the mixin lacks.
    """
    package = _imported(mixin._packages)
    return class_for(mixin, package) if package else mixin


def refuse_other_package(ours: object, theirs: object) -> None:
    """Raise ValueError if an object is given to a Trainer or Fabric of another package.

    Args:
        ours: a strategy.
        theirs: an object that the Trainer or Fabric made, such as the accelerator.
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
    """Register our strategies in each Lightning package, now or when it is imported."""
    for name, module in _ALL.items():
        if sys.modules.get(name):
            importlib.import_module(module)
    sys.meta_path.insert(0, _RegisterAfterImport())


class _RegisterAfterImport(MetaPathFinder):
    """Import our adaptor right after a Lightning package."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the other finders' spec, with a loader that also imports the adaptor."""
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

            # Patch this instance: a replaced loader would hide the package's sources.
            loader.exec_module = exec_module
        return spec
