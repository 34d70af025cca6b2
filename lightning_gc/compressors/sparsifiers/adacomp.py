"""Send, of each stretch of elements, those that the newest gradient makes large."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from lightning_gc.bucket import Bucket
from lightning_gc.compressors.base import Codec, Knob, Multiple
from lightning_gc.compressors.signs import sign_payload
from lightning_gc.compressors.sparsifiers import sparse_sign_payload
from lightning_gc.flow import Limits, Payload
from lightning_gc.search_space import Range


@dataclass(frozen=True)
class AdaComp(Codec):
    """Send elements that would exceed the greatest of their bin if the newest gradient came twice.

    With G the error plus the newest gradient dW, and the soft score ``H = G + dW``, each bin of
    ``bin_size`` elements sends those with ``|H_i| ≥ max|G|``, the maximum being that of the bin.
    What is sent is ``s·sign(G_i)``, s being the mean over all bins of these maxima; what that
    leaves of G_i, or adds to it, is the error. So how many are sent follows from the gradients:
    many where they change, few where an old error outweighs them. That the sign is that of G, that
    s is one number a tensor, and that a last bin which is shorter counts as any other is our
    reading of the paper.

    dW is ``bucket.grad``. Without a memory that is G itself, so elements of half the maximum are
    sent; so are they in the second encoding of a two-shot scheme, where the mean is as new as can
    be. Where the bucket's gradient is shorter than what is encoded, which is padded then, zeros
    follow it.

    Args:
        bin_size: elements in a bin, at least 1. Larger means more compression: each bin sends
            about one element or a few. The paper has 50 for convolutions and 500 for others.

    Wire format:
        Ragged; c differs between workers and steps.
        ``scale      # (1,) float32``
        ``positions  # (coded_bytes(c, numel),) uint8``, Elias-Fano coded, ascending: at most
        ``2 + log2(numel/c)`` bits each and a byte or two
        ``signs      # (floor(c / 8),) uint8``, eight elements a byte
        ``last       # (c mod 8,) uint8``, the last signs, one a byte, whose number tells c
        At one element in a hundred that makes 9.6 bits a sent element.

    Raises:
        ValueError: ``bin_size`` below 1 or not whole.

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

    kind = "sparsifier"
    ragged = True
    knob = Knob("bin_size", low=8, high=1 << 14, more="compression", integer=True)
    space = (Range("bin_size", 50, 5000, scale="log", integer=True),)

    def __post_init__(self) -> None:
        if not 1 <= self.bin_size < float("inf") or self.bin_size != int(self.bin_size):
            raise ValueError(
                f"AdaComp(bin_size={self.bin_size!r}): a bin needs a whole number of elements, at "
                f"least 1; use 50 for convolutions and 500 for other layers."
            )

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take the scale out of what is chosen. On CUDA the host waits for their number."""
        size = int(min(self.bin_size, max(1, buffer.numel())))
        bins = pad(buffer, (0, -buffer.numel() % size)).view(-1, size)  # (b, size)
        greatest = bins.abs().amax(dim=1) if len(bins) else bins.new_zeros(0)  # (b,)
        scale = sign_payload.mean(greatest, len(bins))
        newest = buffer if bucket.phase else bucket.grad.to(buffer.dtype)
        score = bins + pad(newest, (0, bins.numel() - newest.numel())).view(-1, size)
        # Not "reaches": a bin with something that is not a number must not keep it unseen.
        below = (score.abs_() < greatest.view(-1, 1)).view(-1)[: buffer.numel()]
        chosen = below.logical_not_().logical_and_(buffer != 0).nonzero().view(-1)
        return scale.view(1), *sparse_sign_payload.take(
            buffer, chosen, sparse_sign_payload.both(scale)
        )

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        """Add the scale or its negative to as many elements as came."""
        sparse_sign_payload.check(payload, out.numel(), 1)
        sparse_sign_payload.add(payload[1:], sparse_sign_payload.both(payload[0][0]), out, scale)

    def bound(self, numel: int) -> Multiple:
        """Return ω = 1 + d/b for b bins: no contraction, as small elements may be sent as s.

        ``(|x_i| − s)² ≤ x_i² + s²``, and s², the square of a mean of b magnitudes, is at most
        ``‖x‖²/b``. d/b is reached: where all bins have one element that is not sent and is much
        greater than all others, which are.
        """
        bins = -(-numel // int(min(self.bin_size, max(1, numel))))
        return Multiple(1 + numel / max(1, bins))

    def limits(self, numel: int) -> Limits:
        """All elements at most."""
        return None, *sparse_sign_payload.limits(numel, numel)

    def sent(self, payload: Payload, numel: int) -> int:
        """Return how many were chosen."""
        return sparse_sign_payload.count(payload)

    @classmethod
    def examples(cls) -> tuple[AdaComp, ...]:
        """Bins that do not divide a tensor, one that is all of it, and one element each."""
        return (cls(10), cls(), cls(1))
