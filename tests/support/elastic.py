"""Elastic workers of a tiny model in separate processes, and the replay of their roll."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gc import COMPRESSORS, Elastic, LocalSteps, OuterSGD, Roll
from lightning_gc.elastic import objects
from lightning_gc.elastic.channel import Channel
from lightning_gc.elastic.objects import Objects
from lightning_gc.elastic.roll import Verdict, entry_of, line_of
from lightning_gc.lightning.for_pytorch_lightning import (
    LocalStepsStrategy,
    SimulatedLocalStepsStrategy,
)
from tests.support.fitting import digest, quiet_trainer
from tests.support.processes import hold_port, preloaded


@dataclass(frozen=True)
class Job:
    """How a worker trains; equal for all workers of a run.

    Attributes:
        port: of the rendezvous.
        folder: for what workers leave.
        steps: optimizer steps.
        every: H.
        compressor: name and arguments.
        pause: seconds of a step.
        momentum: of the inner SGD.
        batch_norm: whether the model has running statistics.
        outer: momentum of the outer step.
        checkpoint: after so many steps a checkpoint is written; 0: none.
        holds: after so many steps a worker waits until its ``<name>.go`` exists; 0: never.
        island: processes of each worker.
        meeting: URL of the folder where they meet, in place of a rendezvous.
        latency, rate: seconds that each request to the folder takes longer, and bytes of a second.
        elastic: further settings of ``Elastic``.
    """

    port: int
    folder: str
    steps: int = 40
    every: int = 4
    compressor: tuple[str, dict[str, Any]] = ("topk", {"density": 0.1})
    pause: float = 0.0
    momentum: float = 0.9
    batch_norm: bool = True
    outer: float = 0.0
    seed: int = 0
    width: int = 24
    checkpoint: int = 0
    holds: int = 0
    island: int = 1
    meeting: str | None = None
    latency: float = 0.0
    rate: float = math.inf
    elastic: dict[str, Any] = field(default_factory=dict)

    def parts(self) -> dict[str, Any]:
        """Return what the strategy of processes and the simulated one have in common."""
        name, arguments = self.compressor
        outer = OuterSGD(0.7, self.outer, True) if self.outer else OuterSGD()
        return {
            "compressor": COMPRESSORS[name](**arguments),
            "every": self.every,
            "outer": outer,
            "min_numel": 0,
            "island": self.island,
        }


class Stream(pl.LightningModule):
    """Trained on batches that depend on the worker's number, its rank and the global step only."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        torch.manual_seed(job.seed)
        self.job = job
        norm = nn.BatchNorm1d(job.width) if job.batch_norm else nn.Identity()
        self.body = nn.Sequential(nn.Linear(8, job.width), norm, nn.Tanh(), nn.Linear(job.width, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        place = 100_003 * strategy.number + 7_919 * strategy.island_rank
        return self.loss(place, self.global_step)

    def loss(self, place: int, step: int) -> Tensor:
        """Return the loss of a batch; ``place`` tells workers apart."""
        draw = torch.Generator().manual_seed(place + step)
        x = torch.randn(8, 8, generator=draw)
        loss: Tensor = (self.body(x) - x[:, :4] * 2).square().mean()
        if self.job.pause:
            time.sleep(self.job.pause)
        return loss

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), lr=0.05, momentum=self.job.momentum)
        falling = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.995)
        return [sgd], [{"scheduler": falling, "interval": "step"}]


def batches(workers: int) -> Any:
    """Return empty batches: ``Stream`` draws its own."""
    return DataLoader(torch.zeros(1000 * workers), batch_size=1)  # type: ignore[arg-type]


class Steps(pl.Callback):
    """Writes the global step into a file, for those who hit the worker at some moment."""

    def __init__(self, job: Job, name: str) -> None:
        self.job, self.name = job, name

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        note_step(self.job, self.name, trainer.global_step)


def note_step(job: Job, name: str, step: int) -> None:
    """Write the number of steps that are done; wait at the one that holds this worker."""
    folder = Path(job.folder)
    (folder / f"{name}.step").write_text(str(step))
    while step == job.holds > 0 and not (folder / f"{name}.go").exists():
        time.sleep(0.005)


def left(module: Any, number: int, steps: int, engine: Any) -> dict[str, Any]:
    """Return what a worker leaves: a digest of its weights, its buffers and errors."""
    errors = engine.errors() if engine else {}
    return {
        "weights": digest(module),
        "number": number,
        "buffers": [b.tolist() for b in module.buffers()],
        "steps": steps,
        "errors": {n: e.double().flatten().tolist() for n, e in errors.items()},
    }


def left_in(trainer: Any) -> dict[str, Any]:
    """Return what the worker of a Trainer leaves."""
    strategy, module = trainer.strategy, trainer.lightning_module
    return left(module, strategy.number, trainer.global_step, strategy.engine)


