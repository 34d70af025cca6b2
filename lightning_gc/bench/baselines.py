"""Baselines: no synchronisation, which is the limit, plain DDP, and torch's communication hooks."""

from __future__ import annotations

from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lightning_gc.tuning.lightning_flavour import pl

NONE, PLAIN = "no synchronisation", "plain DDP"
FP16, POWER_SGD = "torch fp16 hook", "torch PowerSGD hook"
RANK = 2  # of PowerSGD
BASELINES = (NONE, PLAIN, FP16, POWER_SGD)


class HookStrategy(pl.strategies.DDPStrategy):
    """DDP with a communication hook of torch; Lightning registers none on CPU."""

    def __init__(self, hook: tuple[Any, Any], **settings: Any) -> None:
        super().__init__(**settings)
        self.hook = hook

    def _register_ddp_hooks(self) -> None:
        self.model.register_comm_hook(*self.hook)  # type: ignore[union-attr, operator]


class UnsynchronisedStrategy(pl.strategies.DDPStrategy):
    """Each worker trains by itself on its own share of the data."""

    def configure_ddp(self) -> None:
        """Do not wrap the module in DDP."""

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """Return this worker's value, also for ``self.log(..., sync_dist=True)``."""
        return tensor


def baseline_strategy(method: str, process_group_backend: str, **settings: Any) -> Any:
    """Return a new strategy of a baseline.

    Args:
        method: one of ``BASELINES``.
        process_group_backend: ``"gloo"`` or ``"nccl"``.
        settings: further ones of ``DDPStrategy``.
    """
    settings["process_group_backend"] = process_group_backend
    if method == NONE:
        return UnsynchronisedStrategy(**settings)
    if method == PLAIN:
        return pl.strategies.DDPStrategy(**settings)
    if method == FP16:
        return HookStrategy((None, default_hooks.fp16_compress_hook), **settings)
    if process_group_backend == "gloo":
        # PowerSGD chains callbacks on Gloo's futures; with several buckets these can dead-lock.
        settings["bucket_cap_mb"] = 10_000
    state = powerSGD_hook.PowerSGDState(None, RANK, start_powerSGD_iter=2)
    return HookStrategy((state, powerSGD_hook.powerSGD_hook), **settings)
