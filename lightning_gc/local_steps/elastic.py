"""ElasticExchange: local steps whose workers may die, leave and join between rounds."""

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
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper, _world

from lightning_gc.core import TEXT, WHOLE, Each, Flow, Record
from lightning_gc.core.copies import Single
from lightning_gc.core.digest import ReplicaError
from lightning_gc.core.flow import undisturbed
from lightning_gc.core.notices import say, waiting
from lightning_gc.core.saved_state import ERRORS, Tree, each_tensor
from lightning_gc.engine import Engine
from lightning_gc.engine.error_buffers import to_host
from lightning_gc.exchange.kernel_compilation import compile_kernels
from lightning_gc.exchange.synchronizer import leave
from lightning_gc.exchange.validation import MODEL, digest_of, refuse_unknown_device
from lightning_gc.exchange.workers import Shapes, Workers
from lightning_gc.local_steps.channel import Seal
from lightning_gc.local_steps.local_rounds import LocalRounds
from lightning_gc.local_steps.rendezvous import Line, host_and_port
from lightning_gc.local_steps.roll import (
    Called,
    Do,
    Entry,
    Member,
    Report,
    Roll,
    Terms,
    Verdict,
    entry_of,
    in_words,
    workers_in_words,
)
from lightning_gc.local_steps.round_plan import Elastic
from lightning_gc.local_steps.snapshot import (
    Ask,
    Door,
    check_snapshot,
    digest_in_words,
    from_bytes,
    load_snapshot,
    snapshot_of,
    to_bytes,
    visiting,
)
from lightning_gc.transports.accounting import Recording
from lightning_gc.transports.distributed import Distributed
from lightning_gc.transports.interfaces import address_towards, named_interface
from lightning_gc.transports.island import ALONE, Island, IslandError, Seat
from lightning_gc.transports.peer_error import PeerError, is_from_backend

_log = logging.getLogger(__name__)
_TRIES = 3
"""How often a snapshot is fetched from the same donor."""
_WAITS = 8.0
"""Seconds after which a worker says for whom it waits: a rendezvous tells it every 5 s."""


def _is_loopback(host: str) -> bool:
    with suppress(OSError, ValueError):
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    return False


class Loop(Protocol):
    """The parts of its training loop that an elastic worker needs."""

    @property
    def steps(self) -> int:
        """Optimizer steps before the one that it is in, as all workers count them."""

    def go_on_from(self, steps: int) -> None:
        """Count from here, with optimizers that begin again and learning rates of this step."""

    def check(self) -> None:
        """Raise what ends the loop, such as a signal."""


Taken = tuple[int, int, Literal["kept", "zero"]]
"""The round of a snapshot that was taken, the position in it, and whether the own error is kept."""
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


