"""NonzeroBlocks: send the blocks that are not zero, whole, and leave no error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_gc.compressors.base import Codec, Contraction, Traits, Waits
from lightning_gc.compressors.quantisers.blockwise_codes import BLOCKS
from lightning_gc.compressors.sparsifiers import sparse_codec
from lightning_gc.core import Bucket, Choice, Field, Payload, Wire, elias_fano, payload_validation


@dataclass(frozen=True)
class NonzeroBlocks(Codec):
    """Send every block of elements that are not all zero: ``C(x) = x``.

    For gradients with many zeros, such as an embedding's, where a batch uses few rows. With blocks
    as long as a row, only the used rows are sent. Nothing is lost, so no memory is needed. Where
    all blocks have an element, it sends somewhat more than no compression does, W − 1 times.

    Args:
        block_size: elements of a block. Smaller means fewer zeros sent and more positions.

    A block that is sent takes ``32·block_size`` bits, and its position about 2 + log2(blocks/sent).

    The paper adds blocks up on servers, which send back the union of them. Here every worker gets
    all blocks of all workers, by ``AllGather``, the default.

    Example:
        >>> import torch
        >>> from lightning_gc import NonzeroBlocks
        >>> from lightning_gc.testing import Lockstep
        >>> rows = torch.zeros(1000, 4)
        >>> rows[[7, 500]] = 1.0
        >>> result = Lockstep(2, NonzeroBlocks(4)).step([{"w": rows}, {"w": rows}])
        >>> torch.equal(result.mean["w"], rows), result.wire_bytes[0]
        (True, 72)

    Reference:
        Fei, Ho, Sahu, Canini and Sapio, "Efficient Sparse Collective Communication and its
        Application to Accelerate Distributed Deep Learning" (OmniReduce), SIGCOMM 2021.
    """

    block_size: int = 256
    limits = {"block_size": BLOCKS}

    traits = Traits(
        kind="sparsifier",
        unbiased=True,
        space=(Choice("block_size", (32, 64, 128, 256, 512)),),
    )
    waits = Waits(1)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take the blocks. On CUDA the host waits for their number."""
        size = self._size(buffer.numel())
        blocks = pad(buffer, (0, -buffer.numel() % size)).view(-1, size)
        found = (blocks != 0).any(1).nonzero().view(-1)  # NaN is not zero
        values = blocks[found].view(-1)
        buffer.zero_()
        return values, elias_fano.encode(found, len(blocks))

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        numel, (values, coded) = out.numel(), payload
        size = self._size(numel)
        blocks, count = -(-numel // size), values.numel() // size
        payload_validation.lengths(
            payload, count * size, elias_fano.coded_bytes(min(count, blocks), blocks)
        )
        found = elias_fano.decode(coded, count, blocks, payload_validation.on_host(coded))
        rows = values.to(out.dtype).view(count, size)
        found, rows = payload_validation.positions(found, rows, blocks)
        at = (found.view(-1, 1) * size + torch.arange(size, device=found.device)).view(-1)
        inside = rows.reshape(-1).where(at < numel, 0.0)  # the last block was filled up
        out.index_add_(0, at.clamp(max=numel - 1), inside, alpha=scale)

    def wire(self, numel: int) -> Wire:
        size = self._size(numel)
        blocks = -(-numel // size)
        values = Field("values", torch.float32, blocks * size, "worker", "whole blocks")
        return values, sparse_codec.positions_field(blocks, blocks, "worker")

    def sent(self, payload: Payload, numel: int) -> int:
        return payload[0].numel()

    def bound(self, numel: int) -> Contraction:
        """Return δ = 1: the error is zero."""
        return Contraction(1.0)

    def _size(self, numel: int) -> int:
        return min(self.block_size, max(1, numel))

    @classmethod
    def examples(cls) -> tuple[NonzeroBlocks, ...]:
        return (cls(4), cls(), cls(1))
