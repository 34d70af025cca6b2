"""What ``attach`` refuses before it touches a module: settings that only a strategy can have."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightning_gc.controllers import Controller
from lightning_gc.synchronizer.configuration import Configuration
from lightning_gc.synchronizer.validation import check_controller, refuse_rounds


def check_settings(
    configuration: Configuration,
    controller: Controller | None,
    optimizers: Iterable[torch.optim.Optimizer],
) -> None:
    """Raise ValueError for a memory or a controller that cannot work with these optimizers."""
    memory, groups = configuration.memory, [g for each in optimizers for g in each.param_groups]
    if memory.lookahead:
        raise ValueError(
            f"{memory!r} moves the weights around each forward pass, which a communication hook "
            f"cannot; use CompressedDDPStrategy, or memory=Residual()."
        )
    if memory.lr_aware and not groups:
        raise ValueError(
            f"{memory!r} rescales errors by the learning rates, which attach does not know; give "
            f"attach(..., optimizers=optimizer)."
        )
    for group in groups:
        memory.check_optimizer(group)
    if controller is not None:
        check_controller(controller, configuration.compressor, memory, "attach")
        refuse_rounds(controller, "attach")
