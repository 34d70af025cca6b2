"""SimulatedLocalSteps: W workers with local steps on one device, by turns."""

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

from lightning_gc.compressors import Compressor
from lightning_gc.controllers import Controller
from lightning_gc.local_steps import GrowingRounds, OuterSGD
from lightning_gc.memories import Memory
from lightning_gc.network_model import NetworkModel
from lightning_gc.schemes import Scheme
from lightning_gc.strategies.local_hooks import LocalHooks
from lightning_gc.strategies.local_settings import refuse_in_trainer
from lightning_gc.strategies.simulation.exchanges import Exchanges
from lightning_gc.strategies.simulation.replicas import Replicas
from lightning_gc.strategies.simulation.simulated_workers import SimulatedWorkers
from lightning_gc.synchronizer.local_rounds import LocalRounds, Waits


class SimulatedLocalSteps(LocalHooks, SimulatedWorkers):
    """Local steps of W workers, simulated on one device, each with its own weights and optimizer.

    Use it as ``Trainer(devices=1, strategy=SimulatedLocalStepsStrategy(QSGD(4), workers=4,
    every=8))``; the LightningModule need not change. Every worker has its own share of the data,
    weights, buffers, optimizer state and errors, and exchanges by the same code as a real one: the
    weights are those of ``LocalStepsStrategy`` with W processes, bit for bit where payloads are
    gathered.

    A step takes W micro-batches, the i-th being worker i's, as with ``SimulatedDDPStrategy``; then
    each worker makes its step. ``on_before_optimizer_step`` and clipping run W times, once at each
    worker's gradients and weights. Between steps module and optimizers are worker 0's.

    Costs W times weights, gradients, optimizer state, common weights and errors.

    Args:
        compressor: as for ``LocalStepsStrategy``, like the next ten.
        memory: the error feedback rule, of differences of weights.
        scheme: how payloads become a mean.
        controller: chooses levels, epoch by epoch.
        every: H, in optimizer steps.
        outer: the step of the common weights.
        delay: steps between an exchange and its effect.
        merge: with a delay, how the result is taken over.
        fragments: P.
        show: what validation and test see.
        workers: W, the number of simulated workers.
        network: converts bytes to the seconds that ``CompressionMonitor`` shows.
        seed: of the compressor's private random numbers.
        state: in checkpoints; the same files as real workers write, so that a simulated run can
            resume as a real one and vice versa.
        state_dtype: of errors in these files.
        kwargs: as for ``SingleDeviceStrategy``.

    Communication pattern:
        None: requests are fulfilled in memory, for all workers at once.

    Raises:
        ValueError: what ``LocalStepsStrategy`` or ``SimulatedDDPStrategy`` refuses; at fit start, a
            loss scaler, as with ``precision="16-mixed"``.
        RuntimeError: an optimizer that calls its closure several times; a collective, such as
            ``self.all_gather``, called by the user within a step.

    Example:
        >>> from lightning_gc import QSGD, SimulatedLocalStepsStrategy
        >>> strategy = SimulatedLocalStepsStrategy(QSGD(bits=4), workers=4, every=8)
        >>> strategy.workers, strategy.plan.every
        (4, 8)

    Attributes:
        workers: W.
        engines: each worker's state and configuration, once fitting has started.
        recordings: each worker's byte and time account, while fitting.
    """

    def __init__(
        self,
        compressor: Compressor | str,
        memory: Memory | str | None = None,
        scheme: Scheme | str | None = None,
        controller: Controller | None = None,
        every: int | GrowingRounds = 32,
        outer: OuterSGD = OuterSGD(),  # noqa: B008 - frozen
        delay: int = 0,
        merge: Literal["rebase", "mix"] = "rebase",
        fragments: int = 1,
        show: Literal["common", "local"] = "common",
        *,
        workers: int,
        network: NetworkModel = NetworkModel(),  # noqa: B008 - frozen
        seed: int = 0,
        state: Literal["full", "mean", "off"] = "full",
        state_dtype: Literal["float32", "bfloat16"] = "float32",
        **kwargs: Any,
    ) -> None:
        self._configure_workers(compressor, workers, network, kwargs)
        self._configure(compressor, memory, scheme, controller, seed, state, state_dtype)
        self._configure_rounds(every, outer, delay, merge, fragments, show, state)
        super().__init__(**kwargs)

    _of_processes = "LocalStepsStrategy"
    _for_norms = "Use BatchNorm: its running statistics are averaged with each exchange."

    def _begin_fit(self, module: Any) -> None:
        refuse_in_trainer(type(self).__name__, module.trainer, module)
        if self._scaler() is not None:
            raise ValueError(
                f"{type(self).__name__}: every worker needs a loss scaler of its own, and the "
                f"Trainer has one. Use precision='bf16-mixed', or {self._of_processes} with "
                f"processes."
            )
        workers = self.local_workers
        workers.start(self._ledger.pages, revocable=True)
        exchanges = Exchanges(workers, self._ledger, self.root_device)  # type: ignore[attr-defined]
        self._replicas = Replicas(module, self.workers, lambda: self.optimizers)  # type: ignore[attr-defined]
        rounds = []
        for engine, end in zip(self.engines, exchanges.of, strict=True):
            present = partial(self._replicas.entered, engine.worker)
            each = (module, workers.names, engine, end, self.plan, self.outer, present)
            rounds.append(LocalRounds(*each))
        self._keep(rounds)

    def _start_alike(self) -> None:
        self._replicas.share()

    def _copy_optimizers(self, checkpoint: Any, worker: int) -> None:
        with self._replicas.entered(worker):
            pairs = zip(self.optimizers, checkpoint["optimizer_states"], strict=True)  # type: ignore[attr-defined]
            for optimizer, state in pairs:
                optimizer.load_state_dict(state)

    def _begin_step(self) -> None:
        self._replicas.forget_gradients()

    def _enter(self, worker: int) -> None:
        self._replicas.enter(worker)

    def optimizer_step(self, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the last micro-batch; let every worker make its own step; exchange what is due."""
        result, output = closure(), None
        for worker in range(self.workers):
            self._replicas.enter(worker)
            again = _Once(result)
            output = self._own_step(optimizer, again, *args, **kwargs)
        self._together(self._stepped(each) for each in self._all_rounds)
        return output

    def _exchange_the_rest(self) -> None:
        self._together(each.ending() for each in self._all_rounds)

    def _together(self, waits: Iterable[Waits]) -> None:
        """Run all workers' waits side by side, each at its own weights; end at worker 0's."""
        left = list(enumerate(waits))
        while left:
            for worker, each in list(left):
                self._replicas.enter(worker)
                try:
                    next(each)
                except StopIteration as end:
                    left.remove((worker, each))
                    if not end.value:
                        self._reset_poisoned()
        self._replicas.enter(0)


class _Once:
    """Closure of an optimizer whose micro-batches have been run; a second call is an error."""

    def __init__(self, result: Any) -> None:
        self.result, self.called = result, False

    def __call__(self) -> Any:
        if self.called:
            raise RuntimeError(
                "The optimizer calls its closure several times, as LBFGS does, which cannot be "
                "simulated: use LocalStepsStrategy with processes, or another optimizer."
            )
        self.called = True
        return self.result
