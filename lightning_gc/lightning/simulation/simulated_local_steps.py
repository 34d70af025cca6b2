"""SimulatedLocalSteps: W workers with local steps on one device, one after the other."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from lightning_gc.attachment.attached_rounds import Given
from lightning_gc.checkpoint.side_file_store import Kept
from lightning_gc.compressors import Compressor
from lightning_gc.controllers import Controller
from lightning_gc.core import Flow
from lightning_gc.core.combinations import judge
from lightning_gc.core.copies import Single
from lightning_gc.core.refusal import refuse
from lightning_gc.core.saved_state import each_tensor
from lightning_gc.core.settings import parted, takes_fields
from lightning_gc.elastic.roll import Entrance, Roll, Round
from lightning_gc.elastic.snapshot import digest_in_words, load_snapshot, snapshot_of
from lightning_gc.engine import Engine
from lightning_gc.exchange import Compression
from lightning_gc.exchange.workers import Shapes, Workers
from lightning_gc.lightning.arguments import SimulatedLocalStepsFields
from lightning_gc.lightning.local_steps_strategy import LocalHooks
from lightning_gc.lightning.simulation.ddp import WorkerBuffers
from lightning_gc.lightning.simulation.simulated_workers import (
    SimulatedWorkers,
    UsersHook,
    overrides,
)
from lightning_gc.local_steps import RoundPlan
from lightning_gc.local_steps.local_rounds import LocalRounds, Waits, reset_poisoned
from lightning_gc.local_steps.refusals import refuse_shards, with_held
from lightning_gc.local_steps.unequal import SimulatedClock, check_speeds
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.transports.network_model import NetworkModel
from lightning_gc.transports.simulated import Ledger, Simulated


@takes_fields(Compression, Kept, RoundPlan)
class SimulatedLocalSteps(LocalHooks, SimulatedWorkers):
    """Local steps of W workers, simulated on one device, each with its own weights and optimizer.

    Use it as ``Trainer(devices=1, strategy=SimulatedLocalStepsStrategy(QSGD(4), workers=4,
    every=8))``; the LightningModule need not change. Every worker has its own share of the data,
    weights, buffers, optimizer state and errors, and exchanges by the same code as a real one: the
    weights equal ``LocalStepsStrategy``'s with W processes, bit for bit where payloads are
    gathered.

    A step takes W micro-batches, the i-th being worker i's, as with ``SimulatedDDPStrategy``; then
    each worker makes its step. ``on_before_optimizer_step`` and clipping run W times, once at each
    worker's gradients and weights. Between steps module and optimizers are worker 0's.

    Costs W times weights, gradients, optimizer state, common weights and errors.

    Args:
        show: what validation and test see.
        workers: W, the number of simulated workers. Leave it out with ``roll`` or ``speeds``.
        roll: of an elastic run, or its file. The run is replayed: in each round its members take
            part, others come in and leave as they did. The weights have the same bits where
            payloads are gathered and a batch depends on ``strategy.number`` and ``global_step``
            only. Each number of the roll has a micro-batch in every step; those of workers that
            are not there are skipped, and hooks see a loss of NaN for them. The digest of a round
            that you make yourself is empty, and is not compared.
        speeds: of each worker, in steps per second; ``compression/predicted_seconds`` is then how
            long the run would have taken, by these and ``network``. Nothing is slowed down. Not
            with ``roll``.
        network: converts bytes to the seconds that ``CompressionMonitor`` shows; or a rate, such
            as ``"1gbit"``.
        state: in checkpoints; the same files as real workers write, so that a simulated run can
            resume as a real one and vice versa.
        kwargs: as for ``SingleDeviceStrategy``. Of the rounds' settings ``elastic`` is refused, and
            ``unequal`` if there is a ``roll``.

    With an island of N a step takes W·N micro-batches, N in a row for each worker, which steps with
    the mean of their gradients. A real island sums in the order of its all-reduce, which decides
    the last bits for N above 2.

    Communication pattern:
        None: requests are fulfilled in memory, for all workers at once.

    Raises:
        ValueError: what ``LocalStepsStrategy`` or ``SimulatedDDPStrategy`` refuses; at fit start, a
            loss scaler, as with ``precision="16-mixed"``.
        RuntimeError: an optimizer that calls its closure several times; one that adapts a number
            which a scheduler sets too; a collective, such as ``self.all_gather``, called by the
            user within a step.

    Example:
        >>> from lightning_gc import QSGD, SimulatedLocalStepsStrategy
        >>> strategy = SimulatedLocalStepsStrategy(QSGD(bits=4), workers=4, every=8)
        >>> strategy.workers, strategy.plan.every
        (4, 8)

    Attributes:
        workers: W.
        engines: each worker's state and configuration, once fitting has started.
        recordings: each worker's byte and time account, while fitting.
        clock: predicts the time, if ``speeds`` are given.
    """

    def __init__(
        self,
        compressor: Compressor | str,
        memory: Memory | str | None = None,
        scheme: Scheme | str | None = None,
        controller: Controller | str | None = None,
        *,
        show: Literal["common", "local"] = "common",
        workers: int | None = None,
        roll: Roll | str | None = None,
        speeds: Sequence[float] | None = None,
        network: NetworkModel | str = NetworkModel(),  # noqa: B008 - frozen
        **kwargs: Unpack[SimulatedLocalStepsFields],
    ) -> None:
        owner = type(self).__name__
        if speeds is not None:
            check_speeds(owner, "speeds", speeds)
        said = {"workers": workers, "speeds": speeds and tuple(speeds), "roll": roll}
        plan = RoundPlan(owner=owner, **parted(kwargs, RoundPlan)[0])
        judge("Simulated local steps", owner, plan=plan, **said)
        workers = len(speeds) if speeds is not None else workers
        self._replay = None if roll is None else Replay(roll, workers)
        number: Any = workers if self._replay is None else len(self._replay.numbers)
        self.speeds = None if speeds is None else tuple(speeds)
        self.clock: SimulatedClock | None = None
        own: dict[str, Any] = {"show": show, "workers": number, "network": network}
        super().__init__(compressor, memory, scheme, controller, **own, **kwargs)
        if self._replay is not None:
            given = Given(self.local_workers.configuration, self.controller)
            judge("Elastic local steps", owner, plan=self.plan, elastic="a roll", **vars(given))
        unequal = self.plan.unequal
        if unequal is not None:
            unequal.check_workers(owner, self.workers)

    _of_processes = "LocalStepsStrategy"
    _nest: "Nest | None" = None
    _for_norms = "Use BatchNorm: its running statistics are averaged with each exchange."

    def _begin_fit(self, module: Any) -> None:
        self._refuse_trainer(module.trainer, module)
        refuse_shards(type(self).__name__, module, islands=False)
        if self._scaler() is not None:
            refuse(
                f"{type(self).__name__}: every worker needs its own loss scaler, and the "
                f"Trainer has one. Use precision='bf16-mixed', or {self._of_processes} with "
                f"processes"
            )
        workers = self.local_workers
        unequal = self.plan.unequal
        grace = None if unequal is None else unequal.grace
        clock = SimulatedClock(self.speeds or (1.0,) * self.workers, grace)
        self.clock = None if self.speeds is None else clock
        exchanges = Exchanges(workers, self._ledger, self.root_device, clock)
        self._replicas = Replicas(module, self.workers, self._its_optimizers)
        self._buffers = [WorkerBuffers(module, self.island) for _ in range(self.workers)]
        rounds = []
        for engine, end in zip(self.engines, exchanges.of, strict=True):
            rounds.append(
                LocalRounds(
                    module,
                    workers.names,
                    engine,
                    end,
                    self.plan,
                    present=partial(self._entered, engine.worker),
                    clock=clock,
                )
            )
        self._keep(rounds)
        if self._replay is not None:
            self._replay.begin(rounds, self.engines, exchanges, self._its_optimizers)

    def _start_alike(self) -> None:
        self._replicas.share()

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """As for real workers; no worker keeps numbers that its optimizer had before."""
        if self._all_rounds:
            self.settings.forget()
        super().load_optimizer_state_dict(checkpoint)

    def _copy_optimizers(self, checkpoint: Any, worker: int) -> None:
        with self._entered(worker):
            pairs = zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
            for optimizer, state in pairs:
                optimizer.load_state_dict(state)

    @property
    def number(self) -> int:
        """The running worker's number, by which its data can be chosen."""
        return self.worker if self._replay is None else self._replay.numbers[self.worker]

    @property
    def island_rank(self) -> int:
        """The running process's rank in its worker."""
        trainer = getattr(self.lightning_module, "_trainer", None)
        if trainer is None or not trainer.training:
            return 0
        return int(max(trainer.fit_loop.batch_idx, 0) % self.island)

    @property
    def _rounds(self) -> LocalRounds | None:
        if self._replay is None or not self._all_rounds:
            return super()._rounds
        return self._all_rounds[self._replay.present[0]]

    @property
    def _present(self) -> Sequence[int]:
        """The workers that make this step."""
        return range(self.workers) if self._replay is None else self._replay.present

    @contextmanager
    def _entered(self, worker: int) -> Iterator[None]:
        """Enter a worker, and at the end the one before; settings that change are its own."""
        before = self._replicas.present
        self._replicas.enter(worker)
        try:
            with self.settings.own(worker):
                yield
        finally:
            self._replicas.enter(before)

    def _turn(self, process: int | None) -> None:
        super()._turn(process)
        if self._all_rounds and self._training():
            self._replicas.enter(self._present[0] if process is None else process // self.island)

    def _say_of_settings(self, what: str, label: str, name: str) -> None:
        if what != "differing":
            super()._say_of_settings(what, label, name)
            return
        raise RuntimeError(
            f"{type(self).__name__}: the optimizer adapts {name!r} in its steps, and a scheduler "
            f"or callback changes it between them, which each worker would do to its own. Use "
            f"{self._of_processes} with processes, or do one of both."
        )

    def _begin_step(self) -> None:
        self._replicas.enter(0)  # Lightning sets its gradients to zero
        self._replicas.forget_gradients()
        if self._replay is not None:
            self._replay.begin_step()

    def _enter(self, worker: int) -> None:
        self._replicas.enter(worker)
        buffers = self._buffers[worker]
        if self._done == worker * self.island:
            buffers.begin()
        buffers.enter(self.island_rank)

    def _collect(self, worker: int, again: bool) -> None:
        """Keep the buffers of rank 0 of an island, as DDP does."""
        self._buffers[worker].leave(self.island_rank, again)
        if self.island_rank == self.island - 1:
            self._buffers[worker].enter(0)

    def _own_hooks(self) -> list[UsersHook]:
        module, name = self.lightning_module, "optimizer_step"
        return [UsersHook(module, name, self._nested)] if overrides(module, name) else []

    def _nested(self, hook: UsersHook, arguments: tuple[Any, ...]) -> None:
        """Call the module's ``optimizer_step`` for each worker, one within the other.

        So the user's code before the step runs for all workers before an exchange, and the code
        after it for all of them after the exchange, each with its own weights.
        """
        self._nest = Nest(hook, arguments)
        try:
            with self._in_turn(self._present[0] * self.island):
                hook.hook(*arguments)
        finally:
            self._nest = None

    def optimizer_step(self, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the last micro-batch, every worker's own step, and the exchange that is due."""
        nest = self._nest or Nest()
        result = closure()
        workers = self._present
        if nest.hook is not None:
            workers = workers[len(nest.rates) : len(nest.rates) + 1]
            self._turn(workers[0] * self.island)  # the last micro-batch's turn has ended
        output = None
        for worker in workers:
            self._replicas.enter(worker)
            again = _once(result)
            with self._in_turn(worker * self.island), self.settings.own(worker):
                output = self._own_step(self._all_rounds[worker], optimizer, again, *args, **kwargs)
                nest.rates.append(
                    max((float(g["lr"]) for g in optimizer.param_groups), default=0.0)
                )
        if nest.hook is not None and len(nest.rates) < len(self._present):
            with self._in_turn(self._present[len(nest.rates)] * self.island):
                nest.hook.hook(*nest.arguments[:-1], lambda: result)
            return output
        ends = self._ends()
        here = [self._all_rounds[worker] for worker in self._present]
        if ends or here[0].is_due:
            assert self._attached is not None
            self._attached.refuse_unsynchronised()
        pairs = zip(here, nest.rates, strict=True)
        self._together(each.stepped(ends, rate) for each, rate in pairs)
        self._turn(self._process)
        return output

    def _active_rounds(self) -> LocalRounds:
        return self._all_rounds[self.worker]

    def _rests(self) -> bool:
        return self.worker not in self._present or super()._rests()

    def _rested(self) -> None:
        self._passed(self.worker)
        if self._steps_now:
            self._turn(None)

    def figures(self) -> dict[str, float]:
        predicted = {} if self.clock is None else {"predicted_seconds": self.clock.seconds}
        return super().figures() | predicted

    def _exchange_the_rest(self) -> None:
        self._together(self._all_rounds[worker].ending() for worker in self._present)

    def _together(self, waits: Iterable[Waits]) -> None:
        """Run all workers' waits side by side, each at its own weights; end at the first one's."""
        left = list(zip(self._present, waits, strict=True))
        while left:
            for worker, each in list(left):
                self._replicas.enter(worker)
                try:
                    next(each)
                except StopIteration as end:
                    left.remove((worker, each))
                    if not end.value:
                        reset_poisoned(self.optimizers)
        self._replicas.enter(self._present[0])


@dataclass
class Nest:
    """Calls of the module's ``optimizer_step`` for one worker within those for the ones before.

    Attributes:
        hook: the user's, if there is one.
        arguments: of its first call; the last one is the closure.
        rates: learning rates of the workers that have made their steps.
    """

    hook: UsersHook | None = None
    arguments: tuple[Any, ...] = ()
    rates: list[float] = field(default_factory=list)


def _once(result: Any) -> Callable[[], Any]:
    """Return an optimizer's closure after its micro-batches; a second call is an error."""
    left = [result]

    def closure() -> Any:
        if not left:
            raise RuntimeError(
                "The optimizer calls its closure several times, as LBFGS does, which cannot be "
                "simulated: use LocalStepsStrategy with processes, or another optimizer."
            )
        return left.pop()

    return closure


class Exchanges(Single):
    """Carries out what simulated workers exchange, in memory, in the thread that first waits.

    Args:
        workers: their engines.
        ledger: runs the flows, and counts bytes.
        device: of the tensors.
        clock: predicts when they end.

    Attributes:
        of: per worker, its end: an ``Exchanger``.
        here: the ends that take part in this round.
        carried: called with the mean of each bucket.
    """

    def __init__(
        self, workers: Workers, ledger: Ledger, device: torch.device, clock: SimulatedClock
    ) -> None:
        self.workers, self.ledger, self.device = workers, ledger, device
        self.clock = clock
        self.of = [End(self, engine) for engine in workers.engines]
        self.here = self.of
        self.carried: Callable[[Tensor], None] = lambda mean: None

    def carry_out(self) -> None:
        """Run what all workers have sent, and count it as a round; nothing, if it has been.

        Worker 0 may have sent the next already, while the others take over what has been run.
        """
        if not all(end.sent for end in self.here):
            return
        before = self.ledger.communicated
        for same in zip(*(end.sent for end in self.here), strict=True):
            self.ledger.step = self.workers.first.step
            self._run([one.flow for one in same])
            for one in same:
                if one.shapes is not None:  # worker 0 alone has decoded the mean
                    one.result.copy_(same[0].result)
                one.future.set_result(one.result)
            if same[0].shapes is not None:
                self.carried(same[0].result)
        layout = [one.shapes for one in self.here[0].sent if one.shapes is not None]
        for end in self.here:
            end.sent = []
        self.clock.arrive(self.ledger.communicated - before)
        if self.here is self.of:
            self.workers.end_round(layout)
            return
        first = self.here[0].engine
        first.advance()
        for end in self.here[1:]:
            end.engine.advance(decoder=first)

    def _run(self, flows: Sequence[Flow]) -> None:
        """Run flows, and count their bytes; those of a part of the workers among themselves."""
        if len(flows) == len(self.of):
            self.ledger.run(flows, self.device)
            return
        transport = Simulated(len(flows))
        with torch.no_grad():
            transport.run(flows)
        for end, sent in zip(self.here, transport.sent_bytes, strict=True):
            self.ledger.transport.sent_bytes[self.of.index(end)] += sent


class SimulatedMessage:
    """A message of one worker, and the result that it waits for."""

    def __init__(self, flow: Flow, result: Tensor, shapes: Shapes | None) -> None:
        self.flow, self.result, self.shapes = flow, result, shapes
        self.future: torch.futures.Future[Tensor] = torch.futures.Future()


class End(Single):
    """One simulated worker's end of the exchanges."""

    def __init__(self, exchanges: Exchanges, engine: Engine) -> None:
        self._exchanges, self.engine = exchanges, engine
        self.sent: list[SimulatedMessage] = []

    def submit(self, grad: Tensor, shapes: Shapes) -> torch.futures.Future[Tensor]:
        """Send a bucket; its future is complete once every worker has, and one waits."""
        flow = self._exchanges.workers.flow(
            self.engine, grad, shapes, wanted=self.engine.worker == 0
        )
        return self._send(SimulatedMessage(flow, grad, shapes))

    def run(
        self, make: Callable[[], tuple[Flow, Tensor]], result: Tensor
    ) -> torch.futures.Future[Tensor]:
        """Send by a flow of any other kind."""
        return self._send(SimulatedMessage(make()[0], result, None))

    def landed(self) -> None:
        """Nothing waits for weights to be taken over."""

    def end_round(self, common: Sequence[Tensor] | None = None) -> None:
        """Carry out what all have sent; ``common`` need not be compared."""
        self._exchanges.carry_out()

    def check(self) -> None:
        """Nothing runs in the background."""

    def _send(self, sent: SimulatedMessage) -> torch.futures.Future[Tensor]:
        self.sent.append(sent)
        return sent.future


class Replay:
    """Lets simulated workers take part in rounds as the roll of an elastic run says.

    Args:
        roll: of the run, or its file.
        workers: as the user has given it: None.

    Attributes:
        numbers: of the workers, by index.
        present: indices of those that make this step, ascending.

    Raises:
        ValueError: a roll that begins later than the run, or is empty; ``workers`` is given, too.
    """

    def __init__(self, roll: Roll | str, workers: int | None) -> None:
        self._roll = Roll.read(roll) if isinstance(roll, str) else roll
        self.numbers = self._roll.numbers
        if workers is not None or not self._roll or self._roll[0].round:
            refuse(
                f"SimulatedLocalStepsStrategy(workers={workers!r}, roll=a roll of "
                f"{len(self._roll)} rounds): a replay begins with round 0, and its workers are "
                f"those of the roll; leave workers out, and give the rendezvous's file"
            )
        self.present: Sequence[int] = ()

    def begin(
        self,
        rounds: Sequence[LocalRounds],
        engines: Sequence[Engine],
        exchanges: Exchanges,
        optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
    ) -> None:
        """Begin a fit with these workers."""
        self._rounds, self._engines = rounds, engines
        self._exchanges, self._optimizers = exchanges, optimizers
        self.present = [self.numbers.index(number) for number in self._roll[0].members]
        self._heirs: set[int] = set()  # rounds with inherited errors
        self._differs = False
        exchanges.carried = self._compare

    def begin_step(self) -> None:
        """Let those in that come in before this step; choose who makes it.

        Raises:
            RuntimeError: the roll has no round for this step.
        """
        first = self.present[0]
        number, position = self._engines[first].step, self._rounds[first].position
        if number >= len(self._roll):
            raise RuntimeError(
                f"The roll ends with round {len(self._roll) - 1}, and round {number} begins; use "
                f"Trainer(max_steps=...) as in the elastic run."
            )
        record = self._roll[number]
        if number not in self._heirs:
            self._heirs.add(number)
            self._inherit(record)
        begins = number == position == 0  # all have the weights with which the run begins
        come = {n: e for n, e in record.entered.items() if e.position == position and not begins}
        for each, entrance in come.items():
            self._enter(each, entrance)
        late = {n for n, e in record.entered.items() if e.position > position}
        members = [self.numbers.index(n) for n in record.members]
        self.present = [i for i in members if self.numbers[i] not in late]
        for rank, index in enumerate(members):
            engine = self._engines[index]
            engine.worker, engine.workers = rank, len(members)
        self._exchanges.here = [self._exchanges.of[index] for index in members]

    def _compare(self, mean: Tensor) -> None:
        """Warn of the first round with another result than in the elastic run."""
        record = self._roll[self._engines[self.present[0]].step]
        if record.digest and not self._differs and digest_in_words([mean]) != record.digest:
            self._differs = True
            warnings.warn(
                f"From round {record.round} on the replay has other bits than the run. Where "
                f"payloads are gathered a replay has the same bits, if a worker's batch depends on "
                f"strategy.number and global_step only.",
                stacklevel=2,
            )

    def _inherit(self, record: Round) -> None:
        device = self._exchanges.device
        for heir, leavers in record.inherited.items():
            for leaver in leavers:
                there = self._engines[self.numbers.index(leaver)]
                memory, common = there.state_dict()["memory"], there.memory.common
                left = {
                    name: {b: each for b, each in kept.items() if b not in common}
                    for name, kept in memory.items()
                }
                left = each_tensor(left, partial(torch.Tensor.to, device=device))
                self._engines[self.numbers.index(heir)].add_errors(left)

    def _enter(self, number: int, entrance: Entrance) -> None:
        """Let a worker begin at the common weights, as with a donor's snapshot."""
        if entrance.donor == number:
            return
        # A donor may have died before its first round. All members of a round end with its weights.
        before = self._roll[entrance.round - 1].members if entrance.round else (entrance.donor,)
        there = [n for n in before if n == entrance.donor] + [n for n in before if n != number]
        index, donor = self.numbers.index(number), self.numbers.index(there[0])
        with self._rounds[donor].present():
            tree = each_tensor(
                snapshot_of(self._rounds[donor], self._engines[donor]), torch.Tensor.clone
            )
        rounds, kept = self._rounds[index], entrance.error == "kept"
        with rounds.present():
            load_snapshot(tree, rounds, self._engines[index], keep_error=kept)
            rounds.skip(entrance.position)
            for optimizer in self._optimizers():
                optimizer.state.clear()


class Replicas:
    """Gives a module and its optimizers the tensors of one worker at a time.

    The module's tensors are pointed at the worker's own; nothing is copied. Costs W times weights,
    gradients and optimizer state, of optimizers that others hold too. If a worker registers a
    buffer, the next one gets a copy.

    Args:
        module: its weights and buffers are what all workers start with.
        workers: W.
        optimizers: returns them, once they exist.

    Attributes:
        present: the worker that has its weights in the module.
    """

    def __init__(
        self,
        module: nn.Module,
        workers: int,
        optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
    ) -> None:
        self._module = module
        self._params = list(module.parameters())
        self._find = optimizers
        here = {name: each.data for name, each in self._tensors().items()}
        others = ({n: each.clone() for n, each in here.items()} for _ in range(1, workers))
        self._own = [here, *others]
        self._states: list[list[Any]] = [[] for _ in range(workers)]
        self._grads: list[list[Tensor | None]] = []
        self.forget_gradients()
        self.present = 0

    def enter(self, worker: int) -> None:
        """Give module and optimizers this worker's tensors, gradients among them."""
        optimizers, tensors = self._optimizers(), self._tensors()
        self._own[self.present] = {name: each.data for name, each in tensors.items()}
        self._grads[self.present] = [param.grad for param in self._params]
        self._states[self.present] = [each.state for each in optimizers]
        for name, tensor in tensors.items():
            own = self._own[worker].get(name)
            if own is None or own.dtype != tensor.dtype:
                own = tensor.data.clone()
            tensor.data = own
        for param, grad in zip(self._params, self._grads[worker], strict=True):
            param.grad = grad
        states = self._states[worker] or [defaultdict(dict) for _ in optimizers]
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.state = state
        self.present = worker

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [part for each in self._find() for part in with_held(each)]

    def share(self) -> None:
        """Give all workers copies of the weights and buffers of the one that is present."""
        for worker in range(len(self._own)):
            if worker != self.present:
                self._own[worker] = {n: each.data.clone() for n, each in self._tensors().items()}

    def _tensors(self) -> dict[str, Tensor]:
        """Return weights and buffers by name; to these a module may assign new tensors."""
        params = {str(index): param for index, param in enumerate(self._params)}
        return params | dict(self._module.named_buffers())

    def forget_gradients(self) -> None:
        """Set the gradients of all workers that are not present to None."""
        self._grads = [[None] * len(self._params) for _ in self._own]
