"""Which of the two Lightning packages the program uses, and the strategies' names in both.

Names such as ``"compressed_ddp"`` are registered by importing our adaptor: at once if Lightning is
imported already, else by an import hook, as Lightning has no entry point for strategies.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

ADAPTORS = {
    "pytorch_lightning": "lightning_gc.strategies.for_pytorch_lightning",
    "lightning.pytorch": "lightning_gc.strategies.for_lightning",
}
"""Lightning package -> module that registers our strategies for it."""

FABRICS = {
    "lightning_fabric": "lightning_gc.strategies.fabric_for_pytorch_lightning",
    "lightning.fabric": "lightning_gc.strategies.fabric_for_lightning",
}
"""Package of Fabric -> the same for that."""

_ALL = ADAPTORS | FABRICS


def lightning(among: Mapping[str, str] = ADAPTORS) -> str:
    """Return the Lightning package that the program has imported, else one that is installed."""
    imported = [name for name in among if sys.modules.get(name)]
    installed = (name for name in among if find_spec(name.partition(".")[0]))
    return imported[0] if imported else next(installed, next(iter(among)))


def adaptor(among: Mapping[str, str] = ADAPTORS) -> ModuleType:
    """Return the module with our strategies for ``lightning()``."""
    return importlib.import_module(among[lightning(among)])


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
