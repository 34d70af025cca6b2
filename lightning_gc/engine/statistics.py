"""Statistics: a worker's element and byte counts, norms, and sums for a controller."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket, Tally
from lightning_gc.engine.epoch_statistics import EpochStatistics


class Statistics:
    """Counts elements and bytes; measures norms on request.

    Attributes:
        tally: elements and bytes so far.
        norms_wanted: measure norms before and after compression in this round.
        norms: ``(‖x‖, ‖x − C(x)‖)`` per bucket of the last measured round.
        leftovers: errors of that round, by parameter name, also without a memory.
        epoch: sums for a controller, or None.
    """

    def __init__(self) -> None:
        self.tally = Tally()
        self.norms_wanted = False
        self.norms: list[tuple[Tensor, Tensor]] = []
        self.leftovers: dict[str, Tensor] = {}
        self.epoch: EpochStatistics | None = None

    def see_error(
        self,
        bucket: Bucket,
        error: Tensor,
        before: Tensor | None,
        rates: Mapping[str, float] | None,
    ) -> None:
        """Record a bucket's error ``x − C(x)``.

        Args:
            bucket: where it has arisen.
            error: ``(numel,)``.
            before: ``‖x‖``; None: do not measure norms.
            rates: parameter name -> learning rate of this round; None: no memory keeps the error,
                so that it does not count for the controller.
        """
        if self.epoch is not None and rates is not None:
            self.epoch.see_error(bucket, error, rates)
        if before is not None:
            self.norms.append((before, torch.linalg.vector_norm(error)))
            self.leftovers |= bucket.split(error)
