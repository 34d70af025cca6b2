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
        share, oftener = math.ceil(100 / rounds) / 100, int(steps * compressor.level)
        if share < 1:
            fix = f"Send a share of {share:g} or more" + (
                f", or exchange oftener, every={oftener} or less" if oftener else ""
            )
        else:  # all in the one round there is: no sparsifier
            smaller = f"every={oftener} or less" if oftener else "a smaller every"
            fix = f"Use a quantiser, such as QSGD(4), {smaller}, or more steps"
        warnings.warn(
            f"{steps} steps with every={every} are {rounds} round{'s' * (rounds > 1)}, in each of "
            f"which a share of {compressor.level:g} of the elements is sent: most are never sent, "
            f"and old errors do harm. {fix}.",
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