def train(
    job: Job, name: str, resume: str | None = None, callbacks: Any = (), plain: bool = False
) -> dict[str, Any]:
    """Train as one worker; write what is left into ``<name>.json``, and return it.

    ``plain``: in a loop of plain torch.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder = Path(job.folder)
    logging.basicConfig(
        force=True,
        filename=folder / f"{name}.log",
        level=logging.INFO,
        format="%(asctime)s %(message)s",
    )
    terms = {"grace": 1.0, "timeout": 4.0, "patience": 60.0} | job.elastic
    if terms.get("roll"):
        terms["roll"] = str(terms["roll"]).format(name)
    where = job.meeting or f"127.0.0.1:{job.port}"
    elastic = Elastic(where, **terms)
    made = (
        by_loop(job, name, elastic, resume)
        if plain
        else by_trainer(job, name, elastic, resume, callbacks)
    )
    (folder / f"{name}.json").write_text(json.dumps(made))
    return made


def by_loop(job: Job, name: str, elastic: Elastic, resume: str | None) -> dict[str, Any]:
    """Train in a loop of plain torch; save and resume by the loop's own files."""
    folder, module = Path(job.folder), Stream(job)
    (sgd,), (falling,) = module.configure_optimizers()
    scheduler = falling["scheduler"]
    saved = {} if resume is None else torch.load(resume, weights_only=True)
    elastic = replace(elastic, number=saved.get("number"))
    parts = job.parts()
    assert parts.pop("island") == 1  # others need a Trainer
    with LocalSteps(module, sgd, **parts, elastic=elastic) as local:
        if saved:
            local.load_state_dict(saved["local"])
            scheduler.load_state_dict(saved["scheduler"])
        for step in local.until(job.steps, scheduler):
            sgd.zero_grad()
            module.loss(100_003 * local.number, step).backward()
            sgd.step()
            scheduler.step()
            note_step(job, name, step + 1)
        if job.checkpoint:
            state = {"local": local.state_dict(), "scheduler": scheduler.state_dict()}
            file = folder / f"{name}-{job.checkpoint}.ckpt"
            torch.save(state | {"number": local.number}, file)
        assert local.roll is not None
        local.roll.save(folder / f"{name}.roll")
    return left(module, local.number, job.steps, local._workers.first)


def by_trainer(
    job: Job, name: str, elastic: Elastic, resume: str | None, callbacks: Any
) -> dict[str, Any]:
    """Train by Lightning's Trainer."""
    folder = Path(job.folder)
    strategy = LocalStepsStrategy(**job.parts(), process_group_backend="gloo", elastic=elastic)
    trainer = quiet_trainer(
        strategy,
        max_steps=job.steps,
        max_epochs=-1,
        devices=job.island,
        callbacks=[Steps(job, name), *callbacks],
    )
    trainer.fit(Stream(job), batches(job.island), ckpt_path=resume)
    if job.checkpoint:
        trainer.save_checkpoint(folder / f"{name.partition('.')[0]}-{job.checkpoint}.ckpt")
    if strategy.roll is not None:
        strategy.roll.save(folder / f"{name}.roll")
    return left_in(trainer)


