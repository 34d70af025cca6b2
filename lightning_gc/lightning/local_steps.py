"""LocalSteps: local SGD; workers exchange compressed differences of weights every H steps.

Joined with the ``DDPStrategy`` of either package in ``for_pytorch_lightning.py`` and
``for_lightning.py``.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from lightning_gc.attachment.attached import AttachedRounds
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.size_switch import MIN_NUMEL
from lightning_gc.control.control_loop import Moment
from lightning_gc.control.training_progress import steps_of
from lightning_gc.controllers import Controller
from lightning_gc.exchange.peers import broadcast_all
from lightning_gc.exchange.verification import Verify, verification
from lightning_gc.lightning.arguments import changed, refuse_unknown, refuse_wrapper_arguments
from lightning_gc.lightning.base import CompressedStrategy, RealWorker
from lightning_gc.lightning.workarounds import FirstCallback, broadcast_only
from lightning_gc.local_steps import GrowingRounds, OuterSGD, Unequal
from lightning_gc.local_steps.local_rounds import (
    CommonState,
    LocalRounds,
    MeanDrift,
    OwnState,
    Waits,
    finished,
)
from lightning_gc.local_steps.refusals import (
    FirstStep,
    check_rounds,
    check_unequal,
    refuse_communicating,
    refuse_grace,
    refuse_in_trainer,
    refuse_settings,
)
from lightning_gc.local_steps.round_plan import Outer, RoundPlan
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme

_NAME = "local_steps"


class LocalHooks(CompressedStrategy):
    """Mixin: what validation, checkpoints, controllers and the monitor see of local steps.

    Attributes:
        plan: when what is exchanged.
        outer: the step of the common weights.
        unequal: how unequal workers share a round, or None.
    """

    _all_rounds: Sequence[LocalRounds] = ()
    """Rounds of this process's workers, while fitting. Between steps the module is the first's."""
    _first_callback: type[FirstCallback]
    _first: FirstCallback | None = None
    _first_step: FirstStep
    _exchanges_rounds = True
    _paused: Sequence[float] = ()

    def _configure_rounds(
        self,
        every: int | GrowingRounds,
        outer: Outer,
        delay: int,
        merge: Literal["rebase", "mix"],
        fragments: int,
        show: Literal["common", "local"],
        state: str,
        unequal: Unequal | None,
    ) -> None:
        owner = type(self).__name__
        refuse_settings(owner, self.compressor, self.memory, self.controller, outer)
        if show not in ("common", "local"):
            raise ValueError(f"{owner}(show={show!r}): use 'common' or 'local'.")
        self.plan = RoundPlan.of(owner, every, fragments, delay, merge)
        check_rounds(owner, self.plan, self.controller)
        check_unequal(owner, self.plan, unequal)
        self.outer, self.show, self.unequal = outer, show, unequal
        self._keeps_mean = state == "mean"
        self.local_workers.exchanged = "weights"

    def _keep(self, rounds: Sequence[LocalRounds]) -> None:
        """Begin a fit with these rounds, and let checkpoints keep them."""
        workers = self.local_workers
        before = workers.common.get(_NAME)
        self._all_rounds = workers.rounds = rounds
        self._first_step = FirstStep(type(self).__name__)
        workers.common[_NAME] = CommonState(rounds)
        if before is not None:  # an earlier fit's outer momentum
            state = before.common_state() | {"since": [], "anchor": {}}
            workers.common[_NAME].load_common_state(state)
        self._own = [OwnState(each, lambda: self.optimizers, self._scaler) for each in rounds]
        workers.own[_NAME] = self._own
        if self._keeps_mean:
            workers.kept[_NAME] = [MeanDrift(each) for each in rounds]
        self._first = self._first_callback(self._show_common, self._end_rounds)
        self._first.join(self.lightning_module.trainer)

    @property
    def _rounds(self) -> LocalRounds | None:
        return self._all_rounds[0] if self._all_rounds else None

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        refuse_communicating(type(self).__name__, self.optimizers)

    def _active_rounds(self) -> LocalRounds:
        """Return the rounds of the worker whose batch is running."""
        return self._all_rounds[0]

    def _rests(self) -> bool:
        return bool(self._all_rounds) and self._active_rounds().rests

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass, and count the batch's tokens if rounds are weighted by them."""
        output = super().training_step(*args, **kwargs)
        if self.unequal is not None and self.unequal.weigh == "tokens" and not self._rests():
            self._active_rounds().share.count(tokens_of(self.lightning_module, args[0]))
        return output

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self._rests():
            loss: torch.Tensor = super().backward(closure_loss, *args, **kwargs)
            return loss
        self._rested()
        return closure_loss

    def _rested(self) -> None:
        """Note that a worker has skipped a batch."""

    def _own_step(
        self, rounds: LocalRounds, optimizer: Any, closure: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Make a worker's own step; refuse an optimizer whose first one needs other workers."""
        if rounds.rests:
            closure()  # skips its batch, and tells Lightning that it has run
            return None
        args = (closure, *args)
        if self._first_step.over:
            return super().optimizer_step(optimizer, *args, **kwargs)
        with self._first_step.watched(optimizer):
            return super().optimizer_step(optimizer, *args, **kwargs)

    def _stepped(self, rounds: LocalRounds) -> Waits:
        """Count a worker's step; what is due is exchanged while this runs."""
        trainer = self.lightning_module.trainer
        ends = steps_of(trainer) == trainer.global_step + 1
        if ends or rounds.is_due:
            assert self._attached is not None
            self._attached.refuse_unsynchronised()
        rate = max(float(group["lr"]) for group in self.optimizers[0].param_groups)
        return rounds.stepped(ends, rate)

    def on_train_start(self) -> None:
        """Begin at the module's weights, where a callback has loaded others since ``setup``."""
        super().on_train_start()
        first = self._all_rounds[0]
        if not first.apart and self._on_any(first.weights.moved):
            self._begin_at_loaded()
        if self.controller is None and self.engines[0].worker == 0:
            steps = steps_of(self.lightning_module.trainer)
            warn_of_few_rounds(self.compressor, steps, self.plan.every)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._paused = [each.share.pause() for each in self._all_rounds]
        self._show_common()  # if the first callback has not, as in a search for a learning rate

    def _show_common(self) -> None:
        if self._rounds is not None and self.show == "common":
            self._rounds.weights.show()

    def on_validation_end(self) -> None:
        """Put own weights back, after all callbacks; weights loaded in validation are trained."""
        super().on_validation_end()
        if self._rounds is not None:
            weights = self._rounds.weights
            if self.show == "common" and self._on_any(weights.shown and weights.replaced):
                weights.forget()
                self._begin_at_loaded()
            weights.hide()
            warn_of_unlike_rates(self.lightning_module.trainer, self.lr_scheduler_configs)
            for rounds, paused in zip(self._all_rounds, self._paused, strict=False):
                rounds.share.go_on(paused)

    def on_train_end(self) -> None:
        """End with common weights, or with worker 0's weights if a callback has loaded others.

        The last exchange already ran in ``FirstCallback``, before other callbacks load weights.
        """
        super().on_train_end()
        self._end_rounds()
        if self._on_any(self._all_rounds[0].weights.moved):
            self._begin_at_loaded()

    def _end_rounds(self) -> None:
        """Exchange what is left, where the length of the run was not known before."""
        if self._on_any(self._all_rounds[0].apart):
            self._exchange_the_rest()

    def _exchange_the_rest(self) -> None:
        """End the round of each worker of this process now."""
        raise NotImplementedError

    def _begin_at_loaded(self) -> None:
        """Let all workers go on from worker 0's weights, as others have been loaded."""
        self._arrive()
        self._start_alike()
        weights, buffers = self._all_rounds[0].weights.held()
        for rounds in self._all_rounds:
            with rounds.present():
                rounds.begin(weights, buffers)

    def _on_any(self, is_so: bool) -> bool:
        """Return whether it is so on any worker; all must ask."""
        here = torch.tensor(float(is_so), dtype=torch.float32, device=self.root_device)
        return float(self.reduce(here, reduce_op="mean")) > 0

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the common weights and buffers, as copies."""
        if self._rounds is None:
            return super().lightning_module_state_dict()
        shown = self._rounds.weights.shown
        self._rounds.weights.show()
        try:
            state = super().lightning_module_state_dict()
            return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in state.items()}
        finally:
            if not shown:
                self._rounds.weights.hide()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Wait for an exchange under way, so that what it brings can be saved."""
        if self._rounds is not None and not self.lightning_module.trainer.interrupted:
            self._arrive()
        super().save_checkpoint(*args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Restore each worker's own optimizers where they were saved, else worker 0's."""
        super().load_optimizer_state_dict(checkpoint)
        if self._all_rounds:
            for worker, own in enumerate(self._own):
                if not own.load_optimizers():
                    self._copy_optimizers(checkpoint, worker)

    def _start_alike(self) -> None:
        """Give all workers the weights and buffers of worker 0."""

    def _copy_optimizers(self, checkpoint: Any, worker: int) -> None:
        """Give a worker of this process worker 0's optimizers; Lightning has, to the first one."""

    @property
    def steps_since_exchange(self) -> int:
        return 0 if self._rounds is None else self._rounds.waited

    def figures(self) -> dict[str, float]:
        return {} if self._rounds is None else self._rounds.figures

    def teardown(self) -> None:
        super().teardown()
        if self._first is not None:
            self._first.leave()
        self._first = None
        self._all_rounds = self.local_workers.rounds = ()

    def _arrive(self) -> None:
        """Wait for an exchange under way."""
        for rounds in self._all_rounds:
            rounds.arrive()

    def _moment(self, trainer: Any, batch: int) -> Moment:
        """Return the moment with its steps counted in rounds, as the engine counts."""
        self._arrive()  # levels change between exchanges
        now = super()._moment(trainer, batch)
        every = self.plan.every if self._rounds is None else self._rounds.every
        steps = None if now.total_steps is None else max(now.total_steps // every, 1)
        return dataclasses.replace(now, total_steps=steps, rates_to_come=None)

    def _check_optimizer(self, group: Any) -> None:
        """No check: a memory's momentum acts per round, an optimizer's per step."""

    def _reset_poisoned(self) -> None:
        """Empty the state of optimizers in which something is not finite."""
        for optimizer in self.optimizers:
            kept = (value for state in optimizer.state.values() for value in state.values())
            tensors = (value for value in kept if isinstance(value, torch.Tensor))
            if not all(bool(value.isfinite().all()) for value in tensors):
                optimizer.state.clear()


def tokens_of(module: Any, batch: Any) -> int:
    """Return a batch's tokens as ``module.tokens`` counts them; else its first tensor's elements.

    Raises:
        ValueError: a batch without a tensor.
    """
    if callable(count := getattr(module, "tokens", None)):
        return int(count(batch))
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            return leaf.numel()
    raise ValueError(
        f"Unequal(weigh='tokens'): a batch of type {type(batch).__name__} has no tensor. Define "
        f"tokens(self, batch) in {type(module).__name__}, which returns its number of tokens."
    )


def warn_of_few_rounds(compressor: Compressor, steps: int | None, every: int) -> None:
    """Warn if a sparsifier has so few rounds that it does not send most elements even once."""
    knob = compressor.knob
    if steps is None or knob is None or knob.field != "density" or compressor.level is None:
        return
    rounds = -(-steps // every)
    if rounds * compressor.level < 1:
        share, oftener = math.ceil(100 / rounds) / 100, int(steps * compressor.level)
        if share < 1:
            fix = f"Send a share of {share:g} or more" + (
                f", or exchange oftener, every={oftener} or less" if oftener else ""
            )
        else:  # all in the one round there is: no sparsifier
            smaller = f"every={oftener} or less" if oftener else "a smaller every"
            fix = f"Use a quantiser, such as QSGD(4), {smaller}, or more steps"
        warnings.warn(
            f"{steps} steps with every={every} are {rounds} round{'s' * (rounds > 1)}. Each round "
            f"sends a share of {compressor.level:g} of the elements. So most are never sent, and "
            f"old errors harm training. {fix}.",
            stacklevel=2,
        )


def warn_of_unlike_rates(trainer: Any, schedulers: Iterable[Any]) -> None:
    """Warn if a plateau scheduler watches a metric that each worker has its own value of."""
    watched = {each.monitor for each in schedulers if each.reduce_on_plateau}
    if not watched or trainer.world_size == 1 or trainer._results is None:
        return
    for metric in trainer._results.result_metrics:
        if metric.meta.name in watched and metric.is_tensor and not metric.meta.sync.should:
            warnings.warn(
                f"ReduceLROnPlateau watches {metric.meta.name}, and every worker has another value "
                f"of it, so learning rates may differ; log it with sync_dist=True.",
                stacklevel=2,
            )


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
            ``RadialDirectional`` averages norms and directions separately.
        delay: steps of overlap, fewer than between two exchanges. 0: workers wait. Else training
            goes on during the exchange, and its result is taken over so many steps later.
        merge: with a delay, how. ``"rebase"``: the new common weights, plus how far the worker has
            come since it has sent. ``"mix"``: the mean of these and its own weights.
        fragments: P. Parameters are exchanged in so many parts, one after the other, each every H
            steps: smaller messages, more evenly spread.
        show: ``"common"``: validation and test see the common weights. ``"local"``: worker i's own.
        unequal: how workers that differ in speed, data or health share a round; None: all make H
            steps and count equally.
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
        outer: Outer = OuterSGD(),  # noqa: B008 - frozen
        delay: int = 0,
        merge: Literal["rebase", "mix"] = "rebase",
        fragments: int = 1,
        show: Literal["common", "local"] = "common",
        unequal: Unequal | None = None,
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
        self._configure_rounds(every, outer, delay, merge, fragments, show, state, unequal)
        refuse_grace(owner, unequal)
        verification(verify, owner)
        self.verify = verify
        self._broadcast_each_batch: Callable[[], None] = _nothing
        super().__init__(**ddp_kwargs)

    def configure_ddp(self) -> None:
        """Start the exchange at worker 0's weights, without a wrapper around the module."""
        module = self.model
        trainer = self.lightning_module.trainer
        refuse_in_trainer(type(self).__name__, trainer, module)
        parts = self.plan, self.outer, self.unequal, self._keep
        self._attach(lambda setup: AttachedRounds(module, setup, *parts))
        rounds = self._all_rounds[0]
        self._broadcast_each_batch = broadcast_only(lambda: rounds.position == 0, trainer)

    def _start_alike(self) -> None:
        assert self._rounds is not None
        buffers = self._rounds.weights.buffers.alike(self.root_device)
        broadcast_all((*self.lightning_module.parameters(), *buffers))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Make this worker's own step; exchange if a round is over, or the run."""
        assert self._rounds is not None
        output = self._own_step(self._rounds, *args, **kwargs)
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
