"""SignSGD: send signs, and follow the majority vote of all workers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import Traits, Unbounded
from lightning_gc.compressors.joint import CodecScheme
from lightning_gc.compressors.signs import sign_payload
from lightning_gc.core import Bucket, Field, Flow, Payload, Wire, payload_validation
from lightning_gc.core.bit_packing import pack
from lightning_gc.kernels.signs import coins, least_of


@dataclass(frozen=True)
class SignSGD(sign_payload.TwoLevels):
    """Vote on each element's sign; the result is +1 or −1 where most workers agree.

    ``out_i = sign(Σ_workers sign(x_i))``, a direction: the learning rate alone is the length of a
    step, and usually has to be 100 to 10,000 times smaller. A tie is 0 under ``AllGather``, and a
    random sign under ``TwoShot``: its second encoding has one bit too. Elements that are zero
    vote at random; a tensor of zeros does not vote.

    Small tensors vote too, as their mean gradient would need another learning rate; with
    ``SizeSwitch(SignSGD())`` they are sent dense anyway. It has no error feedback, as the length
    of what was sent is not known; see ``EFSignSGD``. 1 bit an element and 4 bytes.

    Communication pattern:
        As the scheme's. With ``TwoShot``, the default, it is a bit an element each way.

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

    traits = Traits(kind="quantiser", conserves=False, default_memory="none")
    levels = "votes"

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        # Votes are whole numbers, so what arrives for a second encoding is zero up to rounding.
        least = least_of(bucket.workers) if bucket.phase else 0.0
        nonzero, positive = buffer.abs() > least, buffer > least
        votes = nonzero.any().float().view(1)
        ((name, _),) = bucket.shapes.items()
        if not payload_validation.on_host(buffer):
            every = torch.arange(buffer.numel(), device=buffer.device)
            positive |= ~nonzero & coins(bucket.key(name), bucket.step, every)
        elif not nonzero.all():
            (zeros,) = (~nonzero).nonzero(as_tuple=True)
            positive[zeros] = coins(bucket.key(name), bucket.step, zeros)
        bits = pack(positive.to(torch.uint8), 1)
        sign_payload.add(bits, torch.cat([-votes, votes]), buffer, -1.0)
        return bits, votes

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        bits, votes = payload
        sign_payload.add(bits, torch.cat([-votes, votes]), out, scale)

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme | None) -> Flow:
        yield from super().flow(bucket, buffer, out, scheme)
        if bucket.wanted:
            sign_payload.decide(out, bucket.workers)

    def bound(self, numel: int) -> Unbounded:
        """Return no bound: a sign has length 1, and a gradient any length."""
        return Unbounded()

    def wire(self, numel: int) -> Wire:
        votes = Field("votes", torch.float32, 1, note="1, or 0 of a tensor of zeros")
        return (sign_payload.field(numel, "positive"), votes)
