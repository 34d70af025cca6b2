"""SimulatedDDP: DDP of W workers on one device, by gradient accumulation."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_gc.checkpoint.side_file_store import Kept
from lightning_gc.compressors import Compressor
from lightning_gc.controllers import Controller
from lightning_gc.core.refusal import refuse
from lightning_gc.core.settings import takes_fields
from lightning_gc.exchange import Compression
from lightning_gc.lightning.arguments import SimulatedFields
from lightning_gc.lightning.simulation.simulated_workers import SimulatedWorkers
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.transports.network_model import NetworkModel


@takes_fields(Compression, Kept)
class SimulatedDDP(SimulatedWorkers):
    """DDP of W workers, simulated on one device by accumulating gradients over W micro-batches.

    Use it as ``Trainer(devices=1, strategy=SimulatedDDPStrategy(TopK(density=0.01), workers=4))``;
    the LightningModule need not change. Every worker has its own share of the data, its own errors
    and byte count, and exchanges gradients by the same code as a real one. The mean gradient equals
    ``CompressedDDPStrategy``'s with W processes: bit for bit where payloads are gathered, up to the
    rounding of sums where they are all-reduced.

    A step takes W micro-batches, the i-th being worker i's. The Trainer's
    ``accumulate_grad_batches`` is set to W during the fit; ``k·W`` from the user means k
    accumulated micro-batches per worker. ``limit_train_batches``, ``val_check_interval`` and counts
    in checkpoints are batches of one worker, as in a real run.

    Args:
        workers: W, the number of simulated workers.
        network: converts bytes to the seconds that ``CompressionMonitor`` shows; or a rate, such
            as ``"1gbit"``.
        state: errors in checkpoints; the same files as real workers write, so that a simulated run
            can resume as a real one and vice versa.
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
        UserWarning: one worker: gradients are compressed, but nothing is sent;
            code that reads ``trainer.world_size``, which is 1.

    Example:
        >>> from lightning_gc import NetworkModel, SimulatedDDPStrategy, TopK
        >>> strategy = SimulatedDDPStrategy(TopK(density=0.01), workers=4)
        >>> strategy.memory, strategy.workers, strategy.network.topology
        (ErrorFeedback(decay=1.0, lr_aware=False, gain=1.0), 4, 'parameter_server')

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
        controller: Controller | str | None = None,
        *,
        workers: int,
        network: NetworkModel | str = NetworkModel(),  # noqa: B008 - frozen
        **kwargs: Unpack[SimulatedFields],
    ) -> None:
        self._gradients: Gradients | None = None
        self._seen: dict[str, int] = {}
        parts = compressor, memory, scheme, controller
        super().__init__(*parts, workers=workers, network=network, **kwargs)

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
        self._buffers = WorkerBuffers(module, self.workers)

    def _moved_by_hand(self) -> dict[str, Tensor]:
        named = self.lightning_module.named_parameters()
        return {name: each for name, each in named if each not in self.names}

    def _turn(self, process: int | None) -> None:
        """Look whether a turn has changed trained weights, which all workers share."""
        now = {name: param._version for param, name in self.names.items()}
        if self._process is not None and process != self._process:
            for name in (each for each, version in now.items() if version != self._seen[each]):
                self._say_once(
                    "the parameters",
                    name,
                    "is changed by hand within a worker's micro-batch, so once for each "
                    f"of {self.workers} workers, where real workers change it once a step",
                )
        self._seen = now
        super()._turn(process)

    @contextmanager
    def _acting(self, process: int) -> Iterator[None]:
        """Let a worker have its own buffers too; only worker 0's are kept."""
        self._buffers.enter(process)
        with super()._acting(process):
            yield
        if process == 0:
            self._buffers.leave(0, again=False)
        elif process == self.workers - 1:
            self._buffers.enter(0)

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
        self._buffers.leave(worker, again or bool(self._hooks))

    def _complete(self) -> None:
        """Replace the workers' gradients by their mean."""
        assert self._gradients is not None
        assert self._attached is not None
        self._attached.refuse_unsynchronised()
        self._attached.prepare_round()
        for bucket in self._gradients.buckets:
            flows = [  # the mean is the same for all, so only worker 0 decodes it
                self.local_workers.flow(engine, flat, bucket.shapes, wanted=engine.worker == 0)
                for engine, flat in zip(self.engines, bucket.flats, strict=True)
            ]
            self._ledger.step = self.engines[0].step
            self._ledger.run(flows, self.root_device)
        self.local_workers.end_round(bucket.shapes for bucket in self._gradients.buckets)
        self._gradients.end()
        self._buffers.enter(0)

    def teardown(self) -> None:
        if self._gradients is not None:
            self._gradients.close()
        self._gradients = None
        super().teardown()


def refuse_pass_for_statistics(trainer: Any, module: Any) -> None:
    """Raise ValueError if Lightning will add an epoch without backward passes after training.

    It does so for averaged weights, to collect the running statistics of batch normalisation.
    """
    norms = [name for name, part in module.named_modules() if isinstance(part, _BatchNorm)]
    for callback in trainer.callbacks:
        averages = "StochasticWeightAveraging" in {c.__name__ for c in type(callback).__mro__}
        if averages and norms:
            refuse(
                f"{type(callback).__name__} collects the running statistics of {norms[0]} in an "
                f"epoch without backward passes, in which simulated workers cannot take turns. Use "
                f"CompressedDDPStrategy with processes, or a normalisation without running "
                f"statistics, such as GroupNorm"
            )


