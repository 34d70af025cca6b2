"""SingularTriplets: base class of codecs that send some of a matrix's singular triplets."""

from __future__ import annotations

import abc
import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_gc.compressors.base import Codec
from lightning_gc.compressors.low_rank.factorisation import sides
from lightning_gc.compressors.sparsifiers import topk_selection
from lightning_gc.core import Bucket, Field, Payload, Wire, payload_validation

_EPS = 2.0**-23  # of float32: what is that much smaller than the greatest is its rounding


class SingularTriplets(Codec):
    """Send the triplets of ``M = Σ σ_i·u_i·v_iᵀ`` that ``kept`` names, as vectors.

    A tensor of shape (n, ...) is a matrix of n rows; one of one dimension, as a shard of
    ``TwoShot``, is folded into ⌊√d⌋ rows and padded with zeros. Where the vectors would not be
    smaller than the tensor it is sent as it is: u is empty then, and v the tensor.
    """

    @abc.abstractmethod
    def kept(self, values: Tensor, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Return a mask of the sent triplets, ``(r,)`` bool, and their divisors, ``(r,)``.

        Args:
            values: singular values, ``(r,)`` float64, descending; those below 1.2e-7 of the
                greatest, float32's rounding, are zero.
            bucket: for random numbers.
        """

    @abc.abstractmethod
    def smaller(self, shape: tuple[int, ...], triplets: int | None) -> bool:
        """Return whether triplets are smaller than the tensor; None: number not known yet."""

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take triplets out of ``buffer``. The host waits for their number."""
        if not buffer.numel() or not self.smaller(bucket.shape, None):
            return self._whole(buffer)
        n, m = sides(bucket.shape)
        matrix = pad(buffer, (0, n * m - buffer.numel())).view(n, m)
        # u are vectors of the shorter side: n orthonormal ones span all n x m matrices.
        u, v = self._chosen(matrix.t() if n > m else matrix, bucket)
        if not self.smaller(bucket.shape, len(u)):
            return self._whole(buffer)
        if n > m:
            u, v = v, u
        buffer.sub_((u.t() @ v).view(-1)[: buffer.numel()])  # without what filled the last row
        return u.reshape(-1), v.reshape(-1)

    def _whole(self, buffer: Tensor) -> Payload:
        whole = buffer.clone()
        buffer.zero_()
        return buffer.new_empty(0), whole

    def _chosen(self, matrix: Tensor, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Return ``(k, n)``, orthonormal, and ``(k, m)`` for a matrix of n rows and more columns.

        As exact as the arithmetic even where singular vectors are not: ``Σ u_i·(u_iᵀ·M)`` is M for
        any basis.
        """
        basis, values = _decomposed(matrix)  # (n, n), (n,), descending
        kept, divisors = self.kept(values, bucket)
        # Elements that are not finite must be sent: in the error nobody would see them.
        kept[:1] |= ~matrix.isfinite().all()
        chosen = kept.nonzero().view(-1)
        u = basis.t()[chosen].to(matrix.dtype)
        return u, (u @ matrix) / divisors[chosen].to(matrix.dtype).view(-1, 1)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        n, m = sides(bucket.shape)
        count = payload[0].numel() // max(1, n)
        whole = not count and (payload[1].numel() or not self.smaller(bucket.shape, None))
        if whole:
            payload_validation.lengths(payload, 0, out.numel())
            out.add_(payload[1], alpha=scale)
            return
        payload_validation.lengths(payload, count * n, count * m)
        if count > min(n, m):
            most = f"a {n} x {m} matrix, which has {min(n, m):,} at most; it is damaged."
            raise ValueError(f"The payload has {count:,} singular triplets of {most}")
        u, v = payload
        product = u.view(count, n).t() @ v.view(count, m)
        out.add_(product.view(-1)[: out.numel()], alpha=scale)

    def wire(self, numel: int) -> Wire:
        """Return the format of the maximal number of triplets, the length of the shorter side."""
        return (
            Field("u", torch.float32, numel, "worker", "(k, n) of an n x m matrix"),
            Field("v", torch.float32, numel + math.isqrt(numel), "worker", "(k, m)"),
        )


def _decomposed(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return left singular vectors, in columns, and singular values, in float64.

    From M·Mᵀ, in a fraction of an SVD's time; in float64 its error is below float32's rounding.
    """
    clean = matrix.double().nan_to_num(0.0, 0.0, 0.0)
    largest = clean.abs().amax().clamp_min(topk_selection.smallest(clean))
    clean.div_(largest)
    squares, vectors = torch.linalg.eigh(clean @ clean.t())  # ascending
    values = squares.clamp_min(0).sqrt().flip(0)
    values = values.where(values > _EPS * values[0], 0.0)
    return vectors.flip(1), values.mul_(largest)
