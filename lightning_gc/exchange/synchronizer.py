"""Synchronizer: compressed gradient exchange of one DDP worker, on a background thread."""

from __future__ import annotations

import contextlib
import socket
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from lightning_gc.core import Flow
from lightning_gc.core.copies import Single
from lightning_gc.exchange.kernel_compilation import compile_kernels
from lightning_gc.exchange.validation import check_agreement, refuse_unknown_device
from lightning_gc.exchange.verification import Verify, verification
from lightning_gc.exchange.workers import Shapes, Workers
from lightning_gc.kernels import dispatch
from lightning_gc.transports import distributed
from lightning_gc.transports.accounting import Mark, Recording, mark
from lightning_gc.transports.background import Background
from lightning_gc.transports.base import Transport
from lightning_gc.transports.island import ALONE, Island
from lightning_gc.transports.peer_error import awaiting_peers

_LEVELS = 1000  # buckets times levels that are compared at once; a controller may set any number
JOINING = timedelta(minutes=1)
"""Least timeout until the first step: workers start, and on CUDA compile, at unlike times."""


class Synchronizer(Single):
    """Exchanges the gradients of one real worker. Uses torch.distributed, but no Lightning.

    Args:
        workers: this worker's engine, or None until ``start`` makes it, and parameter names.
        device: of the gradients.
        process_group: the group of processes that exchange; None is the default group.
        timeout: of every collective; on CUDA ``JOINING`` at least until all have joined.
        before_round: called before the first bucket of each round.
        common: returns the weights that ``verify`` compares; None: this process's part of each
            parameter.
        revocable: optimizer steps may be skipped, as by a gradient scaler.
        agreed: name -> text of other settings that must be equal on all workers.
        verify: what workers compare, as for ``CompressedDDPStrategy``.
        purpose: what is communicated, for error messages.
        groups: ranks of all groups that make a synchronizer now, of all processes
            together; None: only ``process_group`` does. Several groups have hung where their
            members made them again for each fit without the other processes.
        island: the processes of this worker. With several, ``groups`` has one group for each rank
            of an island, and the first one's messages are every island's.

    Communication pattern:
        One background thread exchanges the buckets over its own process group, so that it never
        interleaves with DDP's collectives. On the host workers compare the layouts of a bucket's
        messages before they send them: in a bucket's first round at each level, and 1, 2, 4, 8 and
        so on rounds later, which all count alike. In these rounds a worker takes over kernels that
        were compiled meanwhile. Other rounds need no comparison.

    Attributes:
        rounds: that have ended here.

    Raises:
        ValueError: a device that is neither ``cpu`` nor ``cuda``; on all workers, if their
            configurations or models differ, or what decides the last bits of what they decode:
            torch, the kernels, for some methods the device.
    """

    def __init__(
        self,
        workers: Workers,
        device: torch.device,
        process_group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        *,
        before_round: Callable[[], None] = lambda: None,
        common: Callable[[], Iterable[Tensor]] | None = None,
        revocable: bool = False,
        agreed: Mapping[str, str] | None = None,
        verify: Verify = 0,
        purpose: str = distributed.EXCHANGE,
        groups: Sequence[Sequence[int]] | None = None,
        island: Island = ALONE,
    ) -> None:
        refuse_unknown_device(device)
        self.workers, self._island = workers, island
        self._before_round = before_round
        self._common = common or (lambda: map(workers.local, workers.names))
        members = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        # Gloo's messages keep the timeout with which the group was made, and nothing is compiled.
        hurried = device.type == "cuda" and timeout is not None and timeout < JOINING
        self._group = distributed.own_group(
            groups or [members],
            JOINING if hurried else timeout,
            backend=dist.get_backend(process_group),
            use_local_synchronization=groups is None and len(members) < dist.get_world_size(),
        )
        try:
            self._meet(device, purpose, verify, revocable, dict(agreed or {}))
        except BaseException:
            leave(self._group, failed=True)
            raise
        if hurried and timeout is not None:
            distributed.set_timeout(timeout, self._group)
        # Verified messages are compared on the host, and an island hears them there.
        on_host = bool(verify) or island.size > 1
        waits = on_host or workers.configuration.waits(dist.get_world_size(self._group))
        queues = waits_for_others(self._group)  # NCCL; a call of Gloo ends when all have called
        self._background = Background(self._recording, device, waits=waits or not queues)
        self._level: tuple[object, int] = (None, 0)  # the compressor as it is now, its hash
        self._known: set[int] = set()  # buckets at levels, after their layouts were compared
        self._since = 0  # the round with the latest of them
        dispatch.host.rest(self)
        self._left = False
        self._round: list[tuple[str, ...]] = []  # buckets submitted in this round
        self._ready: list[Mark] = []  # when they were
        self.rounds = 0
        self._compared: torch.futures.Future[Tensor] | None = None  # of the last verified round

    def _meet(
        self,
        device: torch.device,
        purpose: str,
        verify: Verify,
        revocable: bool,
        agreed: dict[str, str],
    ) -> None:
        """Compare what must be equal, make the engine, and learn where the others run."""
        workers = self.workers
        configuration = workers.configuration
        per_node = configuration.neighbours(dist.get_world_size(self._group))
        transport = distributed.Distributed(self._group, purpose, per_node)
        same = configuration.in_words() | {"verify": repr(verify)} | agreed
        same |= compile_kernels(configuration, device)
        # Before all else: sizes of what is sent later follow from these settings.
        check_agreement(same, transport, device, workers.model)
        self._verification = verification(verify, type(self).__name__)
        self._compares = bool(verify) and self._island.size > 1
        shared = self._island.over(transport)
        verified = self._verification
        self._recording = Recording(shared if verified is None else verified.transport(shared))
        workers.start([self._recording], revocable=revocable)
        workers.run, hosts = _acquainted(workers.run, shared, device)
        workers.on_this_machine = hosts.count(hosts[shared.worker])
        for misplaced in filter(None, (each.misplaced(hosts) for each in configuration.schemes)):
            if dist.get_rank(self._group) == 0:
                warnings.warn(misplaced, stacklevel=3)

    def hook(self, state, bucket):  # type: ignore[no-untyped-def]
        """Synchronise a bucket: the communication hook; untyped, as DDP inspects annotations."""
        names = self.workers.names
        shapes = {names[param]: tuple(param.shape) for param in bucket.parameters()}
        future = self.submit(bucket.buffer(), shapes)
        if bucket.is_last():
            self.end_round()
        return future

    def submit(self, grad: Tensor, shapes: Shapes) -> torch.futures.Future[Tensor]:
        """Queue a bucket; the future is completed when ``grad`` holds the mean over workers.

        Args:
            grad: flat local gradients, ``(numel,)``, replaced in place.
            shapes: parameter name -> shape, in the order in which they lie in ``grad``.

        Raises:
            PeerError: an earlier exchange failed.
            ReplicaError: workers have found that their means differ.
        """
        self._background.check()
        if not self._round:
            self._before_round()
        self._round.append(tuple(shapes))
        workers = self.workers
        if workers.ready is not None:
            self._ready.append(mark(self._background.device))
        if workers.regrouping is not None:
            return workers.regrouping.hold(grad, shapes, self._background)
        return self._background.submit(self._flow(grad, shapes), grad)

    def run(
        self, make: Callable[[], tuple[Flow, Tensor]], result: Tensor
    ) -> torch.futures.Future[Tensor]:
        """Queue a flow of any other kind; the future is completed with ``result`` at its end."""
        self._background.check()
        return self._background.submit(make()[0], result)

    def timed(self, flows: Sequence[Flow]) -> dict[str, float]:
        """Run this worker's flow between two rounds; return phase -> seconds, which no step has."""
        (flow,) = flows
        self._background.check()
        account = Recording(self._recording.inner)
        account.timing = True
        nothing = torch.empty(0, device="cpu")
        self._background.submit(flow, nothing, transport=account).wait()
        self._background.check()
        return account.take().seconds

    def landed(self) -> None:
        """Nothing waits for weights to be taken over."""

    def _flow(self, grad: Tensor, shapes: Shapes) -> Flow:
        engine = self.workers.first
        flow = self.workers.flow(engine, grad, shapes)
        if grad.device.type == "cpu":  # devices have the kernels on which workers agreed
            compressor = engine.levels.compressor
            if compressor is not self._level[0]:
                self._level = compressor, hash(compressor)
            what = hash((tuple(shapes), self._level[1]))
            if what not in self._known and len(self._known) < _LEVELS:
                self._known.add(what)
                if self.rounds > 1:  # in round 1 DDP arranges its buckets again
                    self._since = self.rounds
            # Compare at ages 0, 1, 2, 4, 8, ...: kernels may be taken over late, and most rounds
            # cost nothing.
            age = self.rounds - self._since
            flow = flow if age & (age - 1) else self._recording.compared(flow, shapes)
        if self._verification is not None:
            flow = self._verification.watch(flow, grad, shapes, engine.step)
        return self._compared_inside(flow, grad) if self._compares else flow

    def _compared_inside(self, flow: Flow, grad: Tensor) -> Flow:
        """Refuse an island of processes that would send other bits; then as ``flow``."""
        self._island.compare([grad], "what an island sends")
        yield from flow

    def end_round(self, common: Iterable[Tensor] | None = None) -> None:
        """End a round: all its buckets have been submitted.

        Args:
            common: instead of what the constructor was given.
        """
        workers = self.workers
        if workers.regrouping is not None:
            self._round = workers.regrouping.layout
            workers.regrouping.send(self._flow, self._background)
            workers.regrouping = None
        comparison = None
        if self._verification is not None:
            compared = self._common() if common is None else common
            comparison = self._verification.compare(workers.first.step, compared)
        if comparison is not None:
            self._compared = self._background.submit(comparison, torch.empty(0, device="cpu"))
        workers.end_round(self._round, self._ready)
        self._round, self._ready = [], []
        self.rounds += 1

    def check(self) -> None:
        """Raise an exception of the background thread, if any.

        On the host the last round has been compared then; a device would have to be waited for.
        """
        if self._compared is not None and self._background.device.type == "cpu":
            self._compared.wait()
            self._compared = None
        self._background.check()

    def close(self, failed: bool = False) -> None:
        """Finish queued buckets, stop the thread and leave the group; after a failure, at once.

        To close again does nothing.

        Args:
            failed: whether this worker stops by its own error, elsewhere.
        """
        stopped = self._background.close()
        dispatch.host.rest(self, ends=True)
        failed = failed or self._background.error is not None or bool(self._round)
        if stopped and not self._left:
            self._left = True
            leave(self._group, failed)
            self._island.close()


