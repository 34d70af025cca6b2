"""SimulatedDDP: DDP of W workers on one device, by gradient accumulation."""

from typing import Any, Literal

from lightning_gc.compressors import Compressor
from lightning_gc.controllers import Controller
from lightning_gc.memories import Memory
from lightning_gc.network_model import NetworkModel
from lightning_gc.schemes import Scheme
from lightning_gc.strategies.simulation.module_buffers import Buffers, refuse_pass_for_statistics
from lightning_gc.strategies.simulation.simulated_workers import SimulatedWorkers
from lightning_gc.strategies.simulation.worker_gradients import Gradients


class SimulatedDDP(SimulatedWorkers):
    """DDP of W workers, simulated on one device by accumulating gradients over W micro-batches.

    Use it as ``Trainer(devices=1, strategy=SimulatedDDPStrategy(TopK(density=0.01), workers=4))``;
    the LightningModule need not change. Every worker has its own share of the data, its own errors
    and byte count, and exchanges gradients by the same code as a real one. The mean gradient is
    that of ``CompressedDDPStrategy`` with W processes: bit for bit where payloads are gathered, up
    to the rounding of sums where they are all-reduced.

    A step takes W micro-batches, the i-th being worker i's. The Trainer's
    ``accumulate_grad_batches`` is set to W during the fit; ``k·W`` from the user means k
    accumulated micro-batches per worker. ``limit_train_batches``, ``val_check_interval`` and counts
    in checkpoints are batches of one worker, as in a real run.

    Args:
        compressor: as for ``CompressedDDPStrategy``, like the next three.
        memory: the error feedback rule.
        scheme: how payloads become a mean.
        controller: chooses levels, epoch by epoch.
        workers: W, the number of simulated workers.
        network: converts bytes to the seconds that ``CompressionMonitor`` shows.
        seed: of the compressor's private random numbers.
        state: errors in checkpoints; the same files as real workers write, so that a simulated run
            can resume as a real one and vice versa.
        state_dtype: of errors in these files.
        kwargs: as for ``SingleDeviceStrategy``: ``device`` (default: the Trainer's),
            ``checkpoint_io``, ``precision_plugin``, ...

    Communication pattern:
        None: requests are fulfilled in memory, for all workers at once.

    Raises:
        ValueError: a combination that cannot work, an unknown name, fewer than one worker; at fit
            start, manual optimization, several devices, one that is neither ``cpu`` nor ``cuda``,
            ``accumulate_grad_batches`` that W does not divide, a ``GradientAccumulationScheduler``,
            ``StochasticWeightAveraging`` of a model with batch normalisation, sparse embedding
            gradients, ``SyncBatchNorm``.
        RuntimeError: a collective, such as ``self.all_gather``, called by the user within a step.

    Warns:
        UserWarning: one worker, whose gradients are compressed like those of several, for nothing;
            code that reads ``trainer.world_size``, which is 1.

    Example:
        >>> from lightning_gc import NetworkModel, SimulatedDDPStrategy, TopK
        >>> strategy = SimulatedDDPStrategy(TopK(density=0.01), workers=4)
        >>> strategy.memory, strategy.workers, strategy.network.topology
        (Residual(decay=1.0, lr_aware=False, gain=1.0), 4, 'parameter_server')

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
        self._gradients: Gradients | None = None
        super().__init__(**kwargs)

    _of_processes = "CompressedDDPStrategy"
    _for_norms = (
        "Use CompressedDDPStrategy with processes, or BatchNorm with statistics of each worker."
    )

    def setup(self, trainer: Any) -> None:
        if trainer.state.fn == "fit":
            refuse_pass_for_statistics(trainer, self.lightning_module)
        super().setup(trainer)

    def _begin_fit(self, module: Any) -> None:
        self._gradients = Gradients(self.names, self.workers)
        self._buffers = Buffers(module, self.workers)
        self.local_workers.start(self._ledger.pages, revocable=self._scaler() is not None)

    def _begin_step(self) -> None:
        self._buffers.begin()

    def _enter(self, worker: int) -> None:
        self._buffers.enter(worker)

    def _lend(self, worker: int, first: bool) -> None:
        assert self._gradients is not None
        if first:
            self._gradients.begin()
        self._gradients.lend(worker)

    def _collect(self, worker: int, again: bool) -> None:
        assert self._gradients is not None
        self._gradients.collect(worker)
        self._buffers.leave(worker, again)

    def _complete(self) -> None:
        """Replace the workers' gradients by their mean."""
        assert self._gradients is not None
        self._refuse_unsynchronised()
        self._prepare_round()
        for part in self._gradients.parts:
            flows = [  # the mean is the same for all, so only worker 0 decodes it
                self.local_workers.flow(engine, flat, part.shapes, wanted=engine.worker == 0)
                for engine, flat in zip(self.engines, part.flats, strict=True)
            ]
            self._ledger.step = self.engines[0].step
            self._ledger.run(flows, self.root_device)  # type: ignore[attr-defined]
        self.local_workers.end_round(part.shapes for part in self._gradients.parts)
        self._gradients.end()
        self._buffers.enter(0)

    def teardown(self) -> None:
        if self._gradients is not None:
            self._gradients.close()
        self._gradients = None
        super().teardown()
