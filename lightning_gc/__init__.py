"""Compress gradients of distributed training: compressors, error feedback, strategies.

Names are imported when first used: ``import lightning_gc`` alone loads neither torch nor Lightning.
Base classes and declarations for authors are in ``compressors``, ``memories`` and ``schemes``.
"""

from __future__ import annotations

import importlib as _importlib
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from lightning_gc import flavours as _flavours

if _TYPE_CHECKING:
    from lightning_gc.advice import advise as advise
    from lightning_gc.attachment.plain_torch import attach as attach
    from lightning_gc.attachment.plain_torch_local_steps import LocalSteps as LocalSteps
    from lightning_gc.compressors import *
    from lightning_gc.elastic.roll import Roll as Roll
    from lightning_gc.lightning.fabric_for_pytorch_lightning import (
        CompressedFabricStrategy as CompressedFabricStrategy,
    )
    from lightning_gc.lightning.for_pytorch_lightning import (
        CompressedDDPStrategy as CompressedDDPStrategy,
    )
    from lightning_gc.lightning.for_pytorch_lightning import (
        CompressedFSDPStrategy as CompressedFSDPStrategy,
    )
    from lightning_gc.lightning.for_pytorch_lightning import (
        CompressedHSDPStrategy as CompressedHSDPStrategy,
    )
    from lightning_gc.lightning.for_pytorch_lightning import (
        CompressionMonitor as CompressionMonitor,
    )
    from lightning_gc.lightning.for_pytorch_lightning import (
        LocalStepsStrategy as LocalStepsStrategy,
    )
    from lightning_gc.lightning.for_pytorch_lightning import (
        SimulatedDDPStrategy as SimulatedDDPStrategy,
    )
    from lightning_gc.lightning.for_pytorch_lightning import (
        SimulatedLocalStepsStrategy as SimulatedLocalStepsStrategy,
    )
    from lightning_gc.local_steps import Elastic as Elastic
    from lightning_gc.local_steps import GrowingRounds as GrowingRounds
    from lightning_gc.local_steps import InnerMoments as InnerMoments
    from lightning_gc.local_steps import OuterSGD as OuterSGD
    from lightning_gc.local_steps import Unequal as Unequal
    from lightning_gc.memories import *
    from lightning_gc.packing import Sender as Sender
    from lightning_gc.packing import pack as pack
    from lightning_gc.packing import unpack as unpack
    from lightning_gc.schemes import *
    from lightning_gc.sharded.unit_gathers import WeightDifferences as WeightDifferences
    from lightning_gc.together import Together as Together
    from lightning_gc.transports.network_model import NetworkModel as NetworkModel

__version__ = "0.2.0"

_FAMILIES = {"compressors": "Compressor", "memories": "Memory", "schemes": "Scheme"}
_SINGLE = {
    "Elastic": "local_steps",
    "GrowingRounds": "local_steps",
    "InnerMoments": "local_steps",
    "LocalSteps": "attachment.plain_torch_local_steps",
    "NetworkModel": "transports.network_model",
    "OuterSGD": "local_steps",
    "Roll": "elastic.roll",
    "Together": "together",
    "Unequal": "local_steps",
    "WeightDifferences": "sharded.unit_gathers",
    "advise": "advice",
    "Sender": "packing",
    "attach": "attachment.plain_torch",
    "pack": "packing",
    "unpack": "packing",
}
_EITHER_LIGHTNING = {
    "CompressedDDPStrategy": "lightning.ddp.CompressedDDP",
    "CompressedFSDPStrategy": "lightning.sharded.CompressedFSDP",
    "CompressedFabricStrategy": "lightning.fabric.CompressedFabric",
    "CompressedHSDPStrategy": "lightning.sharded.CompressedHSDP",
    "CompressionMonitor": "lightning.monitor.Monitor",
    "LocalStepsStrategy": "lightning.local_steps_strategy.RealLocalSteps",
    "SimulatedDDPStrategy": "lightning.simulation.ddp.SimulatedDDP",
    "SimulatedLocalStepsStrategy": "lightning.simulation.simulated_local_steps.SimulatedLocalSteps",
}


if not _TYPE_CHECKING:  # type checkers are to see a misspelt name

    def __getattr__(name: str) -> _Any:
        """Import a public name: a class for either Lightning, a submodule, or a registered class.

        Names for authors are elsewhere, and the error says where. ``import *`` asks for
        ``__all__``. Tools ask for other names that start with an underscore.
        """
        if name in _EITHER_LIGHTNING:
            module, _, mixin = _EITHER_LIGHTNING[name].rpartition(".")
            found = _importlib.import_module(f"{__name__}.{module}")
            return _flavours.public_class(getattr(found, mixin))
        if name in _SINGLE:
            return getattr(_importlib.import_module(f"{__name__}.{_SINGLE[name]}"), name)
        if name == "__all__" or not name.startswith("_"):
            if _find_spec(f"{__name__}.{name}"):
                return _importlib.import_module(f"{__name__}.{name}")
            if "__all__" not in globals():
                _import_all()
            if name in globals():
                return globals()[name]
            known = {each: f"{__name__}.{each}" for each in globals()["__all__"]}
            others = _importlib.import_module(f"{__name__}.controllers").__all__
            known |= {each: f"{__name__}.controllers.{each}" for each in others}
            known |= _for_authors | _ELSEWHERE
            registry = _importlib.import_module(f"{__name__}.core.registry")
            registry.refuse_import(__name__, name, known)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})


_ELSEWHERE = {
    "CompressedGradients": f"{__name__}.huggingface.CompressedGradients",
    "CompressedRayStrategy": f"{__name__}.lightning.for_ray.CompressedRayStrategy",
}
"""The same of names in modules that need packages which are not asked for."""
_for_authors: dict[str, str] = {}
"""``{name: dotted path}`` of base classes and declarations."""


def _import_all() -> None:
    """List the public names: registries, and classes that users can instantiate."""
    public = {}
    for package, family in _FAMILIES.items():
        module = _importlib.import_module(f"{__name__}.{package}")
        for name in module.__all__:
            value = getattr(module, name)
            if name.isupper() or _is_final(value, getattr(module, family)):
                public[name] = value
            else:
                _for_authors[name] = f"{__name__}.{package}.{name}"
    globals().update(public, __all__=sorted([*public, *_SINGLE, *_EITHER_LIGHTNING]))


def _is_final(value: _Any, family: type) -> bool:
    a_class = isinstance(value, type) and issubclass(value, family)
    return a_class and not value.__abstractmethods__


_flavours.register_names()
