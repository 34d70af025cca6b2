"""Elastic and ElasticExchange: local steps whose workers may die, leave and join between rounds."""

from __future__ import annotations

import ipaddress
import itertools
import logging
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper, _world

from lightning_gc.core import TEXT, WHOLE, Each, Flow, Record
from lightning_gc.core.digest import ReplicaError
from lightning_gc.core.notices import say, waiting
from lightning_gc.core.saved_state import ERRORS, Tree, each_tensor
from lightning_gc.core.settings import Settings
from lightning_gc.engine.error_buffers import to_host
from lightning_gc.exchange.kernel_compilation import compile_kernels
from lightning_gc.exchange.synchronizer import leave
from lightning_gc.exchange.validation import MODEL, digest_of, refuse_unknown_device
from lightning_gc.exchange.workers import Shapes, Workers
from lightning_gc.local_steps.channel import Seal
from lightning_gc.local_steps.local_rounds import LocalRounds
from lightning_gc.local_steps.rendezvous import Line, check_secret, host_and_port, is_host
from lightning_gc.local_steps.roll import (
    Called,
    Do,
    Entry,
    Member,
    Report,
    Roll,
    Verdict,
    entry_of,
    in_words,
    workers_in_words,
)
from lightning_gc.local_steps.snapshot import (
    Door,
    Wire,
    check_snapshot,
    digest_in_words,
    from_bytes,
    load_snapshot,
    snapshot_of,
    to_bytes,
    visiting,
)
from lightning_gc.transports.accounting import Recording
from lightning_gc.transports.base import Transport
from lightning_gc.transports.distributed import Distributed
from lightning_gc.transports.interfaces import address_towards, named_interface
from lightning_gc.transports.island import ALONE, Island, IslandError, Seat
from lightning_gc.transports.peer_error import PeerError, is_from_backend

_log = logging.getLogger(__name__)
_TRIES = 3
"""How often a snapshot is fetched from the same donor."""
_WAITS = 8.0
"""Seconds after which a worker says for whom it waits: a rendezvous tells it every 5 s."""
_LONGEST = 1e9
"""Most seconds that a worker can be told to wait; beyond, the system's clocks overflow."""


@dataclass(frozen=True)
class Elastic(Settings):
    """Let workers of local steps die, leave and join while the others go on.

    Every worker is a job of its own: ``Trainer(devices=1, num_nodes=1, max_steps=...)`` with the
    same ``LocalStepsStrategy``. One more job joins a run; a job that gets Ctrl-C or SIGTERM leaves
    it. A round is committed when all its members have the same result; if one of them dies, the
    others repeat the round with the same differences and errors. With
    ``LocalStepsStrategy(island=N)`` each job has N processes, which end together.

    Args:
        rendezvous: ``"host:port"``, where ``lightning-gc rendezvous`` listens. If nobody listens
            there and it is an address of this machine, this job does.
        min_workers: fewest members of a round. With fewer, workers wait.
        grace: seconds that a round waits, after its first member has asked for it, for those that
            have not. A worker that comes later loses its steps of the round. A worker that has
            been silent for so long is not waited for. A run begins as late after the first
            ``min_workers`` have come.
        timeout: seconds of a message between workers. A worker that says nothing for so long is
            dead.
        patience: seconds that a worker waits for a rendezvous, or for ``min_workers``.
        secret: a long random text that all jobs and the rendezvous share, such as one of ``openssl
            rand -base64 32``. Without it everybody who reaches the rendezvous may take part, and
            change the training.
        number: this worker's number; None: the rendezvous gives one.
        address: host that the other workers reach this machine by; None: its address on the way
            to the rendezvous.
        ports: first and last port on which it serves snapshots to workers that join; None: any.
        roll: file to which the roll is written, if this job serves the rendezvous. A run of the
            file continues there. Another run gets the file, and the former rounds a free name.

    Raises:
        ValueError: no ``"host:port"``, an empty secret, or a number out of range.

    Example:
        >>> from lightning_gc import Elastic
        >>> Elastic("10.0.0.1:29400", min_workers=3, secret="a long text")
        Elastic(rendezvous='10.0.0.1:29400', min_workers=3, grace=5.0, timeout=30.0)
    """

    rendezvous: str
    min_workers: int = 2
    grace: float = 5.0
    timeout: float = 30.0
    patience: float = field(default=600.0, repr=False)
    secret: str | None = field(default=None, repr=False)
    number: int | None = field(default=None, repr=False)
    address: str | None = field(default=None, repr=False)
    ports: tuple[int, int] | None = field(default=None, repr=False)
    roll: str | Path | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        host_and_port(self.rendezvous, "Elastic", "rendezvous")
        check_secret(self.secret, "Elastic")
        if not _is_whole(self.min_workers) or self.min_workers < 1:
            raise ValueError(
                f"Elastic(min_workers={self.min_workers!r}): use 1 or more, such as 2, as an int."
            )
        for name, least in (("grace", 0.0), ("timeout", 1.0), ("patience", 1.0)):
            seconds = getattr(self, name)
            number = isinstance(seconds, float | int) and not isinstance(seconds, bool)
            if not number or not least <= seconds <= _LONGEST:
                raise ValueError(
                    f"Elastic({name}={seconds!r}): give {least:g} seconds or more, such as 30, and "
                    f"at most {_LONGEST:g}."
                )
        if self.number is not None and (not _is_whole(self.number) or self.number < 0):
            raise ValueError(
                f"Elastic(number={self.number!r}): numbers begin with 0; give an int, or leave it "
                f"out."
            )
        if self.address is not None and not (
            isinstance(self.address, str) and is_host(self.address)
        ):
            raise ValueError(
                f"Elastic(address={self.address!r}): give this machine's host without a port, such "
                f"as '10.0.0.2'."
            )
        if self.ports is not None and not _are_ports(self.ports):
            raise ValueError(
                f"Elastic(ports={self.ports!r}): give the first and the last port, such as "
                f"(29500, 29520)."
            )
        if self.roll is not None and (not isinstance(self.roll, str | Path) or not str(self.roll)):
            raise ValueError(
                f"Elastic(roll={self.roll!r}): give the name of a file, such as 'roll.jsonl'."
            )


