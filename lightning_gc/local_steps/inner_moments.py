"""InnerMoments: average moments of the workers' optimizers between rounds of local steps."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gc.core.refusal import refuse
from lightning_gc.core.settings import Settings
from lightning_gc.exchange.workers import local_part


@dataclass(frozen=True)
class InnerMoments(Settings):
    """Average moments of the workers' own optimizers every so many rounds (DES-LOC).

    Round r ends with the mean of the weights, as ever. Where K divides r, it also ends with the
    mean over workers of a moment: ``u_i ← mean_j u_j``. Second moments change slowly, so they need
    fewer averages than first ones, and both need fewer than the weights.

    Moments are sent uncompressed: an average costs as many bytes as a round of ``Identity()`` for
    each moment. A parameter that a worker's optimizer has no state of counts as zero there.

    Args:
        periods: name of a moment in the optimizers' state -> K, in rounds, at least 1. AdamW has
            ``exp_avg`` and ``exp_avg_sq``, SGD and Muon have ``momentum_buffer``.

    Raises:
        ValueError: no moments, or a period below 1; also, when a round ends, a moment that no
            optimizer keeps, or whose shape is not the parameter's.

    Example:
        >>> from lightning_gc import InnerMoments
        >>> moments = InnerMoments({"exp_avg": 2, "exp_avg_sq": 6})
        >>> [moments.due(ended) for ended in (1, 2, 6)]
        [(), ('exp_avg',), ('exp_avg', 'exp_avg_sq')]

    Reference:
        Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training
        Foundation Models", 2025. There a period is in steps; here it is in rounds of H steps.
    """

    periods: Mapping[str, int] = field(default_factory=lambda: {"exp_avg": 3, "exp_avg_sq": 6})

    def __post_init__(self) -> None:
        if not self.periods:
            refuse("InnerMoments(periods={}): name a moment, such as {'exp_avg': 3}")
        for name, rounds in self.periods.items():
            if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
                why = f"the period of {name} must be a number of rounds, 1 or more; use 3"
                refuse("InnerMoments", why, periods=dict(self.periods))

    def due(self, ended: int) -> tuple[str, ...]:
        """Return the moments that are averaged at the end of this round, counted from 1."""
        return tuple(name for name, every in self.periods.items() if ended % every == 0)


class Moments:
    """Moments of one worker's optimizers on their way to the mean.

    Args:
        names: of the moments.
        params: parameter name -> parameter, equal on all workers.
        optimizers: this worker's.

    Attributes:
        flat: all of them, float32 or wider; to be replaced by the mean.

    Raises:
        ValueError: as for ``InnerMoments``.
    """

    def __init__(
        self, names: Sequence[str], params: Mapping[str, Tensor], optimizers: Iterable[Optimizer]
    ) -> None:
        states = [optimizer.state for optimizer in optimizers]
        self._kept: list[Tensor | None] = []
        pieces: list[Tensor] = []
        for name in names:
            found = [_moment(name, param, states) for param in params.values()]
            known = {each for state in states for own in state.values() for each in own}
            if known and all(each is None for each in found):
                kept = f"they keep {', '.join(sorted(known))}. Name one of these"
                refuse("InnerMoments", f"no optimizer keeps {name}; {kept}")
            for (param_name, param), moment in zip(params.items(), found, strict=True):
                if moment is not None and moment.shape != param.shape:
                    refuse(
                        f"InnerMoments: {name} of {param_name} has shape {tuple(moment.shape)}, "
                        f"not the parameter's {tuple(param.shape)}, so it cannot be averaged; "
                        f"leave {name} out"
                    )
                here = None if moment is None else local_part(moment)
                self._kept.append(here)
                pieces.append(torch.zeros_like(local_part(param)) if here is None else here)
        self._sizes = [piece.numel() for piece in pieces]
        wide = functools.reduce(torch.promote_types, (p.dtype for p in pieces), torch.float32)
        self.flat = torch.cat([piece.detach().reshape(-1).to(wide) for piece in pieces])

    def take_over(self) -> None:
        """Give the optimizers the means, unless one is not finite, which all workers see."""
        if not bool(self.flat.isfinite().all()):
            return
        for moment, mean in zip(self._kept, self.flat.split(self._sizes), strict=True):
            if moment is not None:
                moment.copy_(mean.view(moment.shape))


_States: TypeAlias = Sequence[Mapping[Tensor, Mapping[str, Any]]]


def _moment(name: str, param: Tensor, states: _States) -> Tensor | None:
    """Return a parameter's moment from the optimizer that has it, or None."""
    return next((s[param].get(name) for s in states if param in s), None)