class Membership:
    """A worker among the others: it reads the log of the rendezvous, and reports.

    In an island, rank 0 has the line to the rendezvous. All ranks read the same entries of the
    log, and do the same.

    Attributes:
        member: the worker's part of the protocol.
        neighbours: number -> address of the members of the last round that it was called to.
        heed: raises what ends the loop, such as a signal.
        take: begins at the snapshot at an address.
    """

    take: Callable[[str], Taken]

    def __init__(self, elastic: Elastic, island: Island) -> None:
        self.member = Member(Report(""))
        self.neighbours: dict[int, str] = {}
        self.heed: Callable[[], None] = lambda: None
        self.elastic, self.island = elastic, island
        self._line: Line | None = None
        self._unread: Entry | None = None  # of the log
        self._fetching: Do | None = None  # the snapshot that is under way
        self._failures = 0
        self._interface = ExitStack()  # Gloo's

    def open(self, terms: Terms, serve: Callable[[str], str]) -> None:
        """Call the rendezvous, and get a number.

        Args:
            terms: all but the address.
            serve: opens the door by which others reach this host; returns its address.
        """
        elastic = self.elastic
        host, port = host_and_port(elastic.rendezvous, "Elastic", "rendezvous")

        if self.island.leads and elastic.secret is None and not _is_loopback(host):
            _log.warning(
                "Elastic(secret=None): everyone who reaches %s may take part in this run, and "
                "change its weights. Make a secret for all: openssl rand -base64 32 > secret.txt",
                elastic.rendezvous,
            )

        def first_report() -> str:
            roll = None if elastic.roll is None else Path(elastic.roll)
            self._line = Line(host, port, elastic.secret, roll)
            own = elastic.address or address_towards(host, port)
            self._interface.enter_context(named_interface(elastic.address or host, _log.warning))
            told = replace(terms, address=serve(own))
            return Report(secrets.token_hex(8), terms=told).in_words()

        self.member = Member(Report.read(self.island.say(first_report)))
        self.until("number", whom="a rendezvous")

    def until(self, *wanted: str, whom: str = "other workers") -> Do:
        """Read the log until one of these is to be done, and take snapshots on the way.

        Args:
            wanted: as ``Do.what``; ``"fetched"``: a snapshot has been taken.
            whom: the worker waits for, if the rendezvous has not told.
        """
        limit = time.monotonic() + self.elastic.patience
        with self.saying(lambda: self._waits(whom), _WAITS):
            while True:
                self.report()
                text = self.island.say(partial(self._next, limit, whom))
                done = self._read(entry_of(text)) if text else None
                if done is not None and done.what == "fetch":
                    done = self._fetch(done)
                    self.report()
                if done is not None and done.what in wanted:
                    return done

    def verdict(self) -> Do | None:
        """Return what the verdict on the worker's attempt demands, if one comes in time."""
        if self.member.report.phase != "done" or self._line is None:
            return None
        done, limit = None, time.monotonic() + self.elastic.timeout
        with self.saying(f"hears how round {self.member.report.round} has ended"):
            while done is None and time.monotonic() < limit:
                entry = self._unread or self._line.next(0.1)
                done = None if entry is None else self._read(entry)
        return done

    def report(self) -> None:
        """Let the rendezvous know where this worker is."""
        if self._line is not None:
            self._line.say(self.member.report)

    def store(self, group: str) -> AbstractContextManager[Store]:
        """Return where the members of a group find each other."""
        assert self._line is not None
        return self._line.store(group, float(self.elastic.timeout))

    def saying(
        self, what: str | Callable[[], str], first: float | None = None
    ) -> AbstractContextManager[None]:
        """Say what this worker does, if it takes long; one rank of an island says it."""
        if self._line is None:
            return nullcontext()

        def sentence() -> str:
            number = self.member.report.number
            who = "This worker" if number is None else f"Worker {number}"
            return f"{who} {what if isinstance(what, str) else what()}"

        return waiting(sentence, first)

    def close(self) -> None:
        """Say goodbye, and hang up."""
        if self._line is not None:
            self.member.leaves()
            self.report()
            self._line.close()
        self._interface.close()

    def _waits(self, whom: str) -> str:
        """Return for whom or what this worker waits."""
        assert self._line is not None
        report, fetching = self.member.report, self._fetching
        if fetching is not None:
            return f"takes the snapshot of worker {fetching.donor} at {fetching.address}"
        place = f" in round {report.round}" if report.phase in ("asking", "done", "failed") else ""
        if self._line.trouble:
            return f"waits{place} for {whom}: {self._line.trouble}"
        return f"waits{place} for {self._line.awaited or whom}"

    def _next(self, limit: float, whom: str) -> str:
        """Return the next entry of the log as text, empty if the log has no new one."""
        assert self._line is not None
        if self._line.strange and self.member.report.number is None:
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
        self.heed()
        return "" if self._unread is None else in_words(self._unread)

    def _read(self, entry: Entry) -> Do | None:
        self._unread = None
        done = self.member.read(entry)
        self.report()
        if done is not None and done.what == "refused":
            raise ValueError(f"This worker cannot take part: {done.why}.")
        if isinstance(entry, Called) and done is not None:
            self.neighbours = dict(zip(entry.members, entry.addresses, strict=False))
        if isinstance(entry, Verdict) and entry.record is not None:
            for number, norm in entry.record.lost.items():
                if number != self.member.report.number:
                    error = f"its error of norm {norm:.6g} is lost" if norm else "no error is lost"
                    _log.warning(
                        "Worker %d is silent: round %d is made without it. If it has died, %s. If "
                        "it comes back, it keeps its error.",
                        *(number, entry.record.round, error),
                    )
            for number in entry.record.left:
                say("Worker %d has left, before round %d.", number, entry.record.round)
        return done

    def _fetch(self, done: Do) -> Do | None:
        """Take the snapshot of a member; if it cannot be had, ask for another one."""
        self._fetching = done
        for attempt in range(_TRIES):
            try:
                self.member.fetched(*self.take(done.address))
            except (OSError, ValueError) as error:
                self._failures += 1
                _log.warning(
                    "Worker %d could not take a snapshot of worker %d: %s",
                    *(self.member.number, done.donor, error),
                )
                if self._failures > 10 * _TRIES:
                    raise RuntimeError(
                        f"No snapshot could be had in {self._failures} tries. {error}"
                    ) from error
                time.sleep(0.1 * (attempt + 1))
            else:
                self._failures, self._fetching = 0, None
                return replace(done, what="fetched")
        self._fetching = None
        self.member.not_fetched()
        return None


