"""Send signs, and go where most workers point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding import payload_validation
from lightning_gc.coding.bit_packing import pack
from lightning_gc.compressors.base import Codec, Unbounded
from lightning_gc.compressors.signs import sign_payload
from lightning_gc.flow import Flow, Payload

if TYPE_CHECKING:
    from lightning_gc.schemes.base import Scheme


@dataclass(frozen=True)
class SignSGD(Codec):
    """Vote on each element's sign; the result is +1 or −1 where most workers agree.

    ``out_i = sign(Σ_workers sign(x_i))``. It is a direction and no mean of gradients: the learning
    rate alone is the length of a step, so it is chosen anew, usually 100 to 10,000 times smaller.
    An even number of workers may be divided: under ``AllGather`` the result is then 0, under
    ``TwoShot``, whose answer has one bit too, a sign drawn at random. Elements that are zero vote
    at random; a tensor of zeros does not vote.

    All tensors vote, small ones and those of one dimension too: a mean gradient would need another
    learning rate. ``SizeSwitch(SignSGD())`` leaves them dense all the same.

    No error is fed back, for the result does not tell how much has been sent; see ``EFSignSGD``.
    ``Signum`` votes with the signs of a momentum.

    Communication pattern:
        As the scheme's. With ``TwoShot``, the default, the owners of shards count the votes and
        send the outcome, a bit an element each way.

    Wire format:
        ``signs  # (ceil(numel / 8),) uint8``: one bit an element, set where positive
        ``votes  # (1,) float32``: 1, or 0 of a tensor of zeros
        1 bit an element and 4 bytes.

    Example:
        >>> import torch
        >>> from lightning_gc import SignSGD
        >>> from lightning_gc.testing import Lockstep
        >>> gradients = [torch.tensor([3.0, -1.0]), torch.tensor([-9.0, -2.0]), torch.ones(2)]
        >>> Lockstep(3, SignSGD()).step([{"w": g} for g in gradients]).mean["w"]
        tensor([ 1., -1.])

    Reference:
        Bernstein, Wang, Azizzadenesheli and Anandkumar, "signSGD: Compressed Optimisation for
        Non-Convex Problems", ICML 2018; with majority vote: Bernstein et al., ICLR 2019.
    """

    kind = "quantiser"
    conserves = False
    default_memory = "none"

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take signs."""
        nonzero, positive = buffer != 0, buffer > 0
        votes = nonzero.any().float().view(1)
        if not payload_validation.on_host(buffer) or not nonzero.all():
            draw = bucket.generator(shared=False)
            coins = torch.rand(buffer.shape, generator=draw, device=buffer.device) < 0.5
            positive |= ~nonzero & coins
        bits = pack(positive.to(torch.uint8), 1)
        sign_payload.add(bits, torch.cat([-votes, votes]), buffer, -1.0)
        return bits, votes

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        """Add signs."""
        bits, votes = sign_payload.checked(payload, out.numel(), 1)
        sign_payload.add(bits, torch.cat([-votes, votes]), out, scale)

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: Scheme) -> Flow:
        """Hand the conversation to the scheme; of the mean of votes, the sign counts."""
        yield from scheme.flow(self, bucket, buffer, out)
        if bucket.wanted:
            # The mean of W votes is ±1/W at least, or zero but for the order of addition.
            out.masked_fill_(out.abs() < 0.5 / bucket.workers, 0).sign_()

    def bound(self, numel: int) -> Unbounded:
        """Return no bound: a sign has length 1 whatever the gradient's."""
        return Unbounded()
