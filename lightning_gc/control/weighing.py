"""Weighing: predict the seconds of a step with each choice of a menu, from exchanges between steps.

Each choice exchanges a part of the gradient a few times, with an engine of its own and over the
real link. Nothing of the run changes but the bytes that are counted. The timeline of a step then
has these seconds for each bucket, in proportion to its elements.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gc.compressors.wrappers.menu import Menu
from lightning_gc.controllers.base import Candidate, Level, Weighed
from lightning_gc.exchange.peers import Peers
from lightning_gc.exchange.timeline import BucketWork, Module, timeline
from lightning_gc.exchange.workers import Workers
from lightning_gc.transports.accounting import seconds_between

SAMPLE = 1 << 20
"""Elements from which on a part of the gradient is large enough; it has whole tensors."""
QUICK = 0.25
"""Seconds of an uncompressed bucket up to which all of the largest one is exchanged, and twice as
often: a link may let a small message pass at once."""
UNCOMPRESSED = "uncompressed"
"""Name of the choice None."""


class Spent(NamedTuple):
    """What an exchange took.

    Attributes:
        seconds: in all.
        computing: of this process's threads. Messages are copied and summed by them too, so that
            without a spare core the backward pass waits for them as for a compressor.
    """

    seconds: float
    computing: float


def weigh(workers: Workers, peers: Peers) -> Weighed:
    """Return what steps with each choice of the menu would take, more than with the present one.

    Args:
        workers: of this process; their compressor is a menu.
        peers: the other workers, which call this too.

    Communication pattern:
        Three to five exchanges per choice, on CUDA five to nine, as the third is recorded there.
        One all-reduce of a number.

    Raises:
        ValueError: another compressor, or no way to exchange between two steps.
    """
    began, steps = time.perf_counter(), dict[Level, float]()
    menu, levels = _choices(workers, peers)
    device, exchange = peers.device, partial(_exchanged, workers, peers)
    shapes, part = _part(workers, SAMPLE)
    first = exchange(None, shapes, part, 1)
    sizes = [sum(_numel(workers.shapes[name]) for name in names) for names in workers.layout]
    share = max(sizes) / max(part.numel(), 1)
    times = 2 if device.type == "cpu" else 4
    (whole,) = peers.mean_of([[first.seconds * share]])  # equal on all workers
    if whole <= QUICK:
        (shapes, part), times = _part(workers, math.inf), 2 * times
    shares = [size / max(part.numel(), 1) for size in sizes]
    ready = [seconds_between(workers.ready[0], at) for at in workers.ready or ()]  # type: ignore[index]
    if len(ready) != len(shares):  # simulated workers exchange after all passes
        ready = [0.0] * len(shares)
    contention = _contention(device, workers.on_this_machine)
    for level, _ in levels:
        spent = exchange(level, shapes, part, times)
        works = [_work(spent, at, share) for at, share in zip(ready, shares, strict=True)]
        steps[level] = timeline(Module(0.0, max(ready), 0.0), works, contention).seconds
    requested = workers.first.levels.requested()
    now = menu.level if requested is None else requested[0]
    found = tuple(Candidate(level, name, steps[level] - steps[now]) for level, name in levels)
    return Weighed(time.perf_counter() - began, found, menu.sixteen, workers.first.workers)


def prepare(workers: Workers, peers: Peers) -> None:
    """Exchange once with each choice: that allocates, and begins to compile for the host."""
    _, levels = _choices(workers, peers)
    shapes, part = _part(workers, SAMPLE)
    for level, _ in levels:
        _exchanged(workers, peers, level, shapes, part, 1)


def _choices(workers: Workers, peers: Peers) -> tuple[Menu, list[tuple[Level, str]]]:
    """Return the menu, and level and name of each choice; uncompressed is the last one."""
    menu = workers.configuration.compressor
    if not isinstance(menu, Menu) or peers.timed is None:
        raise ValueError(
            f"Decision(weigh=True): choices of a Menu are weighed, where exchanges between two "
            f"steps are possible; {menu} is none, or FSDP2 exchanges within its own passes."
        )
    levels: list[tuple[Level, str]] = [*((i, name) for i, name in enumerate(menu.names, 1))]
    return menu, [*levels, (None, UNCOMPRESSED)]


def _part(workers: Workers, enough: float) -> tuple[dict[str, tuple[int, ...]], Tensor]:
    """Return shapes and a copy of the gradients, flat, of tensors of the largest bucket.

    ``enough``: elements from which on no further tensor is taken.
    """
    shapes, params = workers.shapes, {name: p for p, name in workers.names.items()}
    largest = max(workers.layout, key=lambda names: sum(_numel(shapes[name]) for name in names))
    taken: dict[str, tuple[int, ...]] = {}
    pieces: list[Tensor] = []
    for name in largest:
        if sum(map(_numel, taken.values())) >= enough:
            break
        taken[name] = shapes[name]
        pieces.append(_gradient(workers, params[name]))
    return taken, torch.cat(pieces)


def _gradient(workers: Workers, param: Tensor) -> Tensor:
    """Return a copy of a parameter's last gradient, or random numbers of its shape."""
    local = workers.local(param).detach()
    grad = None if param.grad is None else workers.local(param.grad)
    if grad is None or grad.shape != local.shape or not bool(grad.isfinite().all()):
        own = torch.Generator(local.device).manual_seed(0)  # the run's numbers stay as they are
        grad = torch.randn(local.shape, generator=own, device=local.device, dtype=torch.float32)
        grad = grad.to(local.dtype)
    return grad.detach().reshape(-1).clone()


def _exchanged(
    workers: Workers,
    peers: Peers,
    level: Level,
    shapes: Mapping[str, tuple[int, ...]],
    part: Tensor,
    times: int,
) -> Spent:
    """Return the seconds of the quickest of a few exchanges."""
    assert peers.timed is not None
    engines = [workers.make_engine(each.worker, each.workers) for each in workers.accounts]
    found = []
    for engine in engines:
        engine.levels.set(level)
    for _ in range(times):
        flows = [workers.flow(engine, part.clone(), shapes) for engine in engines]
        computed = time.process_time()
        phases = peers.timed(flows)
        computed = time.process_time() - computed
        found.append(Spent(sum(phases.values()), computed))
        for engine in engines:
            engine.advance()
    for engine in engines:
        engine.end_fit()
    return min(found)


def _work(spent: Spent, ready: float, share: float) -> BucketWork:
    computing = min(spent.computing, spent.seconds)
    return BucketWork(ready, (computing * share, 0.0), ((spent.seconds - computing) * share,))


def _contention(device: torch.device, here: int) -> float:
    """Return what the backward pass loses for a second of computing: all, without a spare core.

    A GPU's streams share it too, but by how much is not known here, so nothing is assumed.
    """
    if device.type != "cpu":
        return 0.0
    return 1.0 if (os.cpu_count() or 1) < 2 * here else 0.0


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