class Attempt:
    """Exchanges a round in a group of its members, or takes that back; again in each attempt."""

    def __init__(self, workers: Workers, device: torch.device, membership: Membership) -> None:
        self._workers, self._device, self._membership = workers, device, membership
        self._recording = Recording(membership.island.over(Seat()))
        workers.start([self._recording], revocable=True)
        self._kept: dict[str, dict[str, Any]] = {}  # the compressor's state before the attempt

    def run(self, group: str, sent: Sequence[_Sent]) -> None:
        """Exchange in a group of the members; say how it went."""
        member, engine = self._membership.member, self._workers.first
        members, number = member.report.members, member.number
        rank, size = members.index(number), len(members)
        began = time.monotonic()
        engine.loss_scaling.settle()  # so that an attempt without a flow takes back no other one
        state = engine.compressor_state.items()
        self._kept = {name: each_tensor(kept, Tensor.clone) for name, kept in state}
        engine.worker, engine.workers = rank, size
        failed = True
        groups: list[dist.ProcessGroup] = []
        meeting = ExitStack()  # torch's group does not keep a store of Python alive
        try:
            island = self._membership.island
            island.compare([each.result for each in sent if each.names], "an island's round")
            island.say(partial(self._meet, group, rank, size, meeting, groups))
            transport = Distributed(groups[0], "an elastic round") if groups else Seat(rank, size)
            transport.sent_bytes = self._recording.inner.sent_bytes
            self._recording.inner = island.over(transport)
            self._recording.worker, self._recording.workers = rank, size
            with undisturbed():
                for each in sent:
                    flow, each.arrived = each.make()
                    if each.names and self._device.type == "cpu":
                        flow = self._recording.compared(flow, each.names)
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
                *(member.report.round, member.report.attempt, members, number),
                *(time.monotonic() - began, str(error).partition("\n")[0]),
            )
        finally:
            for each_group in groups:
                leave(each_group, failed)
            meeting.close()
            engine.worker, engine.workers, engine.peers = 0, 1, size
            if failed:
                self.undo()
        if failed:
            member.failed()
        else:
            member.ran(text, _norm(engine))
        self._membership.report()

    def undo(self) -> None:
        """Restore errors and the compressor's state as before the attempt."""
        self._workers.first.undo(self._kept)

    def _meet(
        self, name: str, rank: int, size: int, meeting: ExitStack, groups: list[dist.ProcessGroup]
    ) -> str:
        """Add the process group of an attempt, which is this process's for a while."""
        store = meeting.enter_context(self._membership.store(name))
        timeout = timedelta(seconds=self._membership.elastic.timeout)
        backend = "nccl" if self._device.type == "cuda" and dist.is_nccl_available() else "gloo"
        group, _ = _new_process_group_helper(
            size, rank, [], backend, store, group_name=GroupName(name), timeout=timeout
        )
        # A job's rank 0 is ``rank`` in the group.
        places = {0: rank, rank: 0}
        _world.pg_group_ranks[group] = dict(
            sorted(((other, places.get(other, other)) for other in range(size)), key=lambda p: p[1])
        )
        groups.append(group)
        return ""


