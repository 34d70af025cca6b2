"""Local settings: refuse what cannot work with local steps, before the first one."""

from __future__ import annotations

from typing import Any

from torch import nn

_AVERAGING = {"WeightAveraging", "StochasticWeightAveraging"}
"""Names, since there are two packages, and versions that lack one."""


def refuse_in_trainer(owner: str, trainer: Any, module: nn.Module) -> None:
    """Raise ValueError for settings of Trainer and module that local steps cannot obey."""
    if not trainer.lightning_module.automatic_optimization:
        raise ValueError(
            f"{owner} counts the steps of one optimizer and exchanges after every H of them, which "
            f"needs automatic optimization; use that, or CompressedDDPStrategy."
        )
    for name, child in module.named_modules():
        if isinstance(child, nn.SyncBatchNorm):
            raise ValueError(
                f"{name} is SyncBatchNorm, which communicates in every forward pass, and {owner} "
                f"is there to avoid that; use BatchNorm, without Trainer(sync_batchnorm=True): its "
                f"running statistics are averaged with each exchange."
            )
    for callback in trainer.callbacks:
        names = {cls.__name__ for cls in type(callback).__mro__}
        if "ModelPruning" in names:
            raise ValueError(
                f"{type(callback).__name__} prunes by a worker's own weights, which differ between "
                f"workers with {owner}, and so would what each prunes; remove the callback and "
                f"prune after the fit, or use CompressedDDPStrategy."
            )
        if _AVERAGING & names:
            raise ValueError(
                f"{type(callback).__name__} averages a worker's own weights, which differ between "
                f"workers, and {owner} already averages over workers; remove the callback."
            )