def check_elastic(elastic: Any, owner: str) -> None:
    """Raise ValueError if an argument ``elastic`` is neither None nor an ``Elastic``."""
    if elastic is not None and not isinstance(elastic, Elastic):
        where = elastic if isinstance(elastic, str) else "10.0.0.1:29400"
        raise ValueError(
            f"{owner}(elastic={elastic!r}): give elastic=Elastic({where!r}), or leave it out."
        )


def _is_loopback(host: str) -> bool:
    with suppress(OSError, ValueError):
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    return False


def _is_whole(value: Any) -> bool:
    return type(value) is int  # reports are JSON, and 2.0 or True is not a count there


def _are_ports(ports: Any) -> bool:
    pair = isinstance(ports, tuple | list) and len(ports) == 2 and all(map(_is_whole, ports))
    return pair and 0 < ports[0] <= ports[1] < 1 << 16


class Loop(Protocol):
    """The parts of its training loop that an elastic worker needs."""

    @property
    def steps(self) -> int:
        """Optimizer steps before the one that it is in, as all workers count them."""

    def go_on_from(self, steps: int) -> None:
        """Count from here, with optimizers that begin again and learning rates of this step."""

    def check(self) -> None:
        """Raise what ends the loop, such as a signal."""


_PLACE = Record({"round": WHOLE, "position": WHOLE, "steps": WHOLE})
_ERROR = Record({"ask": TEXT, "run": TEXT, "number": WHOLE, "memory": Each(Each(ERRORS))})


@dataclass
class _Sent:
    """A tensor that is exchanged in a round, and sent again in each attempt."""

    make: Callable[[], tuple[Flow, Tensor]]
    result: Tensor
    future: torch.futures.Future[Tensor]
    names: tuple[str, ...] = ()
    arrived: Tensor | None = None