def _norm(engine: Engine) -> float:
    """Return the norm of a worker's error."""
    errors = engine.errors().values()
    return math.sqrt(sum(float(error.double().square().sum()) for error in errors))


@dataclass
class _Place:
    """Where a worker is in the run."""

    rounds: LocalRounds
    loop: Loop
    first: int  # steps before this round
    belongs: bool  # whether the error is one of this run
    resumed: bool  # whether the weights still equal a checkpoint's
    within: bool = False  # whether the loop is in a step, which it has not counted


class Inheritance:
    """Hands a snapshot to a worker that joins, and this worker's error to another one.

    Threads of a door answer the others, but not while the common weights change.

    Attributes:
        place: where the worker is in the run; None before it comes in.
        closed: no error is taken any more.
    """

    def __init__(
        self, workers: Workers, device: torch.device, membership: Membership, attempt: Attempt
    ) -> None:
        self.place: _Place | None = None
        self.closed = False
        self._workers, self._device, self._membership = workers, device, membership
        self._attempt = attempt
        held = sum(p.numel() * 4 for p in workers.names)  # and outer momentum, buffers, names
        seal, seconds = Seal(membership.elastic.secret), float(membership.elastic.timeout)
        self._wire: Any = {"seal": seal, "most": 16 * held + (1 << 24), "timeout": seconds}
        self._still = threading.Lock()  # held while the common weights change
        self._changing = False  # whether the training thread holds it
        self._errors: list[list[Any]] = []  # of those who have left, with their numbers
        self._door: Door | None = None  # rank 0's

    def open(self, host: str) -> str:
        """Open the door; return its address."""
        ports = self._membership.elastic.ports
        free = range(ports[0], ports[1] + 1) if ports else ()
        self._door = Door(host, free, answer=self._answer, **self._wire)
        return self._door.address

    def hold(self) -> None:
        """Serve no snapshots: the common weights are about to change."""
        if not self._changing:
            self._still.acquire()
            self._changing = True

    def release(self) -> None:
        """Serve snapshots again."""
        if self._changing:  # a thread of the door may hold the lock, too
            self._changing = False
            self._still.release()

    def mark(self) -> str:
        """Return a digest of the common weights, buffers and outer momentum."""
        assert self.place is not None
        weights = self.place.rounds.weights
        tensors = [each.anchor for each in weights.fragments]
        tensors += [each.velocity for each in weights.fragments if each.velocity is not None]
        tensors += [weights.buffers.common[name] for name in sorted(weights.buffers.common)]
        return digest_in_words(tensors)

    def take(self, address: str) -> Taken:
        """Begin where the donor is. Until all of it has come, this worker stays as it was."""
        assert self.place is not None
        place, engine, elastic = self.place, self._workers.first, self._membership.elastic
        rounds, island = place.rounds, self._membership.island
        check = partial(check_snapshot, engine=engine, shapes=self._workers.shapes)
        with visiting(address, **self._wire) as ask:  # rank 0 alone asks
            parts = (ask, check, elastic.patience, place.loop.check)
            tree, there = _heard(island, lambda: snapshot_and_place(*parts))
            number = tree["round"]
            if place.resumed and (number, tree["mark"]) == (engine.step, self.mark()):
                # The steps within the round are kept, too.
                return number, rounds.position, "kept"
            if place.resumed:  # parts of that error may have been sent since
                place.belongs = False
                say(
                    "The checkpoint is of round %d, and the run is in round %d: this worker begins "
                    "with a zero error.",
                    *(engine.step, number),
                )
            place.resumed = False
            if self._changing:  # since an attempt whose verdict this worker has not read
                took = {"ask": "took", "number": self._membership.member.number}
                if _heard(island, lambda: ask(took | {"round": engine.step})) != {"took": True}:
                    self._attempt.undo()
                self.release()
            with self._still:
                load_snapshot(tree, rounds, engine, keep_error=place.belongs)
            with suppress(OSError, ValueError):  # the donor has made steps in the meantime
                later = _heard(island, lambda: place_of(ask))
                there = later if later["round"] == number else there
        rounds.skip(there["position"])
        place.first = there["steps"] - there["position"]
        # Within a step, as in a round that has begun without this worker, the loop counts it next.
        place.loop.go_on_from(there["steps"] - place.within)
        return number, there["position"], "kept" if place.belongs else "zero"

    def left(self) -> list[list[Any]]:
        """Return numbers and errors of those who have left, which this process was given."""
        with self._still:  # an error that was taken is in one of the lists
            errors, self._errors = self._errors, []
        return errors

    def add(self, errors: Sequence[Any]) -> list[int]:
        """Add the errors of those who have left to this worker's; return their numbers."""
        for _, memory in errors:
            there = each_tensor(memory, lambda tensor: tensor.to(self._device))
            self._workers.first.add_errors(there)
        return [number for number, _ in errors]

    def bequeath(self) -> None:
        """Give this worker's error to the lowest of the others that takes it."""
        engine, membership = self._workers.first, self._membership
        common, number = engine.memory.common, membership.member.number
        memory = {
            name: {buffer: tensor for buffer, tensor in kept.items() if buffer not in common}
            for name, kept in engine.state_dict()["memory"].items()
        }
        norm = _norm(engine)
        if not norm:
            say("Worker %d leaves.", number)
            return
        run = membership.member.report.run
        said = {"ask": "error", "run": run, "number": number, "memory": memory}
        for other, address in sorted(membership.neighbours.items()):
            if other == number:
                continue
            offer = membership.saying(f"offers its error to worker {other} at {address}")
            with offer, suppress(OSError, ValueError), visiting(address, **self._wire) as ask:
                if ask(said) == {"taken": True}:
                    say(
                        "Worker %d leaves; worker %d has its error of norm %.6g.",
                        *(number, other, norm),
                    )
                    return
        _log.warning(
            "Worker %d leaves, and no other worker takes its error of norm %.6g.", number, norm
        )

    def end(self) -> None:
        """Take no more errors, and add those that were taken."""
        self.release()
        with self._still:
            self.closed = True
        self.add(self.left())

    def close(self) -> None:
        """Close the door."""
        if self._door is not None:
            self._door.close()

    def _answer(self, asked: Any) -> Tree:
        """Answer another worker, in a thread of the door."""
        place, engine = self.place, self._workers.first
        match asked:
            case {"ask": "snapshot"}:
                if place is None:
                    raise ValueError("This worker has not begun yet.")
                with self._still:
                    made = snapshot_of(place.rounds, engine)
                    return each_tensor(made | {"mark": self.mark()}, to_host)
            case {"ask": "place"}:
                with self._still:
                    assert place is not None
                    position = place.rounds.position
                    steps = place.first + position
                    return {"round": engine.step, "position": position, "steps": steps}
            case {"ask": "took", "round": int(number), "number": int(worker)}:
                roll = self._membership.member.roll  # begins where this worker came in
                took = any(each.round == number and worker in each.members for each in roll)
                return {"took": took}
            case {"ask": "error"}:
                _ERROR.check(asked, "error")
                with self._still:
                    fits = asked["run"] == self._membership.member.report.run and not self.closed
                    if fits:
                        self._errors.append([asked["number"], asked["memory"]])
                return {"taken": fits}
        raise ValueError(f"{str(asked)[:60]} is not a question that a worker answers.")


