"""Train the small transformer with W workers: gradients exchanged each step, or weights every H."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass

import tasks  # noqa: F401 - sets the path
import torch
from frame import Row
from text import Corpus, columns, load
from torch import Tensor
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


def _gradients(workers: list[Worker], arm: Arm, steps: int, seed: int) -> int:
    """Train as DDP does, on one replica; return the bytes that a worker sends."""
    compressor = layerwise(by_default(arm.compressor))
    engines = [
        Engine(compressor, arm.memory, arm.scheme, worker=index, workers=len(workers), seed=seed)
        for index in range(len(workers))
    ]
    transport = Simulated(len(workers))
    shares, worker = [each.text for each in workers], workers[0]
    params = dict(worker.model.named_parameters())
    shapes = {name: tuple(param.shape) for name, param in params.items()}
    warm = round(arm.dense * steps)
    for step in range(steps):
        if warm and step in (0, warm):
            for engine in engines:
                engine.levels.set(compressor.level if step else None)
        flats = []
        for worker.text in shares:
            worker.backward(step)
            gradients = worker.gradients()
            flats.append(torch.cat([gradients[name].view(-1) for name in shapes]))
        flows = [  # the mean is the same for all, so only worker 0 decodes it
            engine.flow(flat, shapes, wanted=engine.worker == 0)
            for engine, flat in zip(engines, flats, strict=True)
        ]
        transport.run(flows)
        for engine in engines:
            engine.advance()
        pieces = flats[0].split([param.numel() for param in params.values()])
        for param, piece in zip(params.values(), pieces, strict=True):
            param.grad = piece.view(param.shape)
        worker.step()
    return transport.sent_bytes[0]


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
