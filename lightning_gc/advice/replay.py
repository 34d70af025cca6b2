"""Replay a described training over the real link: computation is slept, messages are sent.

``WhatIf`` gives the step: its buckets, when each is ready, the seconds of compression, and the
kinds and sizes of requests. The workers send these requests, so their seconds are measured, not
predicted. No GPU is needed. All other seconds are slept, which leaves the cores to the link.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_gc.advice.description import HOOK, PLAIN, described
from lightning_gc.advice.prediction import Situation
from lightning_gc.advice.traces import Asked, Trace, dense
from lightning_gc.advice.what_if import WhatIf
from lightning_gc.bench import preparation
from lightning_gc.bench.baselines import NONE
from lightning_gc.bench.benchmark import Say, report, take_turns
from lightning_gc.bench.method_run import Measurement
from lightning_gc.core import Exchange, Gather, Mean, Request
from lightning_gc.exchange.timeline import timeline
from lightning_gc.methods.yaml_config import YAMLBuild
from lightning_gc.transports.distributed import Distributed

NOTE = """Computation and compression were slept. Messages were sent, of the sizes that a training
would send. Bytes are computed."""
UNLIMITED = "1000000gbit"
"""Rate of the link in the description: the real one takes its place."""
Buckets = Sequence[tuple[float, Trace]]
"""When each bucket is ready, and its exchange."""


def replay(situation: Situation, buckets: Buckets, transport: Distributed) -> Callable[[], float]:
    """Return what makes one step and returns its seconds; no buckets: without an exchange.

    All-reduces that compute nothing are DDP's: several are under way at once. Other exchanges are
    made one after the other, as in this library's background thread.

    Args:
        situation: with the module, and what compression takes from it.
        buckets: when each is ready, and its exchange.
        transport: to the other workers.

    Communication pattern:
        The requests of all buckets, as in a training.
    """
    works = [trace.work(ready, situation.links) for ready, trace in buckets]
    asked = [[request(each, transport.workers) for each in trace.asked] for _, trace in buckets]
    plain = all(trace == dense(trace.asked[0].nbytes, trace.workers) for _, trace in buckets)
    module, under_way = situation.module, list[Any]()
    overhead = situation.overhead if buckets else 0.0  # of DDP

    def step() -> float:
        began = time.perf_counter()
        backward = began + module.forward

        def send(bucket: int, turn: int, at: float) -> float:
            _sleep_until(backward + at)
            request = asked[bucket][turn]
            if plain and isinstance(request, Mean):
                under_way.append(dist.all_reduce(request.tensors[0], async_op=True))
            else:
                transport.fulfil(request)
            while under_way and bucket == len(asked) - 1:
                under_way.pop(0).wait()
            return time.perf_counter() - backward - at

        drawn = timeline(module, works, situation.contention, overhead, send)
        _sleep_until(began + drawn.seconds)
        return time.perf_counter() - began

    return step


def _sleep_until(moment: float) -> None:
    time.sleep(max(moment - time.perf_counter(), 0.0))


def request(asked: Asked, workers: int) -> Request:
    """Return a request of this kind and size, for the host; its tensors are zeros."""
    if asked.kind == "Mean":
        return Mean((torch.zeros(round(asked.nbytes / 4), dtype=torch.float32, device="cpu"),))
    payload = (torch.zeros(round(asked.nbytes), dtype=torch.uint8, device="cpu"),)
    limits = (payload[0].numel(),) if asked.lengths else None
    if asked.kind == "Gather":
        return Gather(payload, limits)
    return Exchange((payload,) * workers, limits)


def run(options: argparse.Namespace) -> None:
    """Run ``bench --replay`` on one worker.

    Raises:
        ValueError: an invalid option or environment.
        BenchError: another worker has died.
    """
    worker = preparation.WorkerRank.from_environment("bench")
    options.methods, options.link = options.compressor, UNLIMITED
    options.workers, options.latency_us = worker.world_size, None
    case = WhatIf(**vars(described(options)))
    say = preparation.print_line if worker.rank == 0 else lambda text: None
    limit = timedelta(seconds=options.timeout)
    build, device = YAMLBuild({}, ()), torch.device("cpu")
    setup = preparation.BenchSetup(build, worker, "cpu", "gloo", options.steps, limit, {})
    with preparation.process_group(setup, device, {"the description": repr(case)}):
        found = measure(case, options.rounds, options.steps, say)
    if worker.rank == 0:
        name = options.model or options.params
        report(found, options.out, Path(name), setup, options.rounds, NOTE + case.hint)


def measure(case: WhatIf, rounds: int, steps: int, say: Say) -> dict[str, dict[str, Any]]:
    """Replay each method in turns; return a row for each, as ``take_turns`` does.

    Needs a process group of Gloo, in which all workers call this.

    Args:
        case: the description, with as many workers as there are. Its link is not used.
        rounds: turns of each method.
        steps: measured steps of a turn.
        say: called with a line about each turn.
    """
    situation = case.situation()
    rows: dict[str, Buckets] = {NONE: [], PLAIN: situation.buckets(None)}
    rows[HOOK] = situation.buckets(None, share=situation.sixteen)
    rows |= {name: situation.buckets(None, situation.costs[name]) for name in case.methods}
    turns = {name: partial(_turn, situation, each, steps) for name, each in rows.items()}
    return take_turns(turns, (), rounds, torch.device("cpu"), say)


def _turn(situation: Situation, buckets: Buckets, steps: int) -> Measurement:
    transport = Distributed(purpose="a replay")
    dist.barrier()
    step = replay(situation, buckets, transport)
    step()  # TCP's window grows, and memory is written for the first time
    seconds = [step() for _ in range(steps)]
    return Measurement(seconds, sum(trace.nbytes for _, trace in buckets), None)
