"""AtomoSVD: send singular triplets of a matrix, drawn at random so that it is unbiased."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_gc.bucket import Bucket
from lightning_gc.coding import payload_validation
from lightning_gc.coding.wire import Field, Wire
from lightning_gc.compressors.base import Codec
from lightning_gc.compressors.bounds import Variance
from lightning_gc.compressors.low_rank.factorisation import RANK, check_rank, sides
from lightning_gc.compressors.sparsifiers import topk_selection
from lightning_gc.compressors.traits import Waits
from lightning_gc.flow import Payload

_EPS = 2.0**-23  # of float32: what is that much smaller than the greatest is its rounding


@dataclass(frozen=True)
class AtomoSVD(Codec):
    """Keep each singular triplet with a probability, and make it larger in return.

    With ``M = Σ σ_i·u_i·v_iᵀ``: ``C = Σ_kept (σ_i/p_i)·u_i·v_iᵀ``, where triplet i is kept with
    probability ``p_i``, each by itself, so that ``E C = M``. Of all probabilities whose sum is
    ``rank`` the variance ``Σ σ_i²·(1/p_i − 1)`` is least for ``p_i = min(1, σ_i/c)``: the greatest
    are always sent, and c follows from the sum. Each worker draws for itself.

    A tensor of shape (n, ...) is a matrix of n rows; one of one dimension, as a shard of
    ``TwoShot``, is folded into ⌊√d⌋ rows and padded with zeros. A tensor that ``rank`` triplets
    would not make smaller is sent as it is. Singular values below 1.2e-7 of the greatest, float32's
    rounding, count as zero. The decomposition takes ``O(n·m·min(n, m))`` time in every step, which
    is seconds on a host where the shorter side is thousands.

    Args:
        rank: how many triplets are sent on average, at least 1 (the paper's s). Higher means less
            compression, less variance.

    The number of triplets k differs between workers and steps: ``rank`` ± √rank. The vectors of the
    longer side are multiplied by σ/p. An element takes ``32·rank·(1/n + 1/m)`` bits on average:
    0.25 for 512 x 512 at rank 2. Where that is 32 or more, u is empty and v is the tensor.

    Raises:
        ValueError: ``rank`` below 1 or no whole number.

    Example:
        >>> from lightning_gc import AtomoSVD
        >>> AtomoSVD(rank=2).bound(64 * 64)
        Variance(omega=31.0)

    Reference:
        Wang, Sievert, Liu, Charles, Papailiopoulos and Wright, "ATOMO: Communication-efficient
        Learning via Atomic Sparsification", NeurIPS 2018.
    """

    rank: int = 2

    traits = replace(RANK, unbiased=True)
    waits = Waits(2)

    def __post_init__(self) -> None:
        check_rank("AtomoSVD", self.rank)

    def compresses(self, shape: tuple[int, ...]) -> bool:
        """Return whether ``rank`` triplets are smaller than the tensor."""
        return self.rank * sum(sides(shape)) < math.prod(shape)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take triplets σ/p·u·vᵀ, drawn at random. The host waits for their number."""
        if not self.compresses(bucket.shape):
            whole = buffer.clone()
            buffer.zero_()
            return buffer.new_empty(0), whole
        n, m = sides(bucket.shape)
        matrix = pad(buffer, (0, n * m - buffer.numel())).view(n, m)
        # u are vectors of the shorter side: n orthonormal ones span all n x m matrices.
        u, v = self._drawn(matrix.t() if n > m else matrix, bucket)
        if n > m:
            u, v = v, u
        buffer.sub_((u.t() @ v).view(-1)[: buffer.numel()])  # without what filled the last row
        return u.reshape(-1), v.reshape(-1)

    def _drawn(self, matrix: Tensor, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Return ``(k, n)``, orthonormal, and ``(k, m)`` for a matrix of n rows and more columns.

        Unbiased even where singular vectors are inexact: ``Σ u_i·(u_iᵀ·M)`` is M for any basis.
        """
        basis, values = self._decomposed(matrix)  # (n, n), (n,), descending
        p = probabilities(values, self.rank)
        draw = bucket.generator(shared=False)
        kept = torch.rand(p.shape, generator=draw, device=p.device, dtype=p.dtype) < p
        # Elements that are not finite must be sent: in the error nobody would see them.
        kept[:1] |= ~matrix.isfinite().all()
        chosen = kept.nonzero().view(-1)
        u = basis.t()[chosen].to(matrix.dtype)
        return u, (u @ matrix) / p[chosen].to(matrix.dtype).view(-1, 1)

    def _decomposed(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return left singular vectors, in columns, and a multiple of singular values, in float64.

        From M·Mᵀ, in a fraction of an SVD's time; in float64 its error is below float32's rounding.
        """
        clean = matrix.double().nan_to_num(0.0, 0.0, 0.0)
        clean.div_(clean.abs().amax().clamp_min(topk_selection.smallest(clean)))
        squares, vectors = torch.linalg.eigh(clean @ clean.t())  # ascending
        values = squares.clamp_min(0).sqrt().flip(0)
        return vectors.flip(1), values.where(values > _EPS * values[0], 0.0)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        if not self.compresses(bucket.shape):
            payload_validation.lengths(payload, 0, out.numel())
            out.add_(payload[1], alpha=scale)
            return
        n, m = sides(bucket.shape)
        count = payload[0].numel() // n
        payload_validation.lengths(payload, count * n, count * m)
        if count > min(n, m):
            most = f"a {n} x {m} matrix, which has {min(n, m):,} at most; it is damaged."
            raise ValueError(f"The payload has {count:,} singular triplets of {most}")
        u, v = payload
        product = u.view(count, n).t() @ v.view(count, m)
        out.add_(product.view(-1)[: out.numel()], alpha=scale)

    def bound(self, numel: int) -> Variance:
        """Return ω = ⌊√d⌋/rank − 1, or 0: no matrix of d elements has a shorter side above ⌊√d⌋.

        With equal probabilities, rank/n of n triplets, it is ``n/rank − 1``; the best make no more.
        """
        return Variance(max(0.0, math.isqrt(numel) / self.rank - 1))

    def wire(self, numel: int) -> Wire:
        """Return as many triplets as the shorter side of a matrix has elements, folded or not."""
        return (
            Field("u", torch.float32, numel, "worker", "(k, n) of an n x m matrix"),
            Field("v", torch.float32, numel + math.isqrt(numel), "worker", "(k, m)"),
        )

    @classmethod
    def examples(cls) -> tuple[AtomoSVD, ...]:
        return (cls(1), cls(3), cls(64))


def probabilities(values: Tensor, budget: float) -> Tensor:
    """Return probabilities of sum ``budget`` (the paper's s), or less if few values are not zero.

    The paper removes one value after the other, and 1 from the budget, while ``budget·σ_i/Σσ`` over
    those that remain reaches 1. Here all steps are one. ``values``: ``(r,)``, r ≥ 1, descending.
    """
    order = torch.arange(len(values), device=values.device)
    tails = values.flip(0).cumsum(0).flip(0)  # Σ of this one and all behind it
    certain = (values * (budget - order) >= tails) & (values > 0)
    rest = tails.masked_fill(certain, 0).amax()
    shares = values / rest.where(rest > 0, 1.0) * (budget - certain.sum())
    return torch.where(certain, 1.0, shares)
