"""Send every element whose magnitude reaches a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding import elias_fano
from lightning_gc.compressors.base import AbsoluteError, Codec, Knob
from lightning_gc.compressors.sparsifiers import sparse_payload, topk_selection
from lightning_gc.flow import Limits, Payload
from lightning_gc.kernels.dispatch import fused
from lightning_gc.kernels.select import select
from lightning_gc.search_space import Range


@dataclass(frozen=True)
class HardThreshold(Codec):
    """Send all elements of magnitude λ or more, however many; keep the others as the error.

    ``C(x)_i = x_i`` if ``|x_i| ≥ λ``, else 0. One λ for the whole model. With error feedback every
    element is sent once enough has built up, and under ``AllGather`` the error stays below λ an
    element at all times: this is what minimises the total error over training for a given number
    of elements sent.

    Args:
        threshold: λ, in units of the (unscaled) gradient, at least 0. Higher means more
            compression. The paper's rule is ``1 / (2·sqrt(0.001·d))`` for d parameters in all.

    Wire format:
        Ragged; k differs between workers and steps.
        ``values     # (k,) float32``
        ``positions  # (coded_bytes(k, numel),) uint8``, Elias-Fano coded, ascending: at most
        ``2 + log2(numel/k)`` bits each and a byte or two.

    Raises:
        ValueError: a negative, infinite or NaN ``threshold``.

    Example:
        >>> from lightning_gc import HardThreshold
        >>> HardThreshold(0.005)
        HardThreshold(threshold=0.005)

    Reference:
        Sahu et al., "Rethinking gradient sparsification as total error minimization",
        NeurIPS 2021.
    """

    threshold: float = 0.01

    kind = "sparsifier"
    ragged = True
    selects = True
    knob = Knob("threshold", low=1e-9, high=1e3, more="compression")
    space = (Range("threshold", 1e-5, 0.1, scale="log"),)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise ValueError(
                f"HardThreshold(threshold={self.threshold!r}): the threshold is a magnitude and "
                f"must be a finite number of at least 0; use 0.01, say."
            )

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take what reaches the threshold. On CUDA the host waits to know how much that is."""
        if fused(buffer):
            values, found, _ = select(None, buffer, self.threshold)
            return values, elias_fano.encode(found, buffer.numel())
        return self.take(buffer, self.choose(buffer, bucket))

    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        """Find what reaches the threshold."""
        return topk_selection.reaching(buffer, self.threshold)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        """Add as many elements as came."""
        sparse_payload.put(payload, out, scale)

    def bound(self, numel: int) -> AbsoluteError:
        """Return v = λ·√numel."""
        return AbsoluteError(self.threshold * math.sqrt(numel))

    def limits(self, numel: int) -> Limits:
        """All elements at most."""
        return numel, elias_fano.most_bytes(numel)

    def sent(self, payload: Payload, numel: int) -> int:
        """Return how many reached the threshold."""
        return payload[0].numel()

    @classmethod
    def examples(cls) -> tuple[HardThreshold, ...]:
        """One that sends some, one that sends nothing, one that sends all."""
        return (cls(1.0), cls(1e3), cls(0.0))
