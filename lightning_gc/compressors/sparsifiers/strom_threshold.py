"""StromThreshold: send the sign and position of every element that reaches a threshold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import Codec, Contraction, Knob, Traits, Waits
from lightning_gc.compressors.signs import sign_payload
from lightning_gc.compressors.sparsifiers import topk_selection
from lightning_gc.core import Bucket, Payload, Range, Wire


@dataclass(frozen=True)
class StromThreshold(Codec):
    """Send the sign of all elements of magnitude τ or more; each moves by τ, the rest is kept.

    ``C(x)_i = τ·sign(x_i)`` if ``|x_i| ≥ τ`` (the survey has >), else 0. An element that grows by
    more than τ a step is sent at every step, and its error still grows: τ should be above the
    magnitude of most elements of one gradient. At density 1 % a sent element takes 9.6 bits; the
    paper spends 32.

    Args:
        threshold: τ, in units of the (unscaled) gradient, above 0. Higher means more compression.

    Example:
        >>> import torch
        >>> from lightning_gc import StromThreshold
        >>> from lightning_gc.testing import Lockstep
        >>> one = Lockstep(1, StromThreshold(1.0))
        >>> one.step([{"w": torch.tensor([3.5, 0.5, -1.0])}]).mean["w"]
        tensor([ 1.,  0., -1.])

    Reference:
        Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing",
        Interspeech 2015.
    """

    threshold: float = 0.01
    limits = {"threshold": "[1e-37, 1e38] the threshold, by which elements that are sent move,"}

    traits = Traits(
        kind="sparsifier",
        knob=Knob("threshold", low=1e-7, high=1e30, more="compression"),
        space=(Range("threshold", 1e-5, 0.1, scale="log"),),
    )
    waits = Waits(1)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take ±τ out of elements that reach it. On CUDA the host waits for their number."""
        found = topk_selection.reaching(buffer, self.threshold)
        return sign_payload.take_chosen(buffer, found, self._levels(buffer))

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        sign_payload.add_chosen(payload, self._levels(out), out, scale)

    def _levels(self, like: Tensor) -> Tensor:
        return sign_payload.both(like.new_full((), self.threshold, dtype=torch.float32))

    def bound(self, numel: int) -> Contraction:
        """Return δ = 0: no error grows, but nothing at all is sent of a tensor below τ."""
        return Contraction(0.0)

    def wire(self, numel: int) -> Wire:
        return sign_payload.chosen_fields(numel, numel)

    def sent(self, payload: Payload, numel: int) -> int:
        return sign_payload.count(payload)

    @classmethod
    def examples(cls) -> tuple[StromThreshold, ...]:
        return (cls(1.0), cls(1e3), cls(1e-3))
