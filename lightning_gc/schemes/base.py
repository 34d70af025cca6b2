"""What a scheme is: the rounds by which one-round codecs reach a common mean."""

from __future__ import annotations

import abc

from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding.payload_validation import naming
from lightning_gc.compressors.base import Codec, Compressor
from lightning_gc.flow import Flow, Payload


class Scheme(abc.ABC):
    """Turns a codec into a flow. Knows no codec by name.

    Laws, each held by a test of the same number in ``lightning_gc.testing``:

    1. The mean over workers of what each sent is the result: what a scheme itself rounds away is
       booked in somebody's error.
    2. All workers decode the result from the same bytes, so replicas stay bit-identical.
    3. A codec that cannot work is refused at construction.

    Attributes:
        averages: payloads are averaged before they are decoded, so the codec must be linear, or
            average by itself.
        splits: what a codec has selected is split by position, so it must be one that ``selects``.
    """

    averages: bool = False
    splits: bool = False

    @abc.abstractmethod
    def flow(self, codec: Codec, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        """Exchange what ``codec`` takes out of ``buffer`` and leave the mean in ``out``."""

    def check(self, compressor: Compressor) -> None:
        """Raise ValueError if the compressor cannot be used with this scheme."""
        if self.averages and not (compressor.linear or compressor.averages):
            raise ValueError(
                f"{self!r} averages payloads, but those of {compressor!r} are not linear: their "
                f"mean is not the mean of the gradients. Use AllGather() or TwoShot()."
            )
        if compressor.averages and not self.averages:
            raise ValueError(
                f"{self!r} gathers payloads, but {compressor!r} reaches the mean by rounds of its "
                f"own. Use AllReduce()."
            )
        if self.splits and not compressor.selects:
            other = "AllReduce()" if compressor.linear else "TwoShot()"
            raise ValueError(
                f"{self!r} splits what has been selected by position, but {compressor!r} does not "
                f"select elements and name their positions. Use {other}, or a compressor such as "
                f"TopK(0.01)."
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
    with naming(codec, bucket, sender):
        codec.decode(tuple(payload), out, scale, bucket)
