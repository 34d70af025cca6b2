"""Run gradients or local steps of W workers in one thread, without Lightning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.per_parameter import layerwise
from lightning_gc.core.flow import undisturbed
from lightning_gc.core.refusal import refuse
from lightning_gc.engine import Engine
from lightning_gc.local_steps import OuterSGD
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.transports.simulated import Simulated


@dataclass(frozen=True)
class Round:
    """Hold the result of one synchronisation.

    Attributes:
        mean: the mean gradient that all workers received, by parameter name.
        errors: per worker, the error after this step, by parameter name; with ``NoMemory`` the
            dropped error.
        wire_bytes: per worker, the bytes that it would have sent.
    """

    mean: dict[str, Tensor]
    errors: list[dict[str, Tensor]]
    wire_bytes: list[int]


class Lockstep:
    """Compress and average gradients of W workers, step by step, exactly as real workers do.

    Each parameter is compressed separately, as by the strategy, but without a ``SizeSwitch``.

    Args:
        workers: W.
        compressor: as for ``CompressedDDPStrategy``.
        memory: as for ``CompressedDDPStrategy``; None is the compressor's default.
        scheme: as for ``CompressedDDPStrategy``; None is the compressor's default.
        seed: seed of private random numbers.

    Attributes:
        weights: ``{parameter name: value}``, for memories with weight decay; empty at first.

    Raises:
        ValueError: the combination cannot work, or gradients differ in number or shape.

    Example:
        >>> import torch
        >>> from lightning_gc import TopK
        >>> from lightning_gc.testing import Lockstep
        >>> two = Lockstep(2, TopK(density=0.5))
        >>> result = two.step([{"w": torch.tensor([4.0, 1.0])}, {"w": torch.tensor([2.0, 8.0])}])
        >>> result.mean["w"], result.errors[0]["w"], result.errors[1]["w"]
        (tensor([2., 4.]), tensor([0., 1.]), tensor([2., 0.]))
    """

    def __init__(
        self,
        workers: int,
        compressor: Compressor,
        memory: Memory | None = None,
        scheme: Scheme | None = None,
        seed: int = 0,
    ) -> None:
        self.weights: dict[str, Tensor] = {}
        self.engines = [
            Engine(layerwise(compressor), memory, scheme, worker=worker, workers=workers, seed=seed)
            for worker in range(workers)
        ]
        used = self.engines[0].scheme
        self.transport = Simulated(workers, 1 if used is None else used.neighbours(workers))

    @undisturbed()
    def step(self, gradients: Sequence[Mapping[str, Tensor]]) -> Round:
        """Synchronise one gradient per worker, ``{name: tensor}``; the tensors do not change."""
        if len(gradients) != len(self.engines):
            refuse(
                f"{len(self.engines)} workers, but {len(gradients)} gradients: give one per worker"
            )
        shapes = {name: tuple(grad.shape) for name, grad in gradients[0].items()}
        for worker, named in enumerate(gradients):
            if {name: tuple(grad.shape) for name, grad in named.items()} != shapes:
                refuse(
                    f"Worker {worker}'s gradients differ from worker 0's in name or shape; give "
                    "all workers equal ones"
                )
        flats = [torch.cat([grad.reshape(-1) for grad in named.values()]) for named in gradients]
        before = list(self.transport.sent_bytes)
        flows = []
        for engine, flat in zip(self.engines, flats, strict=True):
            engine.statistics.norms_wanted = True
            flows.append(engine.flow(flat, shapes, weights=self.weights))
            engine.advance()
        self.transport.run(flows)
        left = [engine.statistics.leftovers for engine in self.engines]
        errors = [{name: error.clone() for name, error in named.items()} for named in left]
        sent = [a - b for a, b in zip(self.transport.sent_bytes, before, strict=True)]
        return Round(self._same(flats, shapes), errors, sent)

    def _same(
        self, flats: Sequence[Tensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Tensor]:
        """Return the mean by name; check law 2 of schemes, the same bits on all workers."""
        for worker, flat in enumerate(flats):
            if not torch.equal(flat.view(torch.uint8), flats[0].view(torch.uint8)):
                raise AssertionError(f"Worker {worker}'s mean differs from worker 0's.")
        pieces = flats[0].split([torch.Size(shape).numel() for shape in shapes.values()])
        return {n: p.view(s) for (n, s), p in zip(shapes.items(), pieces, strict=True)}


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
