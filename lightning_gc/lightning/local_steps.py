"""LocalSteps: workers train alone for H steps, then exchange, compressed, how far they have come.

Joined with the ``DDPStrategy`` of either package in ``for_pytorch_lightning.py`` and
``for_lightning.py``.
"""

from collections.abc import Callable
from typing import Any, Literal

from torch.nn.parallel import DistributedDataParallel

from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.size_switch import MIN_NUMEL
from lightning_gc.controllers import Controller
from lightning_gc.exchange import Synchronizer
from lightning_gc.exchange.peers import broadcast_all, take_over
from lightning_gc.exchange.validation import digest_of
from lightning_gc.exchange.verification import Verify, verification
from lightning_gc.lightning.arguments import changed, refuse_unknown, refuse_wrapper_arguments
from lightning_gc.lightning.local_hooks import LocalHooks
from lightning_gc.lightning.local_settings import refuse_in_trainer
from lightning_gc.lightning.real_worker import RealWorker
from lightning_gc.lightning.workarounds import broadcast_only
from lightning_gc.local_steps import GrowingRounds, OuterSGD
from lightning_gc.local_steps.local_rounds import LocalRounds, finished
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme


class LocalSteps(LocalHooks, RealWorker):
    """Data-parallel training whose workers exchange compressed weights every H steps.

    Use it as ``Trainer(strategy=LocalStepsStrategy(QSGD(bits=4), every=32))``; the LightningModule
    need not change. Each worker makes H optimizer steps with its own gradients. Then its distance
    from the common weights, ``Δ_i = θ − θ_i``, is compressed with error feedback and averaged like
    a gradient, ``outer`` makes a step of the common weights with the mean, and all go on from
    there. With H = 1, plain SGD and the default ``outer`` this is ``CompressedDDPStrategy`` with
    ``ErrorFeedback(lr_aware=True)``. There is no ``DistributedDataParallel`` wrapper, so unused
    parameters and sparse gradients need no settings.

    Validation, test and the ``state_dict`` of checkpoints see the common weights; buffers with
    floating point, such as running statistics, are averaged with each exchange, and so are
    parameters that are not trained once they change, as a mean teacher's do. Gradients are clipped
    by each worker for itself. Optimizers keep their state per worker.

    Args:
        compressor: as for ``CompressedDDPStrategy``, like the next three. ``Identity()`` sends all.
        memory: the error feedback rule, of differences of weights.
        scheme: how payloads become a mean.
        controller: chooses levels, epoch by epoch.
        every: H, in optimizer steps, at least 1. More sends less, and lets workers drift apart. The
            last round of a fit is shorter. ``GrowingRounds(alpha)``: H grows as the learning rate
            falls.
        outer: the step of the common weights; the default averages the workers' weights.
        delay: steps of overlap, fewer than between two exchanges. 0: workers wait. Else training
            goes on during the exchange, and its result is taken over so many steps later.
        merge: with a delay, how. ``"rebase"``: the new common weights, plus how far the worker has
            come since it has sent. ``"mix"``: the mean of these and its own weights.
        fragments: P. Parameters are exchanged in so many parts, one after the other, each every H
            steps: smaller messages, more evenly spread.
        show: ``"common"``: validation and test see the common weights. ``"local"``: worker i's own.
        seed: of the compressor's private random numbers, equal on all workers.
        state: in checkpoints. ``"full"``: every worker's weights, optimizers and errors, in its own
            file in the folder ``lightning_gc_state`` beside the checkpoint; runs resume bit for
            bit, also within a round. ``"mean"``: the means over workers of their weights and
            errors, in the checkpoint itself, with worker 0's optimizers. ``"off"``: the common
            weights only; a run resumes at the last exchange.
        state_dtype: of errors in files, ``"float32"`` or ``"bfloat16"``.
        verify: n: in every n-th exchange workers compare their means, and for n > 1 the common
            weights; as for ``CompressedDDPStrategy``.
        min_numel: as for ``CompressedDDPStrategy``.
        ddp_kwargs: as for Lightning's ``DDPStrategy``, but not what is for its wrapper:
            ``start_method``, ``process_group_backend``, ``timeout``, ...

    Communication pattern:
        Nothing between exchanges. Every H steps one exchange of the compressor's for each fragment,
        in one message per request, and an all-reduce of these buffers, on a background thread;
        without a delay workers wait for it. A dead peer is noticed at the next exchange. Lightning
        2.6 broadcasts before each batch whether worker 0 has got SIGTERM; here, once a round.

    Raises:
        ValueError: what ``CompressedDDPStrategy`` refuses; a compressor whose workers vote, a
            memory that reads learning rates or weights, momentum both in memory and ``outer``, a
            controller that computes with gradients, arguments for a DDP wrapper; at fit start,
            manual optimization, ``SyncBatchNorm``, callbacks that average weights or prune,
            ``ZeroRedundancyOptimizer``; in the first step, any optimizer that communicates.
        RuntimeError: after ten lost rounds in a row; a parameter that was unfrozen, added or
            replaced after the fit began.

    Warns:
        UserWarning: a round whose result is not finite: its steps are lost on all workers, errors
            are as before. A sparsifier with fewer rounds than 1/density; a plateau scheduler whose
            metric differs between workers.

    Example:
        >>> from lightning_gc import LocalStepsStrategy, TopK
        >>> strategy = LocalStepsStrategy(TopK(density=0.03), every=8)
        >>> strategy.memory.decay, strategy.outer
        (1.0, OuterSGD(lr=1.0, momentum=0.0, nesterov=False))

    Reference:
        Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.
        Basu, Data, Karakus and Diggavi, "Qsparse-local-SGD", NeurIPS 2019.
        Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.

    Attributes:
        engine: state and configuration, once fitting has started; kept between fits.
        recording: the byte and time account of this worker, while fitting.
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
        seed: int = 0,
        state: Literal["full", "mean", "off"] = "full",
        state_dtype: Literal["float32", "bfloat16"] = "float32",
        verify: Verify = 0,
        min_numel: int = MIN_NUMEL,
        **ddp_kwargs: Any,
    ) -> None:
        owner = "LocalStepsStrategy"
        given = changed(type(self), ddp_kwargs, DistributedDataParallel.__init__)
        refuse_wrapper_arguments(owner, given)
        refuse_unknown(type(self), compressor, given)
        self._configure(compressor, memory, scheme, controller, seed, state, state_dtype, min_numel)
        self._configure_rounds(every, outer, delay, merge, fragments, show, state)
        verification(verify, owner)
        self.verify = verify
        self._broadcast_each_batch: Callable[[], None] = _nothing
        super().__init__(**ddp_kwargs)

    def configure_ddp(self) -> None:
        """Let all workers start alike, and start the synchronizer; there is no wrapper."""
        module = self.model
        trainer = self.lightning_module.trainer
        refuse_in_trainer(type(self).__name__, trainer, module)
        self.local_workers.name(module)
        self._close()
        self._failed = False
        every = {
            n: tuple(t.shape) for n, t in (*module.named_parameters(), *module.named_buffers())
        }
        self._synchronizer = Synchronizer(
            self.local_workers,
            self.root_device,
            timeout=self._timeout,
            revocable=True,
            agreed={
                "controller": repr(self.controller),
                "plan": repr(self.plan),
                "outer": repr(self.outer),
                "names and shapes of parameters and buffers": digest_of(every),
            },
            verify=self.verify,
        )
        take_over(module)
        workers, exchanger = self.local_workers, self._synchronizer
        rounds = LocalRounds(module, workers.names, workers.first, exchanger, self.plan, self.outer)
        self._keep([rounds])
        self._on_engines_ready()
        self._broadcast_each_batch = broadcast_only(lambda: rounds.position == 0, trainer)

    def _start_alike(self) -> None:
        assert self._rounds is not None
        buffers = self._rounds.weights.buffers.alike(self.root_device)
        broadcast_all((*self.lightning_module.parameters(), *buffers))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Make this worker's own step; exchange if a round is over, or the run."""
        output = self._own_step(*args, **kwargs)
        assert self._rounds is not None
        with self._stopping_with_peers():
            if not finished(self._stepped(self._rounds)):
                self._reset_poisoned()
        return output

    def _exchange_the_rest(self) -> None:
        assert self._rounds is not None
        finished(self._rounds.ending())

    def teardown(self) -> None:
        super().teardown()
        self._broadcast_each_batch()
        self._broadcast_each_batch = _nothing  # a closure could not be sent to a process


def _nothing() -> None:
    """Undo nothing."""