def _heard(island: Island, act: Callable[[], Any]) -> Any:
    """Return the tree that ``act`` returns on rank 0, on all ranks of an island."""
    if island.size == 1:
        return act()
    data = island.hear(lambda: torch.frombuffer(bytearray(to_bytes(act())), dtype=torch.uint8))
    return from_bytes(data.numpy().tobytes())


class ElasticExchange(Single):
    """Carries out the exchanges of one elastic worker: an ``Exchanger`` of local steps.

    In an island, rank 0 has the line to the rendezvous, the door and the round's group.

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
        self._workers, self._device = workers, device
        self._membership = Membership(elastic, self.island)
        self._attempt = Attempt(workers, device, self._membership)
        self._inheritance = Inheritance(workers, device, self._membership, self._attempt)
        self._sent: list[_Sent] = []
        self._differing = self.size = 0
        self._saved: int | None = None  # number in the state that was loaded
        self._done = 0  # steps in that state
        same = workers.configuration.in_words() | dict(agreed)
        same[MODEL] = digest_of(workers.model)
        same |= compile_kernels(workers.configuration, device)
        if size > 1:
            same["island"] = str(size)
        wanted = elastic.number if wanted is None else wanted
        times = float(elastic.grace), float(elastic.timeout)
        terms = Terms(wanted, "", same, elastic.min_workers, *times)
        try:
            self._membership.open(terms, self._inheritance.open)
        except BaseException:
            self.close(failed=True)
            raise

    @property
    def number(self) -> int:
        """This worker's number."""
        return self._membership.member.number

    @property
    def steps(self) -> int:
        """Optimizer steps of the run that are done, as all workers count them."""
        place = self._inheritance.place
        return self._done if place is None else place.loop.steps

    def resume(self, number: int, steps: int) -> None:
        """Note the number and the steps in the state that this worker has loaded."""
        self._saved, self._done = number, steps

    @property
    def roll(self) -> Roll:
        """The rounds of this worker since it came in last."""
        return Roll(self._membership.member.roll)

    def enter(self, rounds: LocalRounds, loop: Loop) -> None:
        """Come into the run: begin it with others, or take a member's snapshot.

        Args:
            rounds: this worker's, at the weights with which it would begin a run.
            loop: that it is in.
        """
        membership, inheritance = self._membership, self._inheritance
        step = self._workers.first.step
        # If another worker has the number, the checkpoint has that worker's error.
        belongs = step > 0 and self._saved in (None, self.number)
        place = _Place(rounds, loop, loop.steps - rounds.position, belongs, resumed=belongs)
        inheritance.place, membership.heed, membership.take = place, loop.check, inheritance.take
        membership.member.enters(step, inheritance.mark())
        done = membership.until("begin", "fetched")
        if done.what == "fetched" and membership.member.report.phase == "ready":
            done = membership.until("begin")
        if self.island.leads:
            say(
                "Joined as worker %d of %d at %s, in round %d.",
                *(self.number, done.workers, membership.elastic.rendezvous),
                membership.member.report.round,
            )
        place.belongs = place.within = True
        place.resumed = False

    def submit(self, grad: Tensor, shapes: Shapes) -> torch.futures.Future[Tensor]:
        """Add a bucket to the round."""

        def make() -> tuple[Flow, Tensor]:
            sent = grad.clone()
            return self._workers.flow(self._workers.first, sent, shapes), sent

        return self.run(make, grad, tuple(shapes))

    def run(
        self, make: Callable[[], tuple[Flow, Tensor]], result: Tensor, names: tuple[str, ...] = ()
    ) -> torch.futures.Future[Tensor]:
        """Add any other flow to the round; it is made once for each attempt."""
        devices: Any = [self._device] if self._device.index else None
        future = torch.futures.Future[Tensor](devices=devices)
        self._sent.append(_Sent(make, result, future, names))
        return future

    def end_round(self, common: list[Tensor]) -> None:
        """Exchange with the members of the round, again until an attempt is committed.

        If the others have gone on without this worker, it begins again at their weights.
        """
        membership, inheritance = self._membership, self._inheritance
        member, sent, self._sent = membership.member, self._sent, []
        errors = _heard(self.island, inheritance.left)
        member.asks(inheritance.mark(), inheritance.add(errors))
        number = member.report.round
        while True:
            done = membership.until("run", "commit", "repeat", "fetched")
            if done.what == "run":
                inheritance.hold()
                others = [each for each in member.report.members if each != self.number]
                with membership.saying(f"exchanges round {number} with {workers_in_words(others)}"):
                    self._attempt.run(done.group, sent)
            elif done.what == "commit":
                self._finish(sent)
                return
            elif done.what == "repeat":
                self._attempt.undo()
                inheritance.release()
                self._repeated(done.why)
            else:
                _log.warning(
                    "Worker %d was too late for round %d, which the others made without it. It "
                    "continues at the weights of worker %d, in round %d.",
                    *(self.number, number, done.donor, member.report.round),
                )
                return

    def landed(self) -> None:
        """Serve snapshots again: the common weights have been taken over."""
        self._inheritance.release()

    def check(self) -> None:
        """Nothing runs in the background."""

    def _finish(self, sent: Sequence[_Sent]) -> None:
        place = self._inheritance.place
        assert place is not None
        self._differing = 0
        place.first = place.loop.steps + 1
        self.size = len(self._membership.member.report.members)
        for each in sent:
            assert each.arrived is not None
            each.result.copy_(each.arrived)
            each.future.set_result(each.result)
        self._workers.end_round([each.names for each in sent if each.names])

    def _repeated(self, why: str) -> None:
        round_ = self._membership.member.report.round
        _log.warning("Round %d is repeated: %s.", round_, why)
        self._differing = self._differing + 1 if "differ" in why else 0
        if self._differing >= _TRIES:
            raise ReplicaError(
                f"Members of round {round_} have had different results {self._differing} times in "
                f"a row. Compare their machines: memory, devices, and versions of torch."
            )

    def close(self, failed: bool = False) -> None:
        """Leave the run; again does nothing. Other ranks of the island are not waited for.

        Args:
            failed: the worker leaves before its end, so that another one gets its error.
        """
        membership, inheritance = self._membership, self._inheritance
        if inheritance.closed:
            return
        with suppress(RuntimeError, ValueError):
            self._settle()
        inheritance.end()  # before the own error goes: the door takes no other one now
        inside = inheritance.place is not None and membership.member.report.run
        if failed and inside and self.island.leads:
            inheritance.bequeath()
        membership.close()
        inheritance.close()
        self.island.close()

    def _settle(self) -> None:
        """Bring a round to an end in which this worker has been interrupted."""
        done = self._membership.verdict()
        if done is not None and done.what == "commit":
            self._workers.end_round([])
        elif done is not None:
            self._attempt.undo()
        if self._workers.engines and self._workers.first.torn:
            self._attempt.undo()


def snapshot_and_place(
    ask: Ask, check: Callable[[Any], None], patience: float, heed: Callable[[], None]
) -> tuple[Any, Any]:
    """Return a snapshot, and the donor's place in the same round.

    Args:
        ask: asks the donor.
        check: refuses a snapshot of another model.
        patience: seconds.
        heed: raises what ends the loop.

    Raises:
        RuntimeError: snapshots came after the ends of their rounds, for ``patience`` seconds.
    """
    limit = time.monotonic() + patience
    for tries in itertools.count(1):
        asked = time.monotonic()
        tree = ask({"ask": "snapshot"})
        check(tree)
        place = place_of(ask)
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
            if place_of(ask)["round"] != place["round"]:
                break
    raise AssertionError


def place_of(ask: Ask) -> Any:
    """Return the round, the position in it, and the steps of the worker that is asked."""
    place = ask({"ask": "place"})
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