def _acquainted(run: str, transport: Transport, device: torch.device) -> tuple[str, list[str]]:
    """Return worker 0's name of the run, and the machine of every worker."""
    texts = distributed.gather_text(f"{run} {socket.gethostname()}", transport, device)
    runs, hosts = zip(*(text.split(" ", 1) for text in texts), strict=True)
    return runs[0], list(hosts)


_GRACE = 10.0  # seconds


def leave(group: dist.ProcessGroup, failed: bool) -> None:
    """Destroy the group; with NCCL, which then waits for the others, abort it after a failure.

    The others may wait in a collective that will never end, and this worker's error is shown only
    when it has left. NCCL's kernels are ended by an abort, so that neither this device nor the end
    of the process waits for them. To leave a group of Gloo is local, and tells the others at once.

    Args:
        group: no other thread uses it any more.
        failed: whether this worker stops by an error.
    """
    if not dist.is_initialized():
        return
    if failed and waits_for_others(group):
        # An abort waits too, where others do not answer.
        thread = threading.Thread(target=_abort, args=(group,), daemon=True)
        thread.start()
        thread.join(_GRACE)
        return
    with awaiting_peers("leave", dist.get_rank(group), dist.get_world_size(group)):
        dist.destroy_process_group(group)


def waits_for_others(group: dist.ProcessGroup) -> bool:
    """Return whether destroying the group is a collective."""
    return "nccl" in dist.get_backend_config(group)


def _abort(group: dist.ProcessGroup) -> None:
    abort = getattr(distributed_c10d, "_abort_process_group", None)
    if abort is not None:
        with contextlib.suppress(Exception):  # what counts is the error that led here
            abort(group)
