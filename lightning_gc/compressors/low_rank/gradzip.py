"""GradZip: send a matrix as two thin factors, found by alternating least squares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lightning_gc.compressors.low_rank.factorisation import LowRank


@dataclass(frozen=True)
class GradZip(LowRank):
    """Approximate each gradient matrix by alternating, regularised least squares.

    A tensor of shape (n, ...) is a matrix M of n rows and m columns, M_i on worker i and M their
    mean. Either factor minimises ``‖M − P·Qᵀ‖² + λ·(‖P‖² + ‖Q‖²)`` while the other is fixed:
    ``P = M·Q·(QᵀQ + λI)⁻¹`` with Q of the step before, ``Q = Mᵀ·P·(PᵀP + λI)⁻¹``, and
    ``C = P·Qᵀ``. Only the means of M_i·Q and of M_iᵀ·P are needed, so the bytes do not grow with W.
    All workers solve the same fits and apply C; worker i keeps ``M_i − C``, and its mean over
    workers is the error of C.

    Without λ this is the projection of M on the span of M·Q, which ``PowerSGD`` computes by a QR
    decomposition. Here P is only scaled, and a rank x rank system is solved, which is cheaper; λ
    leaves in the error directions that P barely has, which QR would make as long as all others.

    Our reading of the paper: one alternation a step, with errors taken from the mean approximation.
    P is scaled before the fit so that its longest column has length 1 and λ means the same for
    gradients of any size; and Q is orthonormalised before it is used again: a direction that one
    step's gradient lacks would be lost for ever. QᵀQ is I then; scaling P absorbs ``1/(1 + λ)``.

    Tensors of one dimension, and those that hardly become smaller, go dense.

    Args:
        rank: as ``PowerSGD``'s.
        min_ratio: as ``PowerSGD``'s.
        dense_steps: as ``PowerSGD``'s.
        regulariser: λ, at least 1e-12, relative to the squared length of the longest column of P.
            Higher means a smaller C: what is ``√λ`` of that long is sent at half its size. Lower
            means more of what rounding leaves where P has fewer directions than columns: its share
            of C is about ``1e-14/λ``.

    Communication pattern:
        Two all-reduces one after the other, M·Q, then Mᵀ·P, as ``PowerSGD``'s; so are the bits and
        the state.

    Example:
        >>> from lightning_gc import CompressedDDPStrategy, GradZip
        >>> strategy = CompressedDDPStrategy(GradZip(rank=2))
        >>> GradZip(2).compresses((512, 512)), GradZip(2).compresses((512,))
        (True, False)

    Reference:
        Cho, Muthusamy, Nemanich and Puri, "GradZip: Gradient Compression using Alternating Matrix
        Factorization for Large-scale Deep Learning", NeurIPS 2019 workshop.
    """

    regulariser: float = 1e-8
    # Below, float32's rounding of both factors would be seen in their product.
    limits = {"regulariser": "[1e-12, inf) what prevents a division by zero; 1e-8"}

    def basis(self, p: Tensor) -> Tensor:
        """Scale the longest column to length 1. In float64 squares of 1e30 are numbers."""
        longest = torch.linalg.vector_norm(p.double(), dim=1).amax(1).view(-1, 1, 1)
        scaled: Tensor = p / longest.where(longest != 0, 1.0).to(p.dtype)
        return scaled

    def fit(self, q: Tensor, p: Tensor) -> Tensor:
        """Solve for Q, without the error check of other solvers, for which the host waits."""
        columns = p.double()
        gram = columns.mT @ columns  # (g, r, r)
        gram.diagonal(dim1=1, dim2=2).add_(self.regulariser)
        # One by one: for several at once CUDA's library has the host wait.
        lower = torch.linalg.cholesky_ex(gram).L
        inverse = torch.stack([torch.cholesky_inverse(each) for each in lower])
        return (q.double() @ inverse).to(q.dtype)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        return (*super().examples(), cls(2, regulariser=0.1))
