"""Run compressor, memory and scheme for W workers in one thread, without Lightning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.per_parameter import layerwise
from lightning_gc.engine import Engine
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

    def step(self, gradients: Sequence[Mapping[str, Tensor]]) -> Round:
        """Synchronise one gradient per worker, ``{name: tensor}``; the tensors do not change."""
        if len(gradients) != len(self.engines):
            raise ValueError(
                f"{len(self.engines)} workers, but {len(gradients)} gradients: give one per worker."
            )
        shapes = {name: tuple(grad.shape) for name, grad in gradients[0].items()}
        for worker, named in enumerate(gradients):
            if {name: tuple(grad.shape) for name, grad in named.items()} != shapes:
                raise ValueError(
                    f"Worker {worker}'s gradients differ from worker 0's in name or shape; give "
                    f"all workers equal ones."
                )
        flats = [torch.cat([grad.reshape(-1) for grad in named.values()]) for named in gradients]
        before = list(self.transport.sent_bytes)
        flows = []
        for engine, flat in zip(self.engines, flats, strict=True):
            engine.statistics.norms_wanted = True
            flows.append(engine.flow(flat, shapes, weights=self.weights))
            engine.advance()
        with torch.no_grad():
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
