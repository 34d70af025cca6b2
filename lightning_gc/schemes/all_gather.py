"""AllGather: every worker receives all payloads and decodes their mean."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_gc.compressors.joint import Joint, WholeCodec, limits_of
from lightning_gc.core import Bucket, Flow, Gather
from lightning_gc.schemes.base import Scheme


@dataclass(frozen=True)
class AllGather(Scheme):
    """Send the payload to all workers; each adds up all payloads, in the same order.

    Communication pattern:
        One all-gather: ``(W−1)`` times the payload's bytes per worker, growing with W. Ragged
        payloads first send their lengths, 8 bytes per tensor. Each keeps its length, in a ring.

    Example:
        >>> from lightning_gc import AllGather
        >>> AllGather()
        AllGather()
    """

    def joint(self, workers: int) -> Joint:
        return "parts"

    def flow(self, codec: WholeCodec, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        payload = codec.send(buffer, bucket)
        payloads = yield Gather(payload, limits_of(codec, buffer.numel()))
        if not bucket.wanted:
            return
        codec.receive_all(payloads, out, bucket)
