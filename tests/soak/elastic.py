"""Soak of elastic runs: workers die, freeze, leave and join at random; each run is replayed.

    python -m tests.soak.elastic --rounds 300 --seed 0
    python -m tests.soak.elastic --rounds 60 --islands 2
    python -m tests.soak.elastic --rounds 60 --folder

A run passes if all workers that were neither killed nor told to leave end in time with the same
weights, no process is left, and simulated workers that take part as the roll says end with the same
bits. With islands of several processes a fault hits one of them, and all of a killed one's end.
In a folder the worker that decides is killed where else the rendezvous is restarted: at once, or
before or after it writes a decision.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_gc import Roll
from lightning_gc.elastic.rendezvous import serve
from tests.soak.launch import children
from tests.support.elastic import Job, decider, replay, start, step_of, write_roll
from tests.support.processes import hold_port, preloaded

FAULTS = ("kill", "stop", "term", "join", "restart", "damage")
COMPRESSORS: tuple[Any, ...] = (
    ("topk", {"density": 0.1}),
    ("qsgd", {"bits": 4}),
    ("ef_sign_sgd", {}),
)


@dataclass
class Seen:
    """What a run has shown.

    Attributes:
        rounds: committed.
        hits: faults, by kind.
        problems: sentences; empty if the run has passed.
        deaths: seconds from a kill to the next round without the victim.
        joins: seconds that a round with a joiner took longer than the median, as a share of it.
        ends: seconds from a kill until the other processes of the island have ended.
        repeated: rounds that were repeated.
        late: workers that were away, or not there yet, when the run ended.
    """

    rounds: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    deaths: list[float] = field(default_factory=list)
    joins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    repeated: int = 0
    late: int = 0


def _serve(port: int, roll: Path) -> None:
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
        with contextlib.suppress(RuntimeError):  # a worker serves already
            serve(port, "soak", roll)


class Run:
    """The workers of one elastic run, and those who hit them.

    Args:
        seed: of the faults and the job.
        rounds: of the run.
        workers: at first.
        island: processes of each worker.
        within: URL of the folder where workers meet; None: at a rendezvous. ``{}``: this run's.
        timeout: of ``Elastic``.
    """

    def __init__(
        self,
        seed: int,
        rounds: int,
        workers: int,
        island: int = 1,
        within: str | None = None,
        timeout: float = 5.0,
    ) -> None:
        self.draw, self.seen = random.Random(seed), Seen()
        self.least = min(3, workers)  # members when a fault hits one
        self.folder = Path(tempfile.mkdtemp(prefix="elastic"))
        self._held = hold_port()
        self.roll = self.folder / "roll.jsonl"
        self.meeting = None if within is None else within.format(self.folder / "meeting")
        self.job = Job(
            self._held.getsockname()[1],
            str(self.folder),
            steps=4 * rounds,
            every=4,
            compressor=self.draw.choice(COMPRESSORS),
            pause=0.03,
            batch_norm=False,
            outer=self.draw.choice((0.0, 0.6)),
            seed=seed,
            island=island,
            meeting=self.meeting,
            elastic={
                "secret": "soak",
                "roll": None if within else str(self.roll),
                "patience": 8 * timeout,
                "timeout": timeout,
                "min_workers": self.least - 1,
            },
        )
        self.processes: dict[str, Any] = {}
        self.gone: set[str] = set()  # killed, or told to leave
        self.server: Any = None if within else self._rendezvous()
        self._names = iter(f"w{index}" for index in range(1000))
        for _ in range(workers):
            self.join()
        self.times: list[tuple[int, float]] = []
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._note_times, daemon=True)
        self._watch.start()

    def _rendezvous(self) -> Any:
        process = preloaded().Process(target=_serve, args=(self.job.port, self.roll))
        process.start()
        return process

    def _note_times(self) -> None:
        while not self._over.wait(0.005):
            if self.meeting is not None:
                write_roll(self.meeting, "soak", self.roll)
            lines = self.roll.read_text().splitlines() if self.roll.exists() else []
            for line in lines[len(self.times) :]:
                with contextlib.suppress(ValueError):
                    self.times.append((json.loads(line)["round"], time.monotonic()))

    def join(self, damaged: bool = False) -> str:
        name = next(self._names)
        plain = self.job.island == 1 and len(self.processes) % 3 == 2  # a loop of plain torch
        self.processes[name] = start(self.job, name, damaged=damaged, plain=plain)
        return name

    @property
    def living(self) -> list[str]:
        here = [name for name, each in self.processes.items() if each.is_alive()]
        return [name for name in here if name not in self.gone]

    def _members(self) -> list[str]:
        """Return living workers that have made a step."""
        return [name for name in self.living if step_of(self.job, name) >= 0]

    def hit(self, fault: str) -> None:
        """Hit a member."""
        self.seen.hits[fault] = self.seen.hits.get(fault, 0) + 1
        victim = self.draw.choice(self._members())
        process = self.processes[victim]
        pid = self.draw.choice(process.pids) if self.job.island > 1 else process.pid
        if fault == "kill":
            self.gone.add(victim)
            os.kill(pid, signal.SIGKILL)
            self._see_death(victim)
            self.join()
        elif fault == "term":
            self.gone.add(victim)
            for each in process.pids:  # as launchers do
                os.kill(each, signal.SIGTERM)
            self.join()
        elif fault == "stop":
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self.draw.choice((0.3, 2.0, 8.0)))
            os.kill(pid, signal.SIGCONT)
        elif fault == "restart" and self.server is None:
            decides = decider(self.meeting, "soak")
            here = [name for name in self.living if decides in self.processes[name].pids]
            for name in here:
                self.gone.add(name)
                when = self.draw.choice(("now", "before", "after"))
                if when == "now":
                    os.kill(decides, signal.SIGKILL)
                else:  # it writes its next decision
                    (self.folder / f"{name}.die").write_text(when)
                self.processes[name].join(30.0)
                self.join()
        elif fault == "restart":
            assert self.server is not None
            self.server.kill()
            self.server.join()
            time.sleep(self.draw.choice((0.0, 0.5, 2.0)))
            self.server = self._rendezvous()
        elif len(self.living) < 5:
            self.join(damaged=fault == "damage")

    def _see_death(self, victim: str) -> None:
        began, seen = time.monotonic(), len(self.times)
        while len(self.times) < seen + 2 and time.monotonic() < began + 30:
            time.sleep(0.005)
        self.processes[victim].join(30.0)
        self.seen.ends.append(time.monotonic() - began)
        self.seen.deaths.append(self.times[seen][1] - began if len(self.times) > seen else 30.0)

    def play(self, faults: int, kinds: Sequence[str] = FAULTS) -> Seen:
        """Hit the workers at random steps, and wait for their end."""
        limit = time.monotonic() + 300 + 0.5 * self.job.steps
        last = int(self.job.steps * 0.7)
        moments = sorted(self.draw.randrange(8, last) for _ in range(faults))
        plan = self.draw.sample([*kinds] * faults, faults)
        try:
            for moment, fault in zip(moments, plan, strict=True):
                while max((step_of(self.job, n) for n in self.living), default=last) < moment:
                    if time.monotonic() > limit:
                        self.seen.problems.append(f"no worker has reached step {moment}")
                        return self.seen
                    time.sleep(0.01)
                while len(self._members()) < self.least and time.monotonic() < limit:
                    time.sleep(0.02)
                    if max((step_of(self.job, n) for n in self.living), default=last + 1) > last:
                        break
                if len(self._members()) < 2:  # a fault has lasted longer than the run
                    break
                self.hit(fault)
            for name, process in self.processes.items():
                process.join(max(0.1, limit - time.monotonic()))
                if process.is_alive():
                    self.seen.problems.append(f"{name} hangs")
            self._check()
        finally:
            self._over.set()
            for process in (*self.processes.values(), *filter(None, [self.server])):
                process.kill()
                process.join()
            self._held.close()
        return self.seen

    def _check(self) -> None:
        ended: dict[str, Any] = {}
        ranks = [
            (f"{name}.{rank}" if rank else name, name, process)
            for name, worker in self.processes.items()
            for rank, process in enumerate(worker.processes)
        ]
        for rank, name, process in ranks:
            file = self.folder / f"{rank}.json"
            if file.exists():
                ended[rank] = json.loads(file.read_text())
            elif name not in self.gone:
                lines = (self.folder / f"{rank}.out").read_text().splitlines()
                why = next((line for line in reversed(lines) if "Error" in line), "no error")
                if "ended without it" in why or "has waited" in why:
                    self.seen.late += 1
                    continue
                self.seen.problems.append(f"{rank} failed, {process.exitcode}: {why[:300]}")
        if len({each["weights"] for each in ended.values()}) != 1:
            self.seen.problems.append(f"weights differ: {ended and list(ended)}")
        roll = Roll.read(self.roll)
        self.seen.rounds = len(roll)
        self.seen.repeated = sum(each.attempt > 0 for each in roll)
        took = {n: t - s for (_, s), (n, t) in zip(self.times, self.times[1:], strict=False)}
        usual = statistics.median(took.values())
        for each in roll:
            joined = any(entrance.round for entrance in each.entered.values())
            if joined and each.round in took and not (each.attempt or each.lost or each.left):
                self.seen.joins.append(took[each.round] / usual - 1)
        made = replay(self.job, roll)
        if made["warned"] or {made["weights"]} != {each["weights"] for each in ended.values()}:
            self.seen.problems.append(f"the replay differs: {made['warned']}")


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=300, help="in all runs (default: 300)")
    parser.add_argument("--of-a-run", type=int, default=60, help="rounds (default: 60)")
    parser.add_argument("--faults", type=int, default=6, help="of a run (default: 6)")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=FAULTS, help="kinds of faults")
    parser.add_argument("--workers", type=int, help="at first (default: 3, or 2 islands)")
    parser.add_argument("--islands", type=int, default=1, help="processes of a worker (default: 1)")
    help_ = "more for a slow store (default: 5)"
    parser.add_argument("--timeout", type=float, default=5.0, help=help_)
    parser.add_argument("--seed", type=int, default=0)
    help_ = "URL where workers meet, {} for the run's folder (default: they meet at a rendezvous)"
    parser.add_argument("--folder", nargs="?", const="{}", help=help_)
    options = parser.parse_args(words)
    total, bad = Seen(), 0
    seed = options.seed
    while total.rounds < options.rounds:
        workers = options.workers or (3 if options.islands == 1 else 2)
        parts = (workers, options.islands, options.folder, options.timeout)
        run = Run(seed, options.of_a_run, *parts)
        seen = run.play(options.faults, options.only)
        total.rounds += max(seen.rounds, 1)
        total.repeated += seen.repeated
        total.deaths += seen.deaths
        total.joins += seen.joins
        total.ends += seen.ends
        for fault, number in seen.hits.items():
            total.hits[fault] = total.hits.get(fault, 0) + number
        bad += bool(seen.problems)
        sys.stdout.write(f"seed {seed}: {seen} in {run.folder}\n")
        sys.stdout.flush()
        seed += 1
    left = [pid for pid in children() if "multiprocessing." not in _command(pid)]
    sys.stdout.write(
        f"{total.rounds} rounds, {seed - options.seed} runs, {bad} with problems, hits "
        f"{total.hits}, {total.repeated} rounds repeated, {len(left)} processes left\n"
        f"seconds from a kill to the next round: {_spread(total.deaths)}\n"
        f"seconds from a kill until its island has ended, at most: {_spread(total.ends)}\n"
        f"share that a round with a joiner took longer: {_spread(total.joins)}\n"
    )
    return bad


def _spread(values: list[float]) -> str:
    if not values:
        return "none"
    return f"median {statistics.median(values):.3f}, most {max(values):.3f}, of {len(values)}"


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return "multiprocessing."  # gone


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
