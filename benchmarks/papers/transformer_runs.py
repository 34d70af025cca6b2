"""Train the small transformer with W workers: gradients exchanged each step, or weights every H."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tasks  # noqa: F401 - sets the path
import torch
from frame import Row
from text import Corpus, columns, load
from torch import Tensor, nn
from torch.optim import Optimizer
from transformer import Transformer, Worker

from lightning_gc import OuterSGD
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.per_parameter import by_default, layerwise
from lightning_gc.engine import Engine
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.testing import LocalLockstep
from lightning_gc.transports import Simulated

BATCH = 4  # rows of a worker, unless a run has others


@dataclass(frozen=True)
class Arm:
    """What is sent, and when.

    Attributes:
        compressor: with the dense switch for small parameters that strategies add.
        memory: its own by default.
        scheme: its own by default; of gradients.
        every: H, steps between exchanges of weights; 0: gradients are exchanged in every step.
        outer: the step of the common weights.
        delay: steps of training until an exchange of weights is taken over, by rebasing.
        dense: share of the steps, at the beginning, in which gradients are sent whole.
        momentum: AdamW's β₁.
        make: makes an optimizer other than AdamW, of the model and the learning rate.
        tied: the head is the embedding.
    """

    compressor: Compressor
    memory: Memory | None = None
    scheme: Scheme | None = None
    every: int = 0
    outer: OuterSGD = OuterSGD()  # noqa: RUF009 - frozen
    delay: int = 0
    dense: float = 0.0
    momentum: float = 0.9
    make: Callable[[Transformer, float], Optimizer] | None = None
    tied: bool = True


def run(arm: Arm, workers: int, *, rate: float, steps: int, seed: int, batch: int = BATCH) -> Row:
    """Return validation loss, and the bytes that one worker has sent."""
    corpus = _corpus()
    torch.manual_seed(seed)
    model = Transformer(len(corpus.words), arm.tied)
    rows = columns(corpus.train, workers * batch)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    group = [
        Worker(copy.deepcopy(model), rate, steps, share, arm.momentum, arm.make)
        for share in rows[order].split(batch)
    ]
    sent = _weights(group, arm, steps, seed) if arm.every else _gradients(group, arm, steps, seed)
    return {"loss": group[0].evaluate(corpus.valid), "bytes": sent}


@functools.cache
def _corpus() -> Corpus:
    return load(None, rare=5)


class Exchanged:
    """Averages gradients as the library does, by simulated workers with errors of their own.

    Args:
        compressor: with the dense switch for small parameters that strategies add.
        memory: its own by default.
        scheme: its own by default.
        shapes: of the parameters.
        workers: W.
        seed: of random rounding.
    """

    def __init__(
        self,
        compressor: Compressor,
        memory: Memory | None,
        scheme: Scheme | None,
        shapes: dict[str, tuple[int, ...]],
        workers: int,
        seed: int,
    ) -> None:
        method = layerwise(by_default(compressor))
        self.level, self._shapes = method.level, shapes
        self.engines = [
            Engine(method, memory, scheme, worker=index, workers=workers, seed=seed)
            for index in range(workers)
        ]
        self._transport = Simulated(workers)

    def __call__(self, step: int, own: Sequence[Tensor]) -> Tensor:
        """Return the mean of flat gradients, one a worker; they are overwritten."""
        flats = list(own)
        flows = [  # the mean is the same for all, so only worker 0 decodes it
            engine.flow(flat, self._shapes, wanted=engine.worker == 0)
            for engine, flat in zip(self.engines, flats, strict=True)
        ]
        self._transport.run(flows)
        for engine in self.engines:
            engine.advance()
        return flats[0]

    @property
    def sent_bytes(self) -> int:
        """What worker 0 has sent."""
        return self._transport.sent_bytes[0]


def give(model: nn.Module, mean: Tensor) -> None:
    """Make pieces of a flat mean the parameters' gradients."""
    params = list(model.parameters())
    for param, piece in zip(params, mean.split([p.numel() for p in params]), strict=True):
        param.grad = piece.view(param.shape).clone()


def flat(model: nn.Module) -> Tensor:
    """Return a copy of all gradients, flat."""
    return torch.cat([param.grad.flatten() for param in model.parameters()])  # type: ignore[union-attr]


def _gradients(workers: list[Worker], arm: Arm, steps: int, seed: int) -> int:
    """Train as DDP does, on one replica; return the bytes that a worker sends."""
    shares, worker = [each.text for each in workers], workers[0]
    shapes = {name: tuple(param.shape) for name, param in worker.model.named_parameters()}
    exchange = Exchanged(arm.compressor, arm.memory, arm.scheme, shapes, len(workers), seed)
    warm = round(arm.dense * steps)
    for step in range(steps):
        if warm and step in (0, warm):
            for engine in exchange.engines:
                engine.levels.set(exchange.level if step else None)
        flats = []
        for worker.text in shares:
            worker.backward(step)
            flats.append(flat(worker.model))
        give(worker.model, exchange(step, flats))
        worker.step()
    return exchange.sent_bytes


def _weights(workers: list[Worker], arm: Arm, steps: int, seed: int) -> int:
    """Train every worker alone for H steps at a time; return the bytes that one sends."""
    group = LocalLockstep(
        len(workers),
        workers[0].weights(),
        by_default(arm.compressor),
        arm.memory,
        outer=arm.outer,
        seed=seed,
    )
    sent = 0
    under_way: list[dict[str, Tensor]] = []  # what each worker is to add to its weights
    for step in range(1, steps + 1):
        for worker in workers:
            worker.backward(step - 1)
            worker.step()
        last = step == steps
        if under_way and (last or step % arm.every == arm.delay):
            for worker, news in zip(workers, under_way, strict=True):
                for name, weight in worker.weights().items():
                    weight.add_(news[name])
            under_way = []
        if last or step % arm.every == 0:
            own = [worker.weights() for worker in workers]
            result = group.round(own)
            sent += result.wire_bytes[0]
            if arm.delay and not last:
                under_way = [{n: result.weights[n] - mine[n] for n in mine} for mine in own]
                continue
            for name, common in result.weights.items():
                for mine in own:
                    mine[name].copy_(common)
    return sent
