"""Validation: refuse controllers and models that cannot work, before the first step."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_gc.compressors import Compressor
from lightning_gc.controllers import Controller
from lightning_gc.memories import Memory


def check_controller(controller: Any, compressor: Compressor, memory: Memory, whose: str) -> None:
    """Refuse a controller of a wrong type, or one that cannot work with compressor or memory."""
    if not isinstance(controller, Controller):
        raise ValueError(
            f"{whose}(controller={controller!r}): give an instance, such as "
            f"lightning_gc.controllers.Fixed(0.01), or leave it out."
        )
    controller.check(compressor.knob)
    if controller.errors and not memory.buffers:
        raise ValueError(
            f"{controller!r} watches the error, but {memory!r} keeps none; use memory=Residual()."
        )


def refuse_sparse_gradients(module: nn.Module) -> None:
    """Raise ValueError if an embedding has sparse gradients, which are not flat."""
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
            raise ValueError(
                f"{name} is {type(child).__name__}(sparse=True), whose gradients cannot be "
                f"compressed; use sparse=False, TopK sends few elements of it anyway."
            )
