"""Hook arguments: refuse those that would take DDP's only hook, or are for a DDP wrapper."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

_HOOK_ARGUMENTS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")


def refuse_other_hooks(owner: str, ddp_kwargs: Mapping[str, Any], instead: str) -> None:
    """Raise ValueError if an argument registers another hook than the gradient exchange.

    Args:
        owner: the strategy's name.
        ddp_kwargs: arguments of DDPStrategy and DistributedDataParallel.
        instead: what to write for DDP's mixed precision.
    """
    taken = [name for name in _HOOK_ARGUMENTS if ddp_kwargs.get(name) is not None]
    if taken:
        raise ValueError(
            f"{owner} got {taken[0]}={ddp_kwargs[taken[0]]!r}, but the gradient "
            f"exchange is DDP's only hook. Remove {taken[0]}, or use Lightning's DDPStrategy."
        )
    if ddp_kwargs.get("mixed_precision") is not None:
        raise ValueError(
            f"{owner} got mixed_precision=..., which takes up DDP's only "
            f"communication hook. Use {instead} instead."
        )


def refuse_wrapper_arguments(owner: str, given: Iterable[str]) -> None:
    """Raise ValueError for arguments of ``DistributedDataParallel`` and of its hooks.

    Args:
        owner: a strategy without that wrapper.
        given: names of arguments that are not its own, but for those with their default.
    """
    wrappers = inspect.signature(DistributedDataParallel.__init__).parameters
    for name in given:
        if name in (*_HOOK_ARGUMENTS, *list(wrappers)[1:]):
            raise ValueError(
                f"{owner}({name}=...): that is for DistributedDataParallel, in which nothing is "
                f"wrapped here; leave it out."
            )
