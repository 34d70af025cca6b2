"""ElasticExchange: local steps whose workers may die, leave and join between rounds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from lightning_gc.core import WHOLE, Flow, Record
from lightning_gc.core.copies import Single
from lightning_gc.core.digest import ReplicaError
from lightning_gc.core.flow import undisturbed
from lightning_gc.core.notices import say
from lightning_gc.core.saved_state import Tree, each_tensor
from lightning_gc.elastic.folder import Folder
from lightning_gc.elastic.membership import TRIES, Carrier, Membership
from lightning_gc.elastic.roll import Roll, Terms, workers_in_words
from lightning_gc.elastic.snapshot import (
    Inheritance,
    Loop,
    Place,
    digest_in_words,
    heard,
    norm_of_error,
)
from lightning_gc.elastic.sockets import Sockets
from lightning_gc.exchange.kernel_compilation import compile_kernels
from lightning_gc.exchange.validation import MODEL, digest_of, refuse_unknown_device
from lightning_gc.exchange.workers import Shapes, Workers
from lightning_gc.kernels import dispatch
from lightning_gc.local_steps.local_rounds import LocalRounds
from lightning_gc.local_steps.round_plan import Elastic
from lightning_gc.transports.accounting import Recording
from lightning_gc.transports.base import Transport
from lightning_gc.transports.island import ALONE, Island, IslandError, Seat
from lightning_gc.transports.peer_error import PeerError, is_from_backend

_log = logging.getLogger(__name__)


@dataclass
class _Sent:
    """A tensor that is exchanged in a round, and sent again in each attempt."""

    make: Callable[[], tuple[Flow, Tensor]]
    result: Tensor
    future: torch.futures.Future[Tensor]
    names: tuple[str, ...] = ()
    arrived: Tensor | None = None


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
        transports: list[Transport] = []  # rank 0's
        meeting = ExitStack()

        def meet() -> str:
            proposed = self._membership.carrier.propose(group, rank, size)
            transports.append(meeting.enter_context(proposed))
            return ""

        try:
            with meeting:
                island = self._membership.island
                island.compare([each.result for each in sent if each.names], "an island's round")
                island.say(meet)
                transport = transports[0] if transports else Seat(rank, size)
                transport.sent_bytes = self._recording.inner.sent_bytes
                self._recording.inner = island.over(transport)
                self._recording.worker, self._recording.workers = rank, size
                with undisturbed():
                    for each in sent:
                        flow, each.arrived = each.make()
                        if self._membership.elastic.in_folder:  # its transport compares
                            dispatch.host.take_over()
                        elif each.names and self._device.type == "cpu":
                            flow = self._recording.compared(flow, each.names)
                        self._recording.run(flow, self._device)
                # The rest is in the mark of the next round.
                sums = [each.arrived for each in sent if each.names and each.arrived is not None]
                text = digest_in_words(sums)
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
            engine.worker, engine.workers, engine.peers = 0, 1, size
            if failed:
                self.undo()
        if failed:
            member.failed()
        else:
            member.ran(text, norm_of_error(engine))
        self._membership.report()

    def undo(self) -> None:
        """Restore errors and the compressor's state as before the attempt."""
        self._workers.first.undo(self._kept)


class ElasticExchange(Single):
    """Carries out the exchanges of one elastic worker: an ``Exchanger`` of local steps.

    In an island, rank 0 has the carrier.

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
        self._inheritance = Inheritance(workers, device, self._membership, self._attempt.undo)
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
        held = sum(param.numel() * 4 for param in workers.names)
        most = 16 * held + (1 << 24)  # with outer momentum, buffers, names
        carrier: Callable[[], Carrier] = partial(Sockets, elastic, most, device)
        if elastic.in_folder:
            carrier = partial(Folder, elastic)
        try:
            self._membership.open(terms, carrier, self._inheritance.answer)
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
        place = Place(rounds, loop, loop.steps - rounds.position, belongs, resumed=belongs)
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
        errors = heard(self.island, inheritance.left)
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
        if self._differing >= TRIES:
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
        inheritance.end()  # before the own error goes: no other one is taken now
        inside = inheritance.place is not None and membership.member.report.run
        if failed and inside and self.island.leads:
            inheritance.bequeath()
        membership.close()
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


class ElasticState:
    """The worker's number in checkpoints, by which it is recognised, and its count of steps."""

    common_structure = Record({"number": WHOLE}, {"steps": WHOLE})

    def __init__(self, exchange: ElasticExchange) -> None:
        self._exchange = exchange

    def common_state(self) -> Tree:
        return {"number": self._exchange.number, "steps": self._exchange.steps}

    def load_common_state(self, state: Any) -> None:
        self._exchange.resume(state["number"], state.get("steps", 0))