class ElasticExchange:
    """Carries out the exchanges of one elastic worker: an ``Exchanger`` of local steps.

    In an island, rank 0 has the line to the rendezvous, the door and the round's group. All ranks
    read the same entries of the log, and do the same.

    Args:
        elastic: as the user has set it.
        workers: this process's worker; its engine is made here.
        device: of the weights.
        agreed: name -> text of settings that must be equal on all workers.
        wanted: number that the worker had in the checkpoint from which it resumes.
        size: N, processes of this worker, which are all of this job's.
        timeout: of communication inside the job; None: torch's.

    Communication pattern:
        Reports to the rendezvous every quarter of a second, and when there is something to say.
        Per round a process group of its members, which meet at the rendezvous, in it the
        compressor's exchange, and three answers of the rendezvous. A snapshot goes from one member
        to a worker that joins.

    Attributes:
        size: number of members of the last round.
        island: the processes of this worker.

    Raises:
        ValueError: in a job with another number of processes, with other settings than the run's,
            or with another secret or version than the rendezvous's.
        RuntimeError: no rendezvous, or too few workers, for ``patience`` seconds.
        ReplicaError: members had different results three times in a row.
    """

    def __init__(
        self,
        elastic: Elastic,
        workers: Workers,
        device: torch.device,
        agreed: Mapping[str, str],
        wanted: int | None = None,
        size: int = 1,
        timeout: timedelta | None = None,
    ) -> None:
        refuse_unknown_device(device)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        processes = dist.get_world_size()
        if processes != size:
            raise ValueError(
                f"Elastic: this job has {processes} processes, but every elastic worker is a job "
                f"of {size}; use Trainer(devices={size}, num_nodes=1), and start one job for each "
                f"worker. To let all processes of a job train as one worker, give "
                f"island={processes}."
            )
        told = timedelta(seconds=elastic.timeout)
        self.island = ALONE if size == 1 else Island.among([range(size)], timeout, told)
        self.elastic, self._workers, self._device = elastic, workers, device
        self._recording = Recording(self.island.over(Seat()))
        workers.start([self._recording], revocable=True)
        self._seal = Seal(elastic.secret)
        self._still = threading.Lock()  # held while the common weights change
        self._changing = False  # whether the training thread holds it
        self._inherited: list[list[Any]] = []  # number and error
        self._closed = False
        self._rounds: LocalRounds | None = None
        self._loop: Loop | None = None
        self._sent: list[_Sent] = []
        self._belongs = False  # whether the error is one of this run
        self._resumed = False  # whether the weights are still those of a checkpoint
        self._kept: dict[str, dict[str, Any]] = {}  # the compressor's state before an attempt
        self._neighbours: dict[int, str] = {}
        self._differing = self._failures = self.size = 0
        self._fetched: Do | None = None  # the snapshot that is under way
        self._first = 0  # steps before this round
        self._within = False  # whether the loop is in a step, which it has not counted
        self._saved: int | None = None  # number in the state that was loaded
        held = sum(p.numel() * 4 for p in workers.names)  # and outer momentum, buffers, names
        self._most = 16 * held + (1 << 24)
        same = workers.configuration.in_words() | dict(agreed)
        same[MODEL] = digest_of(workers.model)
        same |= compile_kernels(workers.configuration, device)
        if size > 1:
            same["island"] = str(size)
        self._member = Member(Report(""))
        self._unread: Entry | None = None  # of the log
        self._line: Line | None = None  # rank 0's, as the door and Gloo's interface are
        self._door: Door | None = None
        self._interface = ExitStack()
        try:
            self._member = Member(Report.read(self.island.say(partial(self._open, same, wanted))))
            self._until(("number",), "a rendezvous")
        except BaseException:
            self.close(failed=True)
            raise

    def _open(self, settings: dict[str, str], wanted: int | None) -> str:
        """Open the line to the rendezvous and the door; return the first report."""
        elastic = self.elastic
        host, port = host_and_port(elastic.rendezvous, "Elastic", "rendezvous")
        if elastic.secret is None and not _is_loopback(host):
            _log.warning(
                "Elastic(secret=None): everyone who reaches %s may take part in this run, and "
                "change its weights. Make a secret for all: openssl rand -base64 32 > secret.txt",
                elastic.rendezvous,
            )
        roll = None if elastic.roll is None else Path(elastic.roll)
        self._line = Line(host, port, elastic.secret, roll)
        own = elastic.address or address_towards(host, port)
        self._interface.enter_context(named_interface(elastic.address or host, _log.warning))
        ports = elastic.ports and range(elastic.ports[0], elastic.ports[1] + 1)
        door = (own, ports or (), self._seal, self._most, float(elastic.timeout), self._answer)
        self._door = Door(*door)
        return Report(
            token=secrets.token_hex(8),
            wanted=elastic.number if wanted is None else wanted,
            address=self._door.address,
            settings=settings,
            min_workers=elastic.min_workers,
            grace=float(elastic.grace),
            timeout=float(elastic.timeout),
        ).in_words()

    @property
    def number(self) -> int:
        """This worker's number."""
        number = self._member.report.number
        assert number is not None
        return number

    @property
    def steps(self) -> int:
        """Optimizer steps of the run that are done, as all workers count them."""
        return self._first if self._loop is None else self._loop.steps

    def resume(self, number: int, steps: int) -> None:
        """Note the number and the steps in the state that this worker has loaded."""
        self._saved, self._first = number, steps

    @property
    def roll(self) -> Roll:
        """The rounds of this worker since it came in last."""
        return Roll(self._member.roll)

    # -------------------------------------------------------------------------- the log

    def _until(self, wanted: tuple[str, ...], whom: str = "other workers") -> Do:
        """Read the log until one of these is to be done, and take snapshots on the way.

        Args:
            wanted: as ``Do.what``; ``"fetched"``: a snapshot has been taken.
            whom: the worker waits for, if the rendezvous has not told.
        """
        limit = time.monotonic() + self.elastic.patience
        with self._saying(lambda: self._waits(whom), _WAITS):
            while True:
                self._report()
                text = self.island.say(partial(self._next, limit, whom))
                done = self._read(entry_of(text)) if text else None
                if done is not None and done.what == "fetch":
                    done = self._fetch(done)
                    self._report()
                if done is not None and done.what in wanted:
                    return done

    def _saying(
        self, what: str | Callable[[], str], first: float | None = None
    ) -> AbstractContextManager[None]:
        """Say what this worker does, if it takes long; one rank of an island says it."""
        if self._line is None:
            return nullcontext()

        def sentence() -> str:
            number = self._member.report.number
            who = "This worker" if number is None else f"Worker {number}"
            return f"{who} {what if isinstance(what, str) else what()}"

        return waiting(sentence, first)

    def _waits(self, whom: str) -> str:
        """Return for whom or what this worker waits."""
        assert self._line is not None
        report, fetched = self._member.report, self._fetched
        if fetched is not None:
            return f"takes the snapshot of worker {fetched.donor} at {fetched.address}"
        place = f" in round {report.round}" if report.phase in ("asking", "done", "failed") else ""
        if self._line.trouble:
            return f"waits{place} for {whom}: {self._line.trouble}"
        return f"waits{place} for {self._line.awaited or whom}"

    def _next(self, limit: float, whom: str) -> str:
        """Return the next entry of the log as text, empty if the log has no new one."""
        assert self._line is not None
        if self._line.strange and self._member.report.number is None:
            raise ValueError(
                f"This worker cannot take part: {self._line.trouble}. Give all workers and the "
                f"rendezvous the same address, secret and version."
            )
        if time.monotonic() > limit:
            raise RuntimeError(
                f"This worker has waited {self.elastic.patience:g} s for {whom}, with "
                f"min_workers={self.elastic.min_workers}. The rendezvous: "
                f"{self._line.trouble or 'it answers'}. Start it, or more workers, or raise "
                f"Elastic(patience=...)."
            )
        # Kept until it is read: what follows may raise, and a commit must not be lost.
        self._unread = self._unread or self._line.next(0.1)
        if self._loop is not None:
            self._loop.check()
        return "" if self._unread is None else in_words(self._unread)

    def _report(self) -> None:
        """Let the rendezvous know where this worker is."""
        if self._line is not None:
            self._line.say(self._member.report)

    def _heard(self, act: Callable[[], Any]) -> Any:
        """Return the tree that ``act`` returns on rank 0, on all ranks of the island."""
        if self.island.size == 1:
            return act()
        data = self.island.hear(lambda: torch.frombuffer(to_bytes(act()), dtype=torch.uint8))
        return from_bytes(data.numpy().tobytes())

    def _read(self, entry: Entry) -> Do | None:
        self._unread = None
        done = self._member.read(entry)
        self._report()
        if done is not None and done.what == "refused":
            raise ValueError(f"This worker cannot take part: {done.why}.")
        if isinstance(entry, Called) and done is not None:
            self._neighbours = dict(zip(entry.members, entry.addresses, strict=False))
        if isinstance(entry, Verdict) and entry.record is not None:
            for number, norm in entry.record.lost.items():
                if number != self._member.report.number:
                    error = f"its error of norm {norm:.6g} is lost" if norm else "no error is lost"
                    _log.warning(
                        "Worker %d is silent: round %d is made without it. If it has died, %s. If "
                        "it comes back, it keeps its error.",
                        *(number, entry.record.round, error),
                    )
            for number in entry.record.left:
                say("Worker %d has left, before round %d.", number, entry.record.round)
        return done

    # -------------------------------------------------------------------------- coming in

    def enter(self, rounds: LocalRounds, loop: Loop) -> None:
        """Come into the run: begin it with others, or take a member's snapshot.

        Args:
            rounds: this worker's, at the weights with which it would begin a run.
            loop: that it is in.
        """
        self._rounds, self._loop = rounds, loop
        # If another worker has the number, the checkpoint has that worker's error.
        step = self._workers.first.step
        self._belongs = self._resumed = step > 0 and self._saved in (None, self.number)
        self._first = loop.steps - rounds.position
        self._member.enters(self._workers.first.step, self._mark())
        done = self._until(("begin", "fetched"))
        if done.what == "fetched" and self._member.report.phase == "ready":
            done = self._until(("begin",))
        if self._line is not None:
            say(
                "Joined as worker %d of %d at %s, in round %d.",
                *(self.number, done.workers, self.elastic.rendezvous, self._member.report.round),
            )
        self._belongs = self._within = True
        self._resumed = False

    def _fetch(self, done: Do) -> Do | None:
        """Take the snapshot of a member; if it cannot be had, ask for another one."""
        self._fetched = done
        for attempt in range(_TRIES):
            try:
                with ExitStack() as stack:
                    self._take(self._asking(done.address, stack))
            except (OSError, ValueError) as error:
                self._failures += 1
                _log.warning(
                    "Worker %d could not take a snapshot of worker %d: %s",
                    *(self.number, done.donor, error),
                )
                if self._failures > 10 * _TRIES:
                    raise RuntimeError(
                        f"No snapshot could be had in {self._failures} tries. {error}"
                    ) from error
                time.sleep(0.1 * (attempt + 1))
            else:
                self._failures, self._fetched = 0, None
                return replace(done, what="fetched")
        self._fetched = None
        self._member.not_fetched()
        return None

    def _asking(self, address: str, stack: ExitStack) -> Callable[[Callable[[Wire], Any]], Any]:
        """Return what asks another worker on rank 0; the first question connects it."""
        wires: list[Wire] = []

        def answer(question: Callable[[Wire], Any]) -> Any:
            if not wires:
                visit = visiting(address, self._seal, self._most, float(self.elastic.timeout))
                wires.append(stack.enter_context(visit))
            return question(wires[0])

        return lambda question: self._heard(partial(answer, question))

    def _take(self, ask: Callable[[Callable[[Wire], Any]], Any]) -> None:
        """Begin where the donor is. Until all of it has come, this worker stays as it was."""
        assert self._rounds is not None
        assert self._loop is not None
        engine, rounds = self._workers.first, self._rounds
        heed, patience = self._loop.check, self.elastic.patience
        check = partial(check_snapshot, engine=engine, shapes=self._workers.shapes)
        tree, place = ask(lambda wire: list(snapshot_and_place(wire, check, patience, heed)))
        number = tree["round"]
        if self._resumed and (number, tree["mark"]) == (engine.step, self._mark()):
            # The steps within the round are kept, too.
            self._member.fetched(number, rounds.position, "kept")
            return
        self._resumed = False
        with self._still:
            load_snapshot(tree, rounds, engine, keep_error=self._belongs)
        with suppress(OSError, ValueError):  # the donor has made steps in the meantime
            later = ask(place_of)
            place = later if later["round"] == number else place
        rounds.skip(place["position"])
        self._first = place["steps"] - place["position"]
        # Within a step, as in a round that has begun without this worker, the loop counts it next.
        self._loop.go_on_from(place["steps"] - self._within)
        self._member.fetched(number, place["position"], "kept" if self._belongs else "zero")

    # ------------------------------------------------------------------------------ rounds

    def submit(self, grad: Tensor, shapes: Shapes) -> torch.futures.Future[Tensor]:
        """Add a bucket to the round."""

        def make() -> tuple[Flow, Tensor]:
            sent = grad.clone()
            return self._workers.flow(self._workers.first, sent, shapes), sent

        return self._add(_Sent(make, grad, self._promise(), tuple(shapes)))

    def run(
        self, make: Callable[[], tuple[Flow, Tensor]], result: Tensor
    ) -> torch.futures.Future[Tensor]:
        """Add any other flow to the round; it is made once for each attempt."""
        return self._add(_Sent(make, result, self._promise()))

    def _add(self, sent: _Sent) -> torch.futures.Future[Tensor]:
        self._sent.append(sent)
        return sent.future

    def _promise(self) -> torch.futures.Future[Tensor]:
        return torch.futures.Future(devices=[self._device] if self._device.index else None)

    def end_round(self, common: list[Tensor]) -> None:
        """Exchange with the members of the round, again until an attempt is committed.

        If the others have gone on without this worker, it begins again at their weights.
        """
        sent, self._sent = self._sent, []
        self._member.asks(self._mark(), self._inherit(self._heard(self._left)))
        number = self._member.report.round
        while True:
            done = self._until(("run", "commit", "repeat", "fetched"))
            if done.what == "run":
                if not self._changing:
                    self._still.acquire()
                    self._changing = True
                others = [each for each in self._member.report.members if each != self.number]
                with self._saying(f"exchanges round {number} with {workers_in_words(others)}"):
                    self._attempt(done, sent)
            elif done.what == "commit":
                self._finish(sent)
                return
            elif done.what == "repeat":
                self._undo()
                self.landed()
                self._repeated(done.why)
            else:
                _log.warning(
                    "Worker %d was too late for round %d, which the others made without it. It "
                    "continues at the weights of worker %d, in round %d.",
                    *(self.number, number, done.donor, self._member.report.round),
                )
                return

    def landed(self) -> None:
        """Serve snapshots again: the common weights have been taken over."""
        if self._changing:  # a thread of the door may hold the lock, too
            self._changing = False
            self._still.release()

    def check(self) -> None:
        """Nothing runs in the background."""

    def _attempt(self, done: Do, sent: Sequence[_Sent]) -> None:
        """Exchange in a group of the members; say how it went."""
        members, engine = self._member.report.members, self._workers.first
        rank, size = members.index(self.number), len(members)
        began = time.monotonic()
        engine.loss_scaling.settle()  # so that an attempt without a flow takes back no other one
        state = engine.compressor_state.items()
        self._kept = {name: each_tensor(kept, Tensor.clone) for name, kept in state}
        engine.worker, engine.workers = rank, size
        failed = True
        groups: list[dist.ProcessGroup] = []
        meeting = ExitStack()  # torch's group does not keep a store of Python alive
        try:
            self.island.compare([each.result for each in sent if each.names], "an island's round")
            transport = self._transport(
                partial(self._group, done.group, rank, size, meeting), rank, size, groups
            )
            transport.sent_bytes = self._recording.inner.sent_bytes
            self._recording.inner = self.island.over(transport)
            self._recording.worker, self._recording.workers = rank, size
            with torch.no_grad():
                for each in sent:
                    flow, each.arrived = each.make()
                    self._recording.run(flow, self._device)
            # The rest is in the mark of the next round.
            results = [each.arrived for each in sent if each.names and each.arrived is not None]
            text = digest_in_words(results)
            failed = False
        except RuntimeError as error:
            inside = isinstance(error, IslandError)
            if inside or not (isinstance(error, PeerError) or is_from_backend(error)):
                raise
            _log.warning(
                "Round %d, attempt %d, of workers %s failed for worker %d after %.2f s: %s",
                *(self._member.report.round, self._member.report.attempt, members, self.number),
                *(time.monotonic() - began, str(error).partition("\n")[0]),
            )
        finally:
            for group in groups:
                leave(group, failed)
            meeting.close()
            engine.worker, engine.workers, engine.peers = 0, 1, size
            if failed:
                self._undo()
        if failed:
            self._member.failed()
        else:
            self._member.ran(text, self._norm())
        self._report()

    def _transport(
        self,
        make: Callable[[], dist.ProcessGroup],
        rank: int,
        size: int,
        groups: list[dist.ProcessGroup],
    ) -> Transport:
        """Return the transport of an attempt; rank 0 adds its group to ``groups``."""

        def add() -> str:
            groups.append(make())
            return ""

        self.island.say(add)
        return Distributed(groups[0], "an elastic round") if groups else Seat(rank, size)

    def _group(self, name: str, rank: int, size: int, meeting: ExitStack) -> dist.ProcessGroup:
        """Return the process group of an attempt, which is this process's for a while."""
        assert self._line is not None
        timeout = timedelta(seconds=self.elastic.timeout)
        store = meeting.enter_context(self._line.store(name, float(self.elastic.timeout)))
        backend = "nccl" if self._device.type == "cuda" and dist.is_nccl_available() else "gloo"
        group, _ = _new_process_group_helper(
            size, rank, [], backend, store, group_name=GroupName(name), timeout=timeout
        )
        # A job's rank 0 is ``rank`` in the group.
        places = {0: rank, rank: 0}
        _world.pg_group_ranks[group] = dict(
            sorted(((other, places.get(other, other)) for other in range(size)), key=lambda p: p[1])
        )
        made: dist.ProcessGroup = group
        return made

    def _norm(self) -> float:
        errors = self._workers.first.errors().values()
        return math.sqrt(sum(float(error.double().square().sum()) for error in errors))

    def _undo(self) -> None:
        """Restore errors and the compressor's state as before the attempt."""
        engine = self._workers.first
        engine.undo(self._kept)

    def _finish(self, sent: Sequence[_Sent]) -> None:
        assert self._loop is not None
        self._differing = 0
        self._first = self._loop.steps + 1
        self.size = len(self._member.report.members)
        for each in sent:
            assert each.arrived is not None
            each.result.copy_(each.arrived)
            each.future.set_result(each.result)
        self._workers.end_round([each.names for each in sent if each.names])

    def _repeated(self, why: str) -> None:
        _log.warning("Round %d is repeated: %s.", self._member.report.round, why)
        self._differing = self._differing + 1 if "differ" in why else 0
        if self._differing >= _TRIES:
            raise ReplicaError(
                f"Members of round {self._member.report.round} have had different results "
                f"{self._differing} times in a row. Compare their machines: memory, devices, and "
                f"versions of torch."
            )

    def _mark(self) -> str:
        """Return a digest of the common weights, buffers and outer momentum."""
        assert self._rounds is not None
        weights = self._rounds.weights
        tensors = [each.anchor for each in weights.fragments]
        tensors += [each.velocity for each in weights.fragments if each.velocity is not None]
        tensors += [weights.buffers.common[name] for name in sorted(weights.buffers.common)]
        return digest_in_words(tensors)

    # ------------------------------------------------------------------------- other workers

    def _answer(self, asked: Any) -> Tree:
        """Answer another worker, in a thread of the door."""
        match asked:
            case {"ask": "snapshot"}:
                return self._snapshot()
            case {"ask": "place"}:
                with self._still:
                    assert self._rounds is not None
                    position = self._rounds.position
                    steps = self._first + position
                    return {"round": self._workers.first.step, "position": position, "steps": steps}
            case {"ask": "error"}:
                _ERROR.check(asked, "error")
                with self._still:
                    fits = asked["run"] == self._member.report.run and not self._closed
                    if fits:
                        self._inherited.append([asked["number"], asked["memory"]])
                return {"taken": fits}
        raise ValueError(f"{str(asked)[:60]} is not a question that a worker answers.")

    def _snapshot(self) -> Tree:
        """Return copies of all that a worker needs to begin where this one is."""
        if self._rounds is None:
            raise ValueError("This worker has not begun yet.")
        with self._still:
            made = snapshot_of(self._rounds, self._workers.first)
            return each_tensor(made | {"mark": self._mark()}, to_host)

    def _left(self) -> list[list[Any]]:
        """Return numbers and errors of those who have left, which this process was given."""
        with self._still:  # an error that was taken is in one of the lists
            inherited, self._inherited = self._inherited, []
        return inherited

    def _inherit(self, inherited: Sequence[Any]) -> list[int]:
        """Add the errors of those who have left to this worker's; return their numbers."""
        for _, memory in inherited:
            self._workers.first.add_errors(
                each_tensor(memory, lambda tensor: tensor.to(self._device))
            )
        return [number for number, _ in inherited]

    def _bequeath(self) -> None:
        """Give this worker's error to the lowest of the others that takes it."""
        engine = self._workers.first
        common = engine.memory.common
        memory = {
            name: {buffer: tensor for buffer, tensor in kept.items() if buffer not in common}
            for name, kept in engine.state_dict()["memory"].items()
        }
        norm, report = self._norm(), self._member.report
        if not norm:
            say("Worker %d leaves.", self.number)
            return
        said = {"ask": "error", "run": report.run, "number": self.number, "memory": memory}
        for number, address in sorted(self._neighbours.items()):
            if number == self.number:
                continue
            visit = visiting(address, self._seal, self._most, float(self.elastic.timeout))
            offer = self._saying(f"offers its error to worker {number} at {address}")
            with offer, suppress(OSError, ValueError), visit as wire:
                wire.send(said)
                if wire.receive() == {"taken": True}:
                    say(
                        "Worker %d leaves; worker %d has its error of norm %.6g.",
                        *(self.number, number, norm),
                    )
                    return
        _log.warning(
            "Worker %d leaves, and no other worker takes its error of norm %.6g.",
            *(self.number, norm),
        )

    def close(self, failed: bool = False) -> None:
        """Leave the run; again does nothing. Other ranks of the island are not waited for.

        Args:
            failed: the worker leaves before its end, so that another one gets its error.
        """
        if self._closed:
            return
        with suppress(RuntimeError, ValueError):
            self._settle()
        self.landed()
        with self._still:
            self._closed = True
        self._inherit(self._left())  # before the own error goes: the door takes no other one now
        if self._line is not None:
            if failed and self._rounds is not None and self._member.report.run:
                self._bequeath()
            self._member.leaves()
            self._line.say(self._member.report)
            self._line.close()
        if self._door is not None:
            self._door.close()
        self._interface.close()
        self.island.close()

    def _settle(self) -> None:
        """Bring a round to an end in which this worker has been interrupted."""
        if self._member.report.phase == "done" and self._line is not None:
            self._loop = None  # a signal has been noted
            limit = time.monotonic() + self.elastic.timeout
            with self._saying(f"hears how round {self._member.report.round} has ended"):
                while self._member.report.phase == "done" and time.monotonic() < limit:
                    entry = self._unread or self._line.next(0.1)
                    done = None if entry is None else self._read(entry)
                    if done is not None and done.what == "commit":
                        self._workers.end_round([])
                    elif done is not None:
                        self._undo()
        if self._workers.engines and self._workers.first.torn:
            self._undo()


