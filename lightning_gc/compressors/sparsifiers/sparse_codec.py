"""SparseCodec: base of sparsifiers that choose elements and send their values and positions."""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding.wire import Wire
from lightning_gc.compressors.base import Codec
from lightning_gc.compressors.sparsifiers import sparse_payload
from lightning_gc.flow import Payload


class SparseCodec(Codec):
    """Sends the elements that ``choose`` names, as values and Elias-Fano coded positions.

    Positions take at most ``2 + log2(numel/k)`` bits each, and a byte or two in all. Schemes may
    split the chosen elements: see ``SparseReduce``.
    """

    @property
    def ragged(self) -> bool:
        """Whether the number of elements depends on values, and so differs between workers."""
        return True

    @property
    def sent_dtype(self) -> torch.dtype:
        """What values are rounded to; what rounding leaves of them stays in the error."""
        return torch.float32

    @abc.abstractmethod
    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        """Return the ascending positions of the elements to send, ``(k,)`` int64.

        Arguments are as for ``encode``, but ``buffer`` is not changed.
        """

    def most(self, numel: int) -> int:
        """Return how many of ``numel`` elements are sent at most; if not ``ragged``, always."""
        return numel

    def take(self, buffer: Tensor, positions: Tensor) -> Payload:
        """Move elements out of ``buffer``, or a part of one, into (values, coded positions).

        ``positions`` are ascending, ``(k,)`` int64, of this buffer.
        """
        narrow = None if self.sent_dtype == torch.float32 else self.sent_dtype
        return sparse_payload.take(buffer, positions, narrow)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        return self.take(buffer, self.choose(buffer, bucket))

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        sparse_payload.add(payload, out, scale)

    def wire(self, numel: int) -> Wire:
        return sparse_payload.wire(
            self.most(numel), numel, "worker" if self.ragged else "no", self.sent_dtype
        )

    def sent(self, payload: Payload, numel: int) -> int:
        return payload[0].numel()
