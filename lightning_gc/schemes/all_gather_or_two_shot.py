"""AllGatherOrTwoShot: one all-gather between two workers, two rounds with shards among more."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_gc.compressors.joint import Joint, WholeCodec
from lightning_gc.core import Bucket, Flow
from lightning_gc.schemes.all_gather import AllGather
from lightning_gc.schemes.base import Scheme
from lightning_gc.schemes.two_shot import TwoShot

_FEW, _MORE = AllGather(), TwoShot()


@dataclass(frozen=True)
class AllGatherOrTwoShot(Scheme):
    """Be ``AllGather()`` up to two workers, and ``TwoShot()`` among more.

    Two workers send as many bytes either way. Shards would only cost them a second rounding, half
    an encoding more, and a second message to wait for. The default of quantisers.

    Communication pattern:
        Up to two workers one all-gather, the payload's bytes per worker; else an all-to-all and an
        all-gather, ``2·(W−1)/W`` times the payload's bytes.

    Example:
        >>> from lightning_gc import QSGD, CompressedDDPStrategy
        >>> CompressedDDPStrategy(QSGD(bits=4)).scheme
        AllGatherOrTwoShot()
    """

    cuts = True

    def encodings(self, workers: int) -> int:
        return self._chosen(workers).encodings(workers)

    def joint(self, workers: int) -> Joint:
        return self._chosen(workers).joint(workers)

    def flow(self, codec: WholeCodec, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        yield from self._chosen(bucket.workers).flow(codec, bucket, buffer, out)

    def _chosen(self, workers: int) -> Scheme:
        return _FEW if workers <= 2 else _MORE
