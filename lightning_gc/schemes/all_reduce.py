"""AllReduce: average the payloads of a linear codec, then decode once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_gc.compressors.base import dense
from lightning_gc.compressors.joint import Joint, WholeCodec
from lightning_gc.core import Bucket, Flow, Mean
from lightning_gc.schemes.base import Scheme


@dataclass(frozen=True)
class AllReduce(Scheme):
    """Average the payloads of all workers, then decode the mean. For linear codecs only.

    Communication pattern:
        One all-reduce of the payload: ``2·(W−1)/W`` times its bytes per worker, flat in W.

    Raises:
        ValueError: when combined with a compressor that is not linear.

    Example:
        >>> from lightning_gc import AllReduce, RandomK
        >>> AllReduce().check(RandomK(0.01))
    """

    averages = True

    def joint(self, workers: int) -> Joint:
        return "parts"

    def flow(self, codec: WholeCodec, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        if codec.codec.traits.plain:
            yield from dense(buffer, out)
            return
        mean = yield Mean(codec.send(buffer, bucket))
        codec.receive_all([tuple(mean)], out, bucket, averaged=True)