def snapshot_and_place(
    wire: Wire, check: Callable[[Any], None], patience: float, heed: Callable[[], None]
) -> tuple[Any, Any]:
    """Return a snapshot, and the donor's place in the same round.

    Args:
        wire: to the donor.
        check: refuses a snapshot of another model.
        patience: seconds.
        heed: raises what ends the loop.

    Raises:
        RuntimeError: snapshots came after the ends of their rounds, for ``patience`` seconds.
    """
    limit = time.monotonic() + patience
    for tries in itertools.count(1):
        asked = time.monotonic()
        wire.send({"ask": "snapshot"})
        tree = wire.receive()
        check(tree)
        place = place_of(wire)
        if place["round"] == tree["round"]:
            return tree, place
        came = time.monotonic()
        if came > limit:
            raise RuntimeError(
                f"No snapshot has come before its round ended; tries: {tries}, the last one of "
                f"{came - asked:.3g} s. A round must take longer than that; raise every."
            )
        # After two that were late, the next one is asked for when a round begins.
        while tries > 1 and time.monotonic() < came + 2 * (came - asked):
            heed()
            time.sleep(0.01)
            if place_of(wire)["round"] != place["round"]:
                break
    raise AssertionError


def place_of(wire: Wire) -> Any:
    """Return the round, the position in it, and the steps of the worker at the other end."""
    wire.send({"ask": "place"})
    place = wire.receive()
    _PLACE.check(place, "place")
    return place


class ElasticState:
    """The worker's number in checkpoints, by which it is recognised, and its count of steps."""

    common_structure = Record({"number": WHOLE}, {"steps": WHOLE})

    def __init__(self, exchange: ElasticExchange) -> None:
        self._exchange = exchange

    def common_state(self) -> Tree:
        return {"number": self._exchange.number, "steps": self._exchange.steps}

    def load_common_state(self, state: Any) -> None:
        self._exchange.resume(state["number"], state.get("steps", 0))
