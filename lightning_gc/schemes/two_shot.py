"""TwoShot: all-to-all of encoded shards, average in float32, encode again, all-gather."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.joint import Joint, WholeCodec, limits_of
from lightning_gc.core import Bucket, Exchange, Flow, Gather
from lightning_gc.schemes.base import Scheme, book, padded, unpad


@dataclass(frozen=True)
class TwoShot(Scheme):
    """Cut the tensor into W shards; worker i averages shard i and sends its encoding to all.

    W times the error of the second encoding is added to the error of the shard's owner, so that the
    mean over workers of the errors is exact.

    Communication pattern:
        One all-to-all and one all-gather: ``2·(W−1)/W`` times the payload's bytes per worker, flat
        in W, like a ring all-reduce of the payload. Ragged payloads send their lengths too.

    Example:
        >>> from lightning_gc import QSGD, CompressedDDPStrategy, TwoShot
        >>> strategy = CompressedDDPStrategy(QSGD(bits=4), scheme=TwoShot())

    Reference:
        Tang et al., "1-bit Adam", ICML 2021 (the compressed all-reduce). There the second error has
        its own buffer.
    """

    cuts = True

    def joint(self, workers: int) -> Joint:
        return "shards"

    def encodings(self, workers: int) -> int:
        return workers + 1

    def flow(self, codec: WholeCodec, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        kernels = codec.in_shards(bucket, buffer)
        if kernels is not None:
            arrived = yield Exchange(tuple(kernels.encode()))
            gathered = yield Gather(kernels.encode_mean(arrived))
            if bucket.wanted:
                kernels.decode(gathered, out)
            return
        workers, me = bucket.workers, bucket.worker
        size = -(-buffer.numel() // workers)  # the last shards may be shorter, or empty
        limits = limits_of(codec, size)
        parts = [bucket.shard(i, size) for i in range(workers)]

        payloads = []
        for i, part in enumerate(parts):
            shard, whole = padded(buffer, i, size)
            payloads.append(codec.send(whole, part))
            unpad(whole, shard)
        arrived = yield Exchange(tuple(payloads), limits)

        mean = torch.empty(size, dtype=buffer.dtype, device=buffer.device)
        codec.receive_all(arrived, mean, parts[me])
        payload = codec.send(mean, parts[me].again())  # mean now holds the second error
        book(buffer, me * size, mean, workers)
        gathered = yield Gather(payload, limits)

        if not bucket.wanted:
            return
        out.zero_()
        for i, payload in enumerate(gathered):
            shard, whole = padded(out, i, size)
            codec.receive(tuple(payload), whole, 1.0, parts[i].again(), i)
            unpad(whole, shard)
