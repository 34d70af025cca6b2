"""OuterSGD: the step that all workers make with the mean of how far each has come."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

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

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(
                f"OuterSGD(lr={self.lr!r}): the outer learning rate must be above 0; use 1.0, "
                f"which averages the workers' weights."
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"OuterSGD(momentum={self.momentum!r}): it must be in [0, 1); use 0.9, or 0.0 for "
                f"none."
            )
        if self.nesterov and not self.momentum:
            raise ValueError(
                "OuterSGD(nesterov=True) needs momentum; use OuterSGD.diloco(), or nesterov=False."
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


class Fragment:
    """Keeps the weights from which all workers went on together, and the outer momentum.

    Both are float32 or wider, whatever the parameters are, so that small steps of weights in half
    precision add up.

    Args:
        params: parameter name -> parameter, which must hold the common weights now.
        outer: the step that is made with the mean.

    Attributes:
        anchor: the common weights, flat, ``(numel,)``, in the order of ``params``.
        velocity: the outer momentum, ``(numel,)``; None without.
        shapes: parameter name -> shape.
    """

    def __init__(self, params: Mapping[str, Tensor], outer: OuterSGD) -> None:
        self.params = dict(params)
        self.outer = outer
        self.shapes = {name: tuple(param.shape) for name, param in self.params.items()}
        self._sizes = [math.prod(shape) for shape in self.shapes.values()]
        dtypes = (param.dtype for param in self.params.values())
        self.dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        self.anchor = self.weights()
        self.velocity = torch.zeros_like(self.anchor) if outer.momentum else None

    def weights(self) -> Tensor:
        """Return a flat copy of this worker's weights, ``(numel,)``."""
        return torch.cat([p.detach().reshape(-1).to(self.dtype) for p in self.params.values()])

    def start(self) -> Tensor:
        """Return the weights with which training goes on: the anchor, as parameters can hold it."""
        return torch.cat(self._starts())

    def _starts(self) -> list[Tensor]:
        held = zip(self.anchor.split(self._sizes), self.params.values(), strict=True)
        return [piece.to(param.dtype).to(self.dtype) for piece, param in held]

    def distance(self) -> Tensor:
        """Return Δ, the common weights minus this worker's, ``(numel,)``: what is exchanged.

        From the weights with which it has gone on, so that where it has not moved Δ is exactly 0,
        and what the anchor has beyond the parameters' precision is kept.
        """
        apart = torch.empty_like(self.anchor)
        own = (param.detach().reshape(-1).to(self.dtype) for param in self.params.values())
        for piece, start, now in zip(apart.split(self._sizes), self._starts(), own, strict=True):
            torch.sub(start, now, out=piece)
        return apart

    def step(self, mean: Tensor) -> None:
        """Make the outer step with the mean of the distances, ``(numel,)``."""
        self.outer.step(self.anchor, self.velocity, mean)

    def put(self, flat: Tensor) -> None:
        """Set this worker's weights, ``(numel,)``."""
        for param, piece in zip(self.params.values(), flat.split(self._sizes), strict=True):
            param.data.copy_(piece.view(param.shape))

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return copies of a flat tensor's pieces, by name, in the parameters' shapes."""
        pieces = zip(self.shapes.items(), flat.split(self._sizes), strict=True)
        return {name: piece.reshape(shape).clone() for (name, shape), piece in pieces}

    def flat(self, named: Mapping[str, Tensor], otherwise: Tensor) -> Tensor:
        """Return the flat tensor of ``named``; what it lacks is as in ``otherwise``."""
        pieces = zip(self.shapes.items(), otherwise.split(self._sizes), strict=True)
        found = [
            named[name] if name in named and tuple(named[name].shape) == shape else piece
            for (name, shape), piece in pieces
        ]
        return torch.cat([each.reshape(-1).to(self.anchor) for each in found])


def in_fragments(params: Mapping[str, Tensor], number: int, outer: OuterSGD) -> list[Fragment]:
    """Share parameters out, in their order, in so many fragments of about equal size.

    Raises:
        ValueError: fewer parameters than fragments.
    """
    if number > len(params):
        raise ValueError(
            f"LocalStepsStrategy(fragments={number}): the model has {len(params)} trained "
            f"parameters; use fragments={max(len(params), 1)} or fewer."
        )
    parts: list[dict[str, Tensor]] = [{} for _ in range(number)]
    total, seen, index = sum(p.numel() for p in params.values()), 0, 0
    for left, (name, param) in zip(range(len(params), 0, -1), params.items(), strict=True):
        # On to the next one when its share begins, or when each of the rest must get the next.
        begins = seen * number >= total * (index + 1) or left <= number - 1 - index
        if parts[index] and begins and index < number - 1:
            index += 1
        parts[index][name] = param
        seen += param.numel()
    return [Fragment(part, outer) for part in parts]
