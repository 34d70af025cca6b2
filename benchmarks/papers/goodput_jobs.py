"""Elastic jobs of this machine that train a small transformer, die and join; and their replay."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import tasks  # noqa: F401 - sets the path
import torch
from goodput_rounds import Fault, worker_steps
from shared import hush
from text import Corpus, load
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformer import LENGTH, validation
from unequal_workers import Words

from lightning_gc import (
    QSGD,
    BinMeans,
    ChunkedTopK,
    Elastic,
    ErrorFeedback,
    LocalStepsStrategy,
    Quantised,
    Roll,
    SimulatedLocalStepsStrategy,
)
from lightning_gc.elastic.objects import Objects
from lightning_gc.elastic.rendezvous import Rendezvous
from lightning_gc.elastic.roll import Verdict, entry_of, line_of
from lightning_gc.elastic.snapshot import digest_in_words

ARMS: dict[str, dict[str, Any]] = {
    "QSGD(4)": {"compressor": QSGD(4)},
    "SparseLoCo": {
        "compressor": Quantised(ChunkedTopK(), BinMeans(2)),
        "memory": ErrorFeedback(decay=0.95),
    },
}
TERMS = {"grace": 1.0, "timeout": 5.0, "patience": 60.0, "secret": "goodput"}
BOOT = 120.0  # seconds that a job may take until its first round
YOUNG = 10.0  # seconds in which a job is not killed, as it may not be a member yet


@dataclass(frozen=True)
class Task:
    """What all jobs of a run train.

    Attributes:
        arm: of ``ARMS``.
        seed: of weights and batches.
        steps: optimizer steps.
        every: H.
        batch: rows of 32 words.
        seconds: of a step, padded.
        ballast: elements of a tensor that is not trained, but is part of a snapshot.
        small: a perceptron is trained, for rounds whose time is all that counts.
        folder: jobs meet in a folder of this machine, and not at a rendezvous.
    """

    arm: str
    seed: int
    steps: int
    every: int = 8
    batch: int = 4
    seconds: float = 0.0
    ballast: int = 0
    small: bool = False
    folder: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """What strategies are given. All tensors are gathered, as a ring has other bits."""
        return {**ARMS[self.arm], "every": self.every, "seed": self.seed, "min_numel": 0}


class Reader(Words):
    """Draws its batches by the worker's number and the step, so that a roll can be replayed."""

    def __init__(self, task: Task, corpus: Corpus) -> None:
        torch.manual_seed(task.seed)
        super().__init__(len(corpus.words), task.steps, task.seconds)
        self.task, self.text = task, corpus.train
        self.used: dict[int, float] = {}  # step -> CPU seconds of the process before it
        if task.small:
            self.net = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 8))  # type: ignore[assignment]
        if task.ballast:
            self.ballast = nn.Parameter(torch.ones(task.ballast))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """Return the mean cross-entropy of a word."""
        self.step_began = time.monotonic()
        self.used[self.global_step] = time.process_time()
        strategy: Any = self.trainer.strategy
        place = (self.task.seed * 1000 + strategy.number) * 100_000 + self.global_step
        draw = torch.Generator().manual_seed(place)
        if self.task.small:
            x = torch.randn(16, 32, generator=draw)
            return nn.functional.mse_loss(self.net(x), x[:, :8].sin())
        starts = torch.randint(len(self.text) - LENGTH, (self.task.batch,), generator=draw)
        rows = torch.stack([self.text[s : s + LENGTH + 1] for s in starts.tolist()])
        loss: Tensor = self.net(rows[:, :-1], rows[:, 1:])
        return loss


def fit(strategy: Any, task: Task, workers: int) -> Reader:
    """Train; return the module with the common weights."""
    hush()
    words = Reader(task, load(None, rare=5))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=task.steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    empty: Any = torch.zeros(1000 * workers)
    trainer.fit(words, DataLoader(empty, batch_size=1))
    return words


def replayed(task: Task, roll: Roll) -> Reader:
    """Return the module of simulated workers that follow a roll."""
    task = dataclasses.replace(task, seconds=0.0)
    strategy = SimulatedLocalStepsStrategy(**task.settings, roll=roll)
    return fit(strategy, task, len(roll.numbers))


