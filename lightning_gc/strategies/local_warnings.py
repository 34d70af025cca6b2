"""Local warnings: settings with which local steps run, but hardly train."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

from lightning_gc.compressors import Compressor


def warn_of_few_rounds(compressor: Compressor, steps: int | None, every: int) -> None:
    """Warn if a sparsifier has so few rounds that it does not send most elements even once."""
    knob = compressor.knob
    if steps is None or knob is None or knob.field != "density" or compressor.level is None:
        return
    rounds = -(-steps // every)
    if rounds * compressor.level < 1:
        oftener = int(steps * compressor.level)
        warnings.warn(
            f"{steps} steps with every={every} are {rounds} rounds, in each of which a share of "
            f"{compressor.level:g} of the elements is sent: most are never sent, and old errors do "
            f"harm. Send a share of {math.ceil(100 / rounds) / 100:g} or more"
            + (f", or exchange oftener, every={oftener} or less." if oftener else "."),
            stacklevel=2,
        )


def warn_of_unlike_rates(trainer: Any, schedulers: Iterable[Any]) -> None:
    """Warn if a plateau scheduler watches a metric that each worker has its own value of."""
    watched = {each.monitor for each in schedulers if each.reduce_on_plateau}
    if not watched or trainer.world_size == 1 or trainer._results is None:
        return
    for metric in trainer._results.result_metrics:
        if metric.meta.name in watched and metric.is_tensor and not metric.meta.sync.should:
            warnings.warn(
                f"ReduceLROnPlateau watches {metric.meta.name}, of which every worker has its own "
                f"value, so their learning rates may part; log it with sync_dist=True.",
                stacklevel=2,
            )
