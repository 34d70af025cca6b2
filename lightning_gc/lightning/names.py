"""Names of our strategies for processes in Lightning's registry, for each that ``ddp`` has."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NoReturn

from lightning_gc.compressors import COMPRESSORS, QSGD, BinMeans, ChunkedTopK, Quantised
from lightning_gc.local_steps import OuterSGD
from lightning_gc.memories import Residual

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
VARIANTS = {
    launcher + unused: how | what
    for launcher, how in _LAUNCHERS.items()
    for unused, what in _UNUSED.items()
}
"""What follows ``ddp`` in Lightning's names -> the arguments that it stands for."""


def register(registry: Any, strategy: type) -> None:
    """Register ``compressed_ddp``, with Lightning's suffixes, and the same for every compressor.

    Lightning's messages advise names such as ``ddp_notebook``, which would drop the compression.
    Likely misspellings are registered too, to be refused with the right name.
    """
    for name, compressor in ({"": "cast"} | {f"_{name}": name for name in COMPRESSORS}).items():
        for suffix, arguments in VARIANTS.items():
            settings = {"compressor": compressor} | arguments
            words = ", ".join(f"{key}={value!r}" for key, value in settings.items())
            said = f"DDP with compressed gradients: {words}"
            _add(registry, f"compressed_ddp{name}{suffix}", strategy, said, settings)
    for name, cls in COMPRESSORS.items():
        spelling = re.sub(_NEW_WORD, "_", cls.__name__).lower()
        wrong, right = f"compressed_ddp_{spelling}", f"compressed_ddp_{name}"
        said = f"refused: the name is {right!r}"
        _add(registry, wrong, partial(_refuse, wrong, right), said, {})


def register_hsdp(registry: Any, strategy: type) -> None:
    """Register ``compressed_hsdp``, and the same for every compressor."""
    for name, compressor in ({"": "cast"} | {f"_{name}": name for name in COMPRESSORS}).items():
        said = f"HSDP with compressed gradients between replicas: compressor={compressor!r}"
        _add(registry, f"compressed_hsdp{name}", strategy, said, {"compressor": compressor})


def register_fsdp(registry: Any, strategy: type) -> None:
    """Register ``compressed_fsdp``, and the same for every compressor; most biased are refused."""
    every: dict[str, Any] = {"": QSGD(8)} | {f"_{name}": name for name in COMPRESSORS}
    for name, compressor in every.items():
        said = f"FSDP with compressed reduce-scatters: compressor={compressor!r}"
        _add(registry, f"compressed_fsdp{name}", strategy, said, {"compressor": compressor})


def register_local_steps(registry: Any, strategy: type) -> None:
    """Register ``local_steps``, ``diloco`` and ``sparseloco``, with the suffixes of launchers."""
    names: dict[str, dict[str, Any]] = {
        "local_steps": {"compressor": "cast"},
        "diloco": {"compressor": "identity", "every": 100, "outer": OuterSGD.diloco()},
        "sparseloco": {
            "compressor": Quantised(ChunkedTopK(), BinMeans(2)),
            "memory": Residual(decay=0.95),
            "every": 30,
        },
    }
    for name, settings in names.items():
        for launcher, how in _LAUNCHERS.items():
            words = ", ".join(f"{key}={value!r}" for key, value in (settings | how).items())
            said = f"local steps with compressed exchanges: {words}"
            _add(registry, name + launcher, strategy, said, settings | how)


_NEW_WORD = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"  # in TopK, GTopK, PowerSGD


def _add(registry: Any, name: str, make: Any, said: str, arguments: dict[str, Any]) -> None:
    if name not in registry:
        registry.register(name, make, description=said, **arguments)


def _refuse(wrong: str, right: str) -> NoReturn:
    raise ValueError(f"There is no strategy {wrong!r}; did you mean strategy={right!r}?")
