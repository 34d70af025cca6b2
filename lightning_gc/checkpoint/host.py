"""Declare the strategy attributes that saving and restoring use; act together on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_gc.control.control_loop import ControlLoop
from lightning_gc.controllers import Controller
from lightning_gc.exchange import Workers
from lightning_gc.exchange.peers import all_or_raise
from lightning_gc.transports.distributed import Distributed, gather_text

KEY = "lightning_gc"
"""Key of this library's part in a checkpoint."""


class Ranks(Protocol):
    """Attributes of a Lightning strategy that collectives over all ranks need."""

    root_device: torch.device
    global_rank: int
    world_size: int


class Host(Ranks, Protocol):
    """Attributes of a Lightning strategy that saving and restoring use."""

    local_workers: Workers
    controller: Controller | None
    control_loop: ControlLoop | None
    checkpoint_io: Any
    local_rank: int
    lightning_module: Any
    reduce: Callable[..., Tensor]


def first_worker(host: Host) -> int:
    """Return the first worker of this process."""
    engines = host.local_workers.engines
    return engines[0].worker if engines else host.global_rank


def configuration_of(host: Host) -> dict[str, str]:
    """Return the settings that saved state depends on, as text.

    These are ``repr`` of compressor, memory and controller. ``"exchanged"`` names the quantity
    that errors belong to, if it is not gradients.
    """
    parts, exchanged = host.local_workers.configuration, host.local_workers.exchanged
    return {
        "compressor": repr(parts.compressor),
        "memory": repr(parts.memory),
        "controller": repr(host.controller),
        **({} if exchanged == "gradients" else {"exchanged": exchanged}),
    }


def is_alone(host: Host) -> bool:
    """Return whether this worker may be the only one that saves, as after an exception.

    A collective would hang then.
    """
    return bool(host.lightning_module.trainer.interrupted)


def on_all_ranks(host: Ranks, act: Callable[[], str]) -> dict[int, str]:
    """Call ``act`` on each rank and return all results by rank; raise on all ranks if one fails."""
    transport = Distributed(purpose="a checkpoint")
    gather = partial(gather_text, transport=transport, device=host.root_device)
    return all_or_raise({host.global_rank: act}, host.world_size, gather)


def together(host: Host, acts: Mapping[int, Callable[[], str]]) -> dict[int, str]:
    """Call the acts of this process's workers; return all workers' results.

    Raises:
        RuntimeError: on all workers, if an act fails on one.
    """
    engines = host.local_workers.engines

    def gather(text: str) -> list[str]:
        if is_alone(host) or host.world_size == 1:
            return [text]
        return gather_text(text, Distributed(purpose="a checkpoint"), host.root_device)

    return all_or_raise(acts, engines[0].workers if engines else host.world_size, gather)
