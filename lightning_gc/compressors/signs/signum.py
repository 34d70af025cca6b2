"""Signum: majority vote on the signs of a momentum."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from lightning_gc.compressors.signs.sign_sgd import SignSGD
from lightning_gc.compressors.wrappers.wrapper import Preset


@dataclass(frozen=True)
class Signum(Preset):
    """Vote on the sign of each worker's own moving average of gradients: ``SignSGD`` of a momentum.

    Its default memory is ``LocalMomentum(momentum=0.9)``. The optimizer must have no momentum.
    A survey's table lists it with error feedback. Its paper has none, because a vote is not a mean
    of gradients, and so leaves no error.

    Example:
        >>> from lightning_gc import CompressedDDPStrategy, Signum
        >>> CompressedDDPStrategy(Signum()).memory
        LocalMomentum(momentum=0.9)

    Reference:
        Bernstein, Wang, Azizzadenesheli and Anandkumar, "signSGD: Compressed Optimisation for
        Non-Convex Problems", ICML 2018.
    """

    memory_name = "local_momentum"

    @functools.cached_property
    def inner(self) -> SignSGD:
        return SignSGD()
