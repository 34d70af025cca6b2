"""Run rounds of local steps for W workers in one thread, written as the formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors import Compressor
from lightning_gc.engine import Engine
from lightning_gc.local_steps import OuterSGD
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.testing.lockstep import Lockstep


@dataclass(frozen=True)
class LocalRound:
    """Hold the result of one round.

    Attributes:
        weights: the new common weights of all workers, by parameter name.
        mean: the mean over workers of the exchanged distances; not finite if the round was lost.
        errors: per worker, its error after the round, by parameter name; with ``NoMemory`` the
            dropped error.
        wire_bytes: per worker, the bytes that it would have sent.
        lost: a worker's weights were not finite, so the common weights did not change.
    """

    weights: dict[str, Tensor]
    mean: dict[str, Tensor]
    errors: list[dict[str, Tensor]]
    wire_bytes: list[int]
    lost: bool


class LocalLockstep:
    """Exchange the weight changes of W workers, round by round, as ``LocalStepsStrategy`` does.

    Tests compare ``LocalStepsStrategy`` with it bit for bit. The caller trains the workers. As in
    ``Lockstep``, the compressor gets no ``SizeSwitch``.

    Args:
        workers: W.
        weights: the initial weights of all workers, by parameter name.
        compressor: as for ``LocalStepsStrategy``.
        memory: as for ``LocalStepsStrategy``.
        scheme: as for ``LocalStepsStrategy``.
        outer: as for ``LocalStepsStrategy``.
        seed: seed of private random numbers.

    Attributes:
        weights: the common weights, float32 or wider.

    Raises:
        ValueError: the combination cannot work, or shapes of weights differ.

    Example:
        >>> import torch
        >>> from lightning_gc import TopK
        >>> from lightning_gc.testing import LocalLockstep
        >>> two = LocalLockstep(2, {"w": torch.tensor([4.0, 1.0])}, TopK(density=0.5))
        >>> done = two.round([{"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([0.0, 0.5])}])
        >>> done.weights["w"], done.errors[0]["w"], done.errors[1]["w"]
        (tensor([1., 1.]), tensor([0., 1.]), tensor([0.0000, 0.5000]))
    """

    def __init__(
        self,
        workers: int,
        weights: Mapping[str, Tensor],
        compressor: Compressor,
        memory: Memory | None = None,
        scheme: Scheme | None = None,
        *,
        outer: OuterSGD = OuterSGD(),  # noqa: B008 - frozen
        seed: int = 0,
    ) -> None:
        self.weights = {name: _wide(tensor).clone() for name, tensor in weights.items()}
        self._velocity = {name: torch.zeros_like(each) for name, each in self.weights.items()}
        self._outer = outer
        self._lockstep = Lockstep(workers, compressor, memory, scheme, seed)
        for engine in self._lockstep.engines:
            engine.loss_scaling.revocable = True

    @property
    def engines(self) -> list[Engine]:
        """The workers' engines."""
        return list(self._lockstep.engines)

    def round(self, own: Sequence[Mapping[str, Tensor]]) -> LocalRound:
        """End a round in which worker i trained its weights to ``own[i]``, left as they are."""
        distances = []
        for named in own:
            started = {n: _wide(self.weights[n].to(each.dtype)) for n, each in named.items()}
            distances.append({n: started[n] - _wide(each) for n, each in named.items()})
        result = self._lockstep.step(distances)
        lost = not all(bool(each.isfinite().all()) for each in result.mean.values())
        errors = result.errors
        if lost:
            for engine in self._lockstep.engines:
                engine.loss_scaling.settle()
            errors = [
                {name: error.clone() for name, error in engine.errors().items()}
                for engine in self._lockstep.engines
            ]
        else:
            self._step(result.mean)
        weights = {name: each.clone() for name, each in self.weights.items()}
        return LocalRound(weights, result.mean, errors, result.wire_bytes, lost)

    def _step(self, mean: Mapping[str, Tensor]) -> None:
        """Make the outer step by the formula of ``torch.optim.SGD``."""
        outer = self._outer
        for name, each in mean.items():
            self._velocity[name] = outer.momentum * self._velocity[name] + each
            update = (
                each + outer.momentum * self._velocity[name]
                if outer.nesterov
                else (self._velocity[name])
            )
            self.weights[name] = self.weights[name] - outer.lr * update


def _wide(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in float32 or wider."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