class WorkerBuffers:
    """Keeps the module's buffers of every simulated worker as DDP would.

    DDP copies worker 0's buffers to all workers before each step's first forward pass. So all start
    a step with equal buffers, each changes its own, and only worker 0's are kept. All are copied:
    batch normalisation changes buffers without a version count.

    A buffer that one worker registers is also the next one's; one that it resizes is its own, as
    is what else the module knows of it, such as how far a table of positions reaches.

    Args:
        module: its buffers are changed in place; to a name it may assign a new one.
        workers: W.
    """

    def __init__(self, module: nn.Module, workers: int) -> None:
        self._module = module if workers > 1 else nn.Module()
        self._start = self._copies({})
        self._own: dict[int, dict[str, Tensor]] = {}

    @property
    def _live(self) -> dict[str, Tensor]:
        return dict(self._module.named_buffers())

    def begin(self) -> None:
        self._own.clear()
        self._start = self._copies(self._start)

    def enter(self, worker: int) -> None:
        """Load this worker's buffers: before its forward pass; worker 0's at the end of a step."""
        given, live = self._own.get(worker, self._start), self._live
        fits = _copy(given, live)
        for name in given.keys() & live.keys() - set(fits):
            live[name].data = given[name].clone().to(live[name].dtype)  # of another shape

    def leave(self, worker: int, again: bool) -> None:
        """Save this worker's buffers: worker 0's, or if it has another micro-batch (``again``)."""
        if again or worker == 0:
            self._own[worker] = self._copies({})

    def _copies(self, into: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the module's buffers, in the memory of ``into`` where it fits."""
        live = self._live
        fits = _copy(live, into)
        return {n: into[n] if n in fits else live[n].detach().clone() for n in live}


def _copy(values: Mapping[str, Tensor], to: Mapping[str, Tensor]) -> list[str]:
    """Copy by name where shapes and dtypes are equal; return these names."""
    fits = [
        name
        for name, each in to.items()
        if name in values and (values[name].shape, values[name].dtype) == (each.shape, each.dtype)
    ]
    if fits:
        with torch.no_grad():
            torch._foreach_copy_([to[name] for name in fits], [values[name] for name in fits])
    return fits


@dataclass(frozen=True)
class DtypeBucket:
    """Gradients of all parameters of one dtype, exchanged as one bucket.

    Attributes:
        shapes: parameter name -> shape, in the order of registration.
        flats: per worker, its gradients, ``(numel,)``.
    """

    shapes: dict[str, tuple[int, ...]]
    flats: list[Tensor]


class Gradients:
    """Sets ``.grad`` to the flat buffer of the running worker.

    Autograd adds to an existing ``.grad`` in place, so a worker's micro-batches are summed in its
    flat buffer without copies. Costs W gradients of memory. After a round every ``.grad`` is a view
    of worker 0's buffer, until the next round begins.

    Args:
        names: parameter -> name, of all that are trained.
        workers: W.
    """

    def __init__(self, names: Mapping[Tensor, str], workers: int) -> None:
        self.buckets: list[DtypeBucket] = []
        self._views: list[dict[Tensor, Tensor]] = [{} for _ in range(workers)]
        self._before: dict[Tensor, Tensor | None] = {}
        self._used: set[Tensor] = set()
        for dtype in dict.fromkeys(param.dtype for param in names):
            members = [param for param in names if param.dtype == dtype]
            numel = sum(param.numel() for param in members)
            flats = [members[0].new_zeros(numel) for _ in range(workers)]
            for flat, views in zip(flats, self._views, strict=True):
                pieces = flat.split([param.numel() for param in members])
                views |= {p: _like(p, piece) for p, piece in zip(members, pieces, strict=True)}
            shapes = {names[param]: tuple(param.shape) for param in members}
            self.buckets.append(DtypeBucket(shapes, flats))
        self._hooks = [p.register_post_accumulate_grad_hook(self._used.add) for p in names]

    def begin(self) -> None:
        """Start a round: set every worker's gradient to ``.grad``, mostly None, that is, zero."""
        self._used.clear()
        self._before = {param: param.grad for param in self._views[0]}
        kept = {p: grad.clone() for p, grad in self._before.items() if grad is not None}
        for bucket in self.buckets:
            torch._foreach_zero_(bucket.flats)
        for views in self._views:
            for param, grad in kept.items():
                views[param].copy_(grad)

    def lend(self, worker: int) -> None:
        for param, view in self._views[worker].items():
            param.grad = view

    def collect(self, worker: int) -> None:
        """Copy gradients that a backward pass has stored elsewhere, as with ``create_graph``."""
        for param, view in self._views[worker].items():
            if param.grad is not view and param.grad is not None:
                view.copy_(param.grad.detach())

    def end(self) -> None:
        """Set ``.grad`` to the mean; to its old value where unused (``find_unused_parameters``)."""
        for param, view in self._views[0].items():
            param.grad = view if param in self._used else self._before[param]
        self._before = {}

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _like(param: Tensor, flat: Tensor) -> Tensor:
    """Return ``flat`` as a view of the parameter's shape and memory format, as in DDP."""
    return flat.as_strided(param.shape, torch.empty_like(param).stride())