def loss_of(words: Reader) -> float:
    """Return the loss of the validation text."""
    return validation(words.net, load(None, rare=5).valid)


def digest_of(words: Reader) -> str:
    """Return a digest of all weights."""
    return digest_in_words([p.detach() for p in words.parameters()])


def work(task: Task, where: str, folder: str, name: str) -> None:
    """Be a job: when told to, train as an elastic worker, and leave the weights' digest."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as the replay's process has it
    log = os.open(Path(folder) / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    while not (Path(folder) / f"{name}.go").exists():
        time.sleep(0.01)
    elastic = Elastic(where, **TERMS)  # type: ignore[arg-type]
    strategy = LocalStepsStrategy(**task.settings, process_group_backend="gloo", elastic=elastic)
    words = fit(strategy, task, 1)
    left = {"digest": digest_of(words), "cpu": list(words.used.items())}
    (Path(folder) / f"{name}.json").write_text(json.dumps(left))


class Jobs:
    """A rendezvous of this process or a folder, jobs, and the time of each committed round.

    Args:
        task: of all jobs.
        workers: at first.
        spares: that may join; their processes are started at once, as imports take long.

    Attributes:
        roll: the committed rounds.
        times: of their commits, by ``time.monotonic``.
        deaths: times of kills.
    """

    def __init__(self, task: Task, workers: int, spares: int) -> None:
        self.task, self.folder = task, Path(tempfile.mkdtemp(prefix="goodput"))
        self._file = self.folder / "roll.jsonl"
        secret = str(TERMS["secret"])
        self._server = None if task.folder else Rendezvous(0, secret, self._file)
        where = str(self.folder / "meeting")
        if self._server is not None:
            where = f"127.0.0.1:{self._server.port}"
        self._log = Objects(where, secret) if task.folder else None
        self._read = 0  # of the folder's log
        if self._log is not None:
            self._log.enter()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["goodput_jobs"])
        self._processes: list[Any] = []
        self._joined: list[float] = []
        self._killed: set[int] = set()
        self.times: list[float] = []
        self.deaths: list[float] = []
        for index in range(workers + spares):
            arguments = (self.task, where, str(self.folder), f"job{index}")
            self._processes.append(self._context.Process(target=work, args=arguments))
            self._processes[-1].start()
        for _ in range(workers):
            self.join()

    def join(self) -> None:
        """Let one more job begin."""
        (self.folder / f"job{len(self._joined)}.go").touch()
        self._joined.append(time.monotonic())

    def kill(self, number: int) -> None:
        """Kill a living job that has had time to become a member."""
        old = [i for i, joined in enumerate(self._joined) if time.monotonic() - joined > YOUNG]
        living = [i for i in old if self._processes[i].is_alive()]
        victim = living[number % len(living)]
        self._killed.add(victim)
        os.kill(self._processes[victim].pid, signal.SIGKILL)
        self.deaths.append(time.monotonic())

    @property
    def roll(self) -> Roll:
        """The committed rounds."""
        return Roll.read(self._file)

    def play(self, faults: list[Fault]) -> None:
        """Hit the jobs as planned, and wait for their ends.

        Raises:
            TimeoutError: a job has not ended in time.
            RuntimeError: a job failed.
        """
        left = list(faults)
        usual = self.task.every * self.task.seconds
        limit = time.monotonic() + BOOT + 3 * self.task.steps * self.task.seconds
        try:
            while any(each.is_alive() for each in self._processes[: len(self._joined)]):
                time.sleep(0.005)
                now = time.monotonic()
                if now > limit:
                    raise TimeoutError(f"jobs in {self.folder} have not ended")
                self._note(now)
                while left and len(self.times) >= max(left[0].round, 1):
                    if now - self.times[-1] < left[0].share * usual:
                        break
                    fault = left.pop(0)
                    if fault.what == "join":
                        self.join()
                    else:
                        self.kill(fault.round)
        finally:
            for process in self._processes:
                process.kill()
                process.join()
            if self._server is not None:
                self._server.close()
        for index, process in enumerate(self._processes[: len(self._joined)]):
            if process.exitcode and index not in self._killed:
                log = (self.folder / f"job{index}.log").read_text()
                late = "ended without it" in log or "has waited" in log
                if not late:
                    raise RuntimeError(f"job {index} in {self.folder} failed: {log[-300:]}")

    def _note(self, now: float) -> None:
        if self._log is not None:
            self._write_roll(self._log)
        with contextlib.suppress(OSError):
            lines = self._file.read_text().count("\n")
            self.times += [now] * (lines - len(self.times))

    def _write_roll(self, log: Objects) -> None:
        """Add the rounds that the folder's log has, and the file has not."""
        with self._file.open("a") as file:
            while (body := log.get(f"log/{self._read:08d}")) is not None:
                self._read += 1
                for entry in map(entry_of, json.loads(body)["said"]):
                    if isinstance(entry, Verdict) and entry.record is not None:
                        file.write(line_of(entry.record))

    @property
    def _left(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in self.folder.glob("*.json")]

    @property
    def digests(self) -> set[str]:
        """Digests of the weights of the jobs that came to the end."""
        return {each["digest"] for each in self._left}

    def cpu(self, first: int, end: int) -> list[float]:
        """Return CPU seconds of these rounds, of each job that was there from the first step on."""
        known = [dict(each["cpu"]) for each in self._left]
        steps = first * self.task.every, end * self.task.every
        return [c[steps[1]] - c[steps[0]] for c in known if {0, *steps} <= c.keys()]

    def close(self) -> None:
        """Delete what the jobs have left."""
        shutil.rmtree(self.folder)


