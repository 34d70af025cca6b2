"""Statistics of a worker's rounds: element counts, norms, and sums for a controller."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket, Tally
from lightning_gc.engine.epoch_statistics import EpochStatistics


class Statistics:
    """Counts elements and bytes; measures norms where asked.

    Attributes:
        tally: elements and payload bytes so far.
        norms_wanted: measure norms before and after compression in this round.
        norms: ``(‖x‖, ‖x − C(x)‖)`` per bucket of the last measured round.
        leftovers: what that round left unsent, by parameter name.
        epoch: collects what a controller has asked for, or None.
    """

    def __init__(self) -> None:
        self.tally = Tally()
        self.norms_wanted = False
        self.norms: list[tuple[Tensor, Tensor]] = []
        self.leftovers: dict[str, Tensor] = {}
        self.epoch: EpochStatistics | None = None

    def begin_round(self) -> None:
        """Forget the norms of the round before."""
        self.norms.clear()
        self.leftovers.clear()

    def see_error(self, bucket: Bucket, error: Tensor, before: Tensor | None, kept: bool) -> None:
        """Measure what was not sent of a bucket.

        Args:
            bucket: the bucket.
            error: what was not sent, ``(numel,)``.
            before: the norm before compression, or None.
            kept: it stays in a memory, and so counts as error for the controller.
        """
        if self.epoch is not None and kept:
            self.epoch.see_error(error)
        if before is not None:
            self.norms.append((before, torch.linalg.vector_norm(error)))
            self.leftovers |= bucket.split(error)
