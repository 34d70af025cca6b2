"""Send the signs of a momentum."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gc.compressors.signs.sign_sgd import SignSGD


@dataclass(frozen=True)
class Signum(SignSGD):
    """Vote on the sign of each worker's own moving average of gradients.

    It is a name for two things that belong together: ``SignSGD``, and the memory that goes with it
    unless another is chosen, ``LocalMomentum(momentum=0.9)``. The optimizer must have no momentum.

    Communication pattern:
        As that of ``SignSGD``.

    Wire format:
        As that of ``SignSGD``: 1 bit an element and 4 bytes.

    Example:
        >>> from lightning_gc import CompressedDDPStrategy, Signum
        >>> CompressedDDPStrategy(Signum()).memory
        LocalMomentum(momentum=0.9)

    Reference:
        Bernstein, Wang, Azizzadenesheli and Anandkumar, "signSGD: Compressed Optimisation for
        Non-Convex Problems", ICML 2018.
    """

    default_memory = "local_momentum"