def measured(jobs: Jobs) -> dict[str, Any]:
    """Return what a run's rounds say, from its first commit on.

    Returns:
        ``rate``: committed worker-steps per second. ``round``: median seconds of a round.
        ``deaths``: seconds from a kill to the next commit. ``joins``: by how many seconds the
        rounds before and with a worker's first one were longer than the median, for each join.
        ``quiet``: the same of two rounds in a row in which nothing happened. ``cpu_joins`` and
        ``cpu_quiet``: the same in CPU seconds, of the member that needed most.
    """
    every, records = jobs.task.every, list(jobs.roll)
    times = jobs.times[: len(records)]
    took = [after - before for before, after in itertools.pairwise(times)]
    usual = statistics.median(took)
    joins, quiet, cpu_joins, cpu_quiet = [], [], [], []
    each_round = [jobs.cpu(r.round, r.round + 1) for r in records]
    most = max(map(len, each_round))  # fewer: a job was late, and has dropped steps
    whole = [each for each in each_round if len(each) == most]
    busy = [statistics.median(job) for job in zip(*whole, strict=True)]
    for index in range(2, len(records)):
        before, record = records[index - 1 : index + 1]
        if not any(each.attempt or each.lost or each.left for each in (before, record)):
            late = sum(took[index - 2 : index]) - 2 * usual
            cpu = jobs.cpu(record.round - 1, record.round + 1)
            extra = [c - 2 * b for c, b in zip(cpu, busy, strict=False)]
            more = [max(extra)] if extra and len(cpu) == len(busy) else []
            if record.entered:
                joins.append(late)
                cpu_joins += more
            elif not before.entered and not any(e.entered for e in records[index + 1 : index + 2]):
                quiet.append(late)
                cpu_quiet += more
    return {
        "rate": worker_steps(records[1:], every) / (times[-1] - times[0]),
        "round": usual,
        "steps": worker_steps(records, every),
        "rounds": len(records),
        "deaths": [
            next((t for t in times if t > died), math.nan) - died
            for died in jobs.deaths
            if died < times[-1]
        ],
        "joins": joins,
        "quiet": quiet,
        "cpu_joins": cpu_joins,
        "cpu_quiet": cpu_quiet,
        "repeated": sum(each.attempt > 0 for each in records),
    }


def run(task: Task, workers: int, faults: list[Fault]) -> dict[str, Any]:
    """Train with real jobs; return what was measured.

    Raises:
        AssertionError: the replay's weights are not those of the jobs, bit for bit.
    """
    jobs = Jobs(task, workers, sum(each.what == "join" for each in faults))
    jobs.play(faults)
    found = measured(jobs)
    digest = digest_of(replayed(task, jobs.roll))
    assert jobs.digests == {digest}, (jobs.folder, jobs.digests, digest)
    jobs.close()
    return found
