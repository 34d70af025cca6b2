"""OuterSGD: the step of the common weights after an exchange."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_gc.core.refusal import refuse
from lightning_gc.core.settings import Settings


@dataclass(frozen=True)
class OuterSGD(Settings):
    """SGD on the common weights θ, with the mean Δ̄ over workers of "θ minus own weights".

    ``v ← μ·v + Δ̄``, then ``θ ← θ − η·v``, or with ``nesterov`` ``θ ← θ − η·(Δ̄ + μ·v)``, as
    ``torch.optim.SGD`` does. The default, η = 1 and μ = 0, averages the workers' weights (local
    SGD). Momentum costs one float32 per parameter, the same on all workers.

    Args:
        lr: η, above 0, constant. Above 1 goes beyond the mean of the weights, below 1 stays behind.
        momentum: μ, in [0, 1). Higher averages over more rounds; needs hundreds of them.
        nesterov: Nesterov momentum.

    Raises:
        ValueError: a value outside these ranges, ``nesterov`` without momentum.

    Example:
        >>> import torch
        >>> from lightning_gc import OuterSGD
        >>> weights = torch.tensor([1.0, 2.0])
        >>> OuterSGD().step(weights, None, torch.tensor([0.5, -0.5]))
        >>> weights
        tensor([0.5000, 2.5000])
        >>> OuterSGD.diloco()
        OuterSGD(lr=0.7, momentum=0.9, nesterov=True)

    Reference:
        Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.
        Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    limits = {
        "lr": "(0, inf) the outer learning rate; 1.0, which averages the workers' weights",
        "momentum": "[0, 1); 0.9, or 0.0 for none",
    }

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            refuse(
                "OuterSGD(nesterov=True) needs momentum; use OuterSGD.diloco(), or nesterov=False"
            )

    @classmethod
    def diloco(cls) -> OuterSGD:
        """Return DiLoCo's settings."""
        return cls(lr=0.7, momentum=0.9, nesterov=True)

    def step(self, weights: Tensor, velocity: Tensor | None, mean: Tensor) -> None:
        """Make one step.

        Products are rounded before they are added: whether they are fused depends on a device's
        instructions, and on an element's place, and all workers must get the same bits.

        Args:
            weights: θ, changed in place.
            velocity: v, changed in place; None without momentum.
            mean: Δ̄, left as it is.
        """
        update = mean
        if velocity is not None:
            velocity.mul_(self.momentum).add_(mean)
            update = (velocity * self.momentum).add_(mean) if self.nesterov else velocity
        weights.sub_(update * self.lr)
