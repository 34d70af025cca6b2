"""AdaComp: send, of each bin of elements, those that the newest gradient makes large."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_gc.compressors.base import Codec, Knob, Multiple, Traits, Waits
from lightning_gc.compressors.signs import sign_payload
from lightning_gc.core import Bucket, Field, Payload, Range, Wire


@dataclass(frozen=True)
class AdaComp(Codec):
    """Send elements that would exceed the greatest of their bin if the newest gradient came twice.

    With G the error plus the newest gradient dW, and the soft score ``H = G + dW``, each bin of
    ``bin_size`` elements sends those with ``|H_i| ≥ max|G|`` of the bin as ``s·sign(G_i)``, s being
    the mean over bins of these maxima. The difference from G_i is the error. Many are sent where
    gradients change, few where an old error outweighs them. Our reading of the paper: the sign is
    G's, s is one number per tensor, and a shorter last bin counts as a full one.

    dW is ``bucket.grad``, padded with zeros as the buffer is. Without a memory, and in the second
    encoding of a two-shot scheme, it is G, so elements of half the maximum are sent. A sent element
    takes 9.6 bits where one in a hundred is sent.

    Args:
        bin_size: elements in a bin, at least 1. Larger means more compression: a bin sends one or a
            few. The paper has 50 for convolutions and 500 for others.

    Example:
        >>> import torch
        >>> from lightning_gc import AdaComp
        >>> from lightning_gc.testing import Lockstep
        >>> one = Lockstep(1, AdaComp(bin_size=2))
        >>> one.step([{"w": torch.tensor([4.0, 1.0, 0.5, -2.0])}]).mean["w"]
        tensor([ 3.,  0.,  0., -3.])

    Reference:
        Chen, Choi, Brand, Agrawal, Zhang and Gopalakrishnan, "AdaComp: Adaptive Residual Gradient
        Compression for Data-Parallel Distributed Training", AAAI 2018.
    """

    bin_size: int = 500
    limits = {
        "bin_size": (
            "[1, inf) a bin's number of elements; 50 for convolutions and 500 for other layers"
        ),
    }

    traits = Traits(
        kind="sparsifier",
        knob=Knob("bin_size", low=8, high=1 << 14, more="compression", integer=True),
        space=(Range("bin_size", 50, 5000, scale="log", integer=True),),
    )
    waits = Waits(1)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Subtract the signed scale from chosen elements. On CUDA the host waits once."""
        size = int(min(self.bin_size, max(1, buffer.numel())))
        bins = pad(buffer, (0, -buffer.numel() % size)).view(-1, size)  # (b, size)
        greatest = bins.abs().amax(dim=1) if len(bins) else bins.new_zeros(0)  # (b,)
        scale = sign_payload.mean(greatest, len(bins))
        newest = buffer if bucket.phase else bucket.grad.to(buffer.dtype)
        score = bins + pad(newest, (0, bins.numel() - newest.numel())).view(-1, size)
        # Negated, so that NaN is chosen: it must not stay in the error unnoticed.
        below = (score.abs_() < greatest.view(-1, 1)).view(-1)[: buffer.numel()]
        chosen = below.logical_not_().logical_and_(buffer != 0).nonzero().view(-1)
        levels = sign_payload.both(scale)
        return scale.view(1), *sign_payload.take_chosen(buffer, chosen, levels)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        sign_payload.add_chosen(payload[1:], sign_payload.both(payload[0][0]), out, scale)

    def bound(self, numel: int) -> Multiple:
        """Return ω = 1 + d/b for b bins: no contraction, as small elements may be sent as s.

        ``(|x_i| − s)² ≤ x_i² + s²``, and s², the square of a mean of b magnitudes, is at most
        ``‖x‖²/b``. d/b is reached where each bin sends all but one element, much the greatest.
        """
        bins = -(-numel // int(min(self.bin_size, max(1, numel))))
        return Multiple(1 + numel / max(1, bins))

    def wire(self, numel: int) -> Wire:
        return (Field("scale", torch.float32, 1), *sign_payload.chosen_fields(numel, numel))

    def sent(self, payload: Payload, numel: int) -> int:
        return sign_payload.count(payload)

    @classmethod
    def examples(cls) -> tuple[AdaComp, ...]:
        return (cls(10), cls(), cls(1))