def replay(job: Job, roll: Roll) -> dict[str, Any]:
    """Return what is left by simulated workers that take part as the roll says."""
    warnings.simplefilter("ignore")
    strategy = SimulatedLocalStepsStrategy(**job.parts(), roll=roll)
    trainer = quiet_trainer(strategy, max_steps=job.steps, max_epochs=-1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(Stream(job), batches(len(roll.numbers) * job.island))
    made = left_in(trainer)
    made["warned"] = [str(each.message) for each in said if "replay" in str(each.message)]
    made["errors"] = {
        number: {n: e.double().flatten().tolist() for n, e in engine.errors().items()}
        for number, engine in zip(roll.numbers, strategy.engines, strict=True)
    }
    return made


def write_roll(meeting: str, secret: str, path: Path) -> None:
    """Add the rounds that the log of a folder has, and the file of the roll has not."""
    if path not in _OBSERVED:
        _OBSERVED[path] = Objects(meeting, secret), [0]
        _OBSERVED[path][0].enter()
    seen, place = _OBSERVED[path]
    with path.open("a") as file:
        while (body := seen.get(f"log/{place[0]:08d}")) is not None:
            place[0] += 1
            for entry in map(entry_of, json.loads(body)["said"]):
                if isinstance(entry, Verdict) and entry.record is not None:
                    file.write(line_of(entry.record))


_OBSERVED: dict[Path, tuple[Objects, list[int]]] = {}


def decider(meeting: str | None, secret: str) -> int:
    """Return the process that holds the lease of a folder; 0: none does."""
    there = Objects(str(meeting), secret)
    there.enter()
    body = there.get("keeper")
    return 0 if body is None else int(json.loads(body)["box"].split("-")[-2])


class Store:
    """A store of a worker that meets others in a folder: slow, damaging, or deadly.

    Args:
        inner: the folder.
        job: says how slow it is.
        name: of the worker. If ``<name>.die`` exists, it dies before or after, as the file says,
            the next object of the log is written.
        damaged: number of answers that come damaged.
    """

    def __init__(self, inner: Any, job: Job, name: str, damaged: int) -> None:
        self._inner, self._job, self._damaged = inner, job, damaged
        self._die = Path(job.folder) / f"{name}.die"

    def put(self, name: str, data: bytes) -> None:
        self._wait(len(data))
        self._inner.put(name, data)

    def create(self, name: str, data: bytes) -> None:
        when = self._die.read_text() if name.startswith("log/") and self._die.exists() else ""
        self._wait(len(data))
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        self._inner.create(name, data)
        if when:
            os.kill(os.getpid(), signal.SIGKILL)

    def get(self, name: str) -> bytes:
        data: bytes = self._inner.get(name)
        self._wait(len(data))
        if self._damaged and name.startswith("mail/") and len(data) > 1000:
            self._damaged -= 1
            data = flipped(data)
        return data

    def names(self, folder: str) -> dict[str, str]:
        self._wait(0)
        found: dict[str, str] = self._inner.names(folder)
        return found

    def remove(self, names: Sequence[str]) -> None:
        self._wait(0)
        self._inner.remove(names)

    def _wait(self, nbytes: int) -> None:
        if self._job.latency:
            time.sleep(self._job.latency + nbytes / self._job.rate)


def _main(
    job: Job,
    name: str,
    resume: str | None,
    damaged: bool,
    plain: bool,
    rank: int = 0,
    port: int = 0,
) -> None:
    if port:
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(job.island),
            NODE_RANK="0",
        )
    name = f"{name}.{rank}" if rank else name
    if damaged:
        _damage_snapshots(2)
    open_store = objects.store_at
    objects.store_at = lambda url: Store(open_store(url), job, name, 2 * damaged)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if plain:  # a Trainer has a handler
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    log = (Path(job.folder) / f"{name}.out").open("a")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    with contextlib.suppress(KeyboardInterrupt):
        train(job, name, resume, plain=plain)
    sys.stdout.flush()


def _damage_snapshots(number: int) -> None:
    """Flip a bit of so many large messages that this worker receives."""
    feed, left = Channel.feed, [number]

    def damaged(channel: Channel, data: bytes) -> None:
        if len(data) > 1000 and left[0] and "worker" in channel._name:
            left[0] -= 1
            data = flipped(data)
        feed(channel, data)

    Channel.feed = damaged  # type: ignore[method-assign,assignment]


def flipped(data: bytes) -> bytes:
    """Return data with another bit."""
    return data[:500] + bytes([data[500] ^ 4]) + data[501:]


class Worker:
    """The processes of a worker, as one.

    Args:
        processes: that run; the first is rank 0.
        port: held for them, if they are several.
    """

    def __init__(self, processes: Sequence[Any], port: Any = None) -> None:
        self.processes, self._port = processes, port

    @property
    def pids(self) -> list[int]:
        return [each.pid for each in self.processes]

    @property
    def pid(self) -> int:
        """The process of rank 0."""
        return self.pids[0]

    @property
    def exitcode(self) -> int | None:
        """The first code that is not 0, or None if one still runs."""
        codes = [each.exitcode for each in self.processes]
        return None if None in codes else next((code for code in codes if code), 0)

    def is_alive(self) -> bool:
        """Return whether one of them runs."""
        return any(each.is_alive() for each in self.processes)

    def join(self, seconds: float | None = None) -> None:
        """Wait for all of them."""
        limit = time.monotonic() + (seconds or 1e9)
        for each in self.processes:
            each.join(None if seconds is None else max(0.01, limit - time.monotonic()))

    def kill(self) -> None:
        """Kill all of them, and give their port back."""
        for each in self.processes:
            each.kill()
        if self._port is not None:
            self._port.close()


def start(
    job: Job, name: str, resume: str | None = None, damaged: bool = False, plain: bool = False
) -> Worker:
    """Start a worker's processes; a damaged one receives its first snapshots damaged."""
    port = hold_port() if job.island > 1 else None
    number = 0 if port is None else port.getsockname()[1]
    made = []
    for rank in range(job.island):
        parts = (job, name, resume, damaged, plain, rank, number)
        made.append(preloaded().Process(target=_main, args=parts))
        made[-1].start()
    return Worker(made, port)


def step_of(job: Job, name: str) -> int:
    """Return the last step that a worker has written, or -1."""
    with contextlib.suppress(OSError, ValueError):
        return int((Path(job.folder) / f"{name}.step").read_text())
    return -1
