"""TwoShot: all-to-all of encoded shards, reduce in float32, encode again, all-gather."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding import wire
from lightning_gc.compressors.base import Codec, cached_wire
from lightning_gc.flow import Exchange, Flow, Gather
from lightning_gc.schemes.base import Scheme, decode, encode


@dataclass(frozen=True)
class TwoShot(Scheme):
    """Cut the tensor into W shards; worker i averages shard i and sends its encoding to all.

    The second encoding loses something too. It is the owner's to remember: W times the loss goes
    into the owner's error, so that the mean over workers of the errors is true.

    Communication pattern:
        One all-to-all and one all-gather: ``2·(W−1)/W`` times the payload's bytes per worker, flat
        in W, like a ring all-reduce of the payload. Ragged payloads send their lengths first.

    Example:
        >>> from lightning_gc import QSGD, CompressedDDPStrategy, TwoShot
        >>> strategy = CompressedDDPStrategy(QSGD(bits=4), scheme=TwoShot())

    Reference:
        Tang et al., "1-bit Adam", ICML 2021 (the compressed all-reduce); the booking of the second
        error without a buffer of its own is ours.
    """

    def flow(self, codec: Codec, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        """Encode W shards, exchange, average one, encode it, gather W, decode."""
        workers, me = bucket.workers, bucket.worker
        size = -(-buffer.numel() // workers)  # the last shards may be shorter, or empty
        limits = wire.limits(cached_wire(codec, size))
        parts = [bucket.shard(i, size) for i in range(workers)]

        payloads = []
        for i, part in enumerate(parts):
            shard, whole = _shard(buffer, i, size)
            payloads.append(encode(codec, whole, part))
            _put_back(whole, shard)
        arrived = yield Exchange(tuple(payloads), limits)

        mean = torch.zeros(size, dtype=buffer.dtype, device=buffer.device)
        for sender, payload in enumerate(arrived):
            decode(codec, tuple(payload), mean, 1 / workers, parts[me], sender)
        payload = encode(codec, mean, parts[me].again())  # mean now holds the second error
        mine = buffer[me * size : (me + 1) * size]
        mine.add_(mean[: mine.numel()], alpha=workers)
        # NaN and overflow that another worker sent are in the payload; no error must keep them.
        mine.nan_to_num_(0.0, 0.0, 0.0)
        gathered = yield Gather(payload, limits)

        if not bucket.wanted:
            return
        out.zero_()
        for i, payload in enumerate(gathered):
            shard, whole = _shard(out, i, size)
            decode(codec, tuple(payload), whole, 1.0, parts[i].again(), i)
            _put_back(whole, shard)


def _shard(flat: Tensor, index: int, size: int) -> tuple[Tensor, Tensor]:
    """Return shard ``index`` and the same padded to ``size``: one tensor where it is full."""
    shard = flat[index * size : (index + 1) * size]
    short = size - shard.numel()
    return shard, torch.nn.functional.pad(shard, (0, short)) if short else shard


def _put_back(whole: Tensor, shard: Tensor) -> None:
    if whole is not shard:
        shard.copy_(whole[: shard.numel()])
