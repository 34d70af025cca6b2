"""Scheme: the communication rounds by which one-round codecs reach a common mean."""

from __future__ import annotations

import abc

from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding import payload_validation
from lightning_gc.compressors.base import Codec, Collective, Compressor, cached_wire
from lightning_gc.flow import Flow, Payload


class Scheme(abc.ABC):
    """Turns a codec into a flow. Knows no codec by name.

    Laws, each held by a test of the same number in ``lightning_gc.testing``:

    1. The mean over workers of what each sent is the result: what a scheme itself rounds away is
       booked in somebody's error.
    2. All workers decode the result from the same bytes, so replicas stay bit-identical.
    3. A codec that cannot work is refused at construction.

    Attributes:
        averages: payloads are averaged before they are decoded, so the codec must be linear.
    """

    averages: bool = False

    @abc.abstractmethod
    def flow(self, codec: Codec, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        """Exchange what ``codec`` takes out of ``buffer`` and leave the mean in ``out``."""

    def check(self, compressor: Compressor) -> None:
        """Raise ValueError if the compressor cannot be used with this scheme."""
        if isinstance(compressor.method, Collective):
            raise ValueError(
                f"{compressor!r} has communication rounds of its own, so it takes no scheme, but "
                f"was given {self!r}; leave scheme out."
            )
        if self.averages and not compressor.traits.linear:
            raise ValueError(
                f"{self!r} averages payloads, but those of {compressor!r} are not linear: their "
                f"mean is not the mean of the gradients. Use AllGather() or TwoShot()."
            )


def encode(codec: Codec, buffer: Tensor, bucket: Bucket) -> Payload:
    """Encode and count what the payload carries."""
    payload = codec.encode(buffer, bucket)
    if bucket.phase == 0:
        bucket.tally.count(buffer.numel(), codec.sent(payload, buffer.numel()), payload)
    return payload


def decode(
    codec: Codec, payload: Payload, out: Tensor, scale: float, bucket: Bucket, sender: int | None
) -> None:
    """Decode what worker ``sender`` sent, or the mean of all where None; an error says which."""
    with payload_validation.naming(codec, bucket, sender):
        payload_validation.fields(payload, cached_wire(codec, out.numel()))
        codec.decode(payload, out, scale, bucket)
