"""RealLocalSteps: local SGD; workers exchange compressed differences of weights every H steps.

Joined with the ``DDPStrategy`` of either package in ``for_pytorch_lightning.py`` and
``for_lightning.py``.
"""

import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from lightning_gc.attachment import attached_rounds
from lightning_gc.checkpoint.side_file_store import Kept
from lightning_gc.checkpoint.side_files import KEY
from lightning_gc.checkpoint.worker_state import CheckpointParts
from lightning_gc.compressors import Compressor
from lightning_gc.control.control_loop import Moment
from lightning_gc.controllers import Controller
from lightning_gc.core.combinations import judge
from lightning_gc.core.refusal import refuse
from lightning_gc.core.settings import parted, takes_fields
from lightning_gc.elastic.elastic_exchange import ElasticExchange
from lightning_gc.elastic.roll import Roll
from lightning_gc.exchange import Compression
from lightning_gc.exchange.automatic import WITH_LOCAL_STEPS
from lightning_gc.exchange.peers import broadcast_all
from lightning_gc.exchange.synchronizer import leave
from lightning_gc.exchange.workers import reshard
from lightning_gc.lightning import arguments
from lightning_gc.lightning.base import CompressedStrategy, RealWorker
from lightning_gc.lightning.progress import steps_of
from lightning_gc.lightning.workarounds import FirstCallback, broadcast_only, sigterm_exception
from lightning_gc.local_steps import OuterSGD, RoundPlan, refusals
from lightning_gc.local_steps.local_rounds import (
    ROUNDS,
    LocalRounds,
    MeanDrift,
    in_rounds,
    keep,
)
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.sharded.fsdp_units import units_of
from lightning_gc.sharded.sharded_workers import replica_mesh

_LIGHTNING = ("pytorch_lightning.", "lightning.")
"""Where hooks are defined that a module does not override."""


class LocalHooks(CompressedStrategy):
    """Mixin: what validation, checkpoints, controllers and the monitor see of local steps.

    Attributes:
        plan: of the rounds: every setting of local steps.
        show: what validation and test see.
    """

    _all_rounds: Sequence[LocalRounds] = ()
    """Rounds of this process's workers, while fitting. Between steps the module is the first's."""
    _first_callback: type[FirstCallback]
    _first: FirstCallback | None = None
    _own_steps: refusals.OwnSteps | None = None
    _steps_own = False
    """Whether the Trainer's optimizer step is under way, which counts."""
    _way = replace(CompressedStrategy._way, rounds=True, no_choice=WITH_LOCAL_STEPS)
    _paused: Sequence[float] = ()

    def _refuse_trainer(self, trainer: Any, module: Any) -> None:
        """Raise ValueError for settings of Trainer and module that local steps cannot obey."""
        owner = type(self).__name__
        automatic = trainer.lightning_module.automatic_optimization
        judge("LocalSteps and the module", owner, automatic=automatic)
        refusals.refuse_synchronised_norms(owner, module)
        for callback in trainer.callbacks:
            names = {cls.__name__ for cls in type(callback).__mro__}
            judge("LocalSteps and callbacks", owner, names=names, callback=type(callback).__name__)

    def __init__(
        self,
        compressor: Any,
        memory: Any,
        scheme: Any,
        controller: Any,
        *,
        show: Literal["common", "local"] = "common",
        outer: OuterSGD = OuterSGD(),  # noqa: B008 - frozen
        **given: Any,
    ) -> None:
        owner = type(self).__name__
        if show not in ("common", "local"):
            refuse(f"{owner}(show={show!r}): use 'common' or 'local'")
        fields, given = parted(given, RoundPlan)
        plan = RoundPlan(owner=owner, outer=outer, **fields)
        self.show, self.plan = show, plan
        super().__init__(compressor, memory, scheme, plan.controller(controller), **given)
        plan.check(self.compressor, self.memory, self.controller)
        self._keeps_mean, self._keeps_own = self._store.mode == "mean", self._store.mode == "full"
        self.checkpoint_parts.settings["exchanged"] = "weights"

    @property
    def island(self) -> int:
        """N, the processes of each worker."""
        return self.plan.island

    def _keep(self, rounds: Sequence[LocalRounds]) -> None:
        """Begin a fit with these rounds, and let checkpoints keep them."""
        self._all_rounds = rounds
        self._own_steps = refusals.OwnSteps(
            type(self).__name__,
            self.local_workers.names,
            lambda: rounds[0].length * len(rounds),
            self._refuse_outside,
            counted=lambda: self._steps_own,
            fix="Return it from configure_optimizers",
            saved=self._keeps_own,
        )
        self._listen()
        self._own = keep(self.checkpoint_parts, rounds, self._its_optimizers, self._scaler)
        if self._keeps_mean:
            self.checkpoint_parts.kept[ROUNDS] = [MeanDrift(each) for each in rounds]
        if self._first is not None:  # a copy's, of the fit that it was made in
            self._first.leave()
        self._first = self._first_callback(self._show_common, self._end_rounds)
        self._first.join(self.lightning_module.trainer)

    @property
    def _rounds(self) -> LocalRounds | None:
        return self._all_rounds[0] if self._all_rounds else None

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        refusals.refuse_optimizers(type(self).__name__, self.optimizers)
        self._listen()

    def _listen(self) -> None:
        """Hear all optimizer steps: rounds or optimizers are new, whichever were made last."""
        if self._own_steps is not None:
            self._own_steps.end()
            self._own_steps.begin(self.optimizers)

    def _refuse_outside(self) -> None:
        """Raise RuntimeError for a step of the Trainer's optimizer that the Trainer does not make.

        A step within ``training_step`` or ``backward`` is within the Trainer's only where no
        micro-batches are accumulated, on real workers.
        """
        if not self._steps_own:
            raise RuntimeError(
                f"{type(self).__name__} counts the steps that the Trainer makes, but its optimizer "
                f"makes one outside of them, which would not count, so workers would drift apart. "
                f"Let the Trainer make all steps, as with automatic optimization, or use "
                f"CompressedDDPStrategy."
            )

    def _active_rounds(self) -> LocalRounds:
        """Return the rounds of the worker that runs its batch."""
        return self._all_rounds[0]

    def _rests(self) -> bool:
        return bool(self._all_rounds) and self._active_rounds().rests

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass, and count the batch's tokens if rounds are weighted by them."""
        output = super().training_step(*args, **kwargs)
        unequal = self.plan.unequal
        if unequal is not None and unequal.weigh == "tokens" and not self._rests():
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
        """Make a worker's own step; refuse an optimizer that needs others for its first one."""
        if rounds.rests:
            closure()  # skips its batch, and tells Lightning that it has run
            return None
        self._steps_own = True
        try:
            return super().optimizer_step(optimizer, closure, *args, **kwargs)
        finally:
            self._steps_own = False

    def _ends(self) -> bool:
        """Return whether this step is the last one."""
        trainer = self.lightning_module.trainer
        return steps_of(trainer) == int(trainer.global_step) + 1

    def on_train_start(self) -> None:
        """Begin at the module's weights, where a callback has loaded others since ``setup``."""
        super().on_train_start()
        first = self._all_rounds[0]
        if not first.apart and self._on_any(first.weights.moved):
            self._begin_at_loaded()
        if self.plan.elastic is None:  # else it is to get others' weights
            first.weights.refuse_not_finite(type(self).__name__)
        if self.controller is None and self.engines[0].worker == 0:
            steps = steps_of(self.lightning_module.trainer)
            warn_of_few_rounds(type(self).__name__, self.compressor, steps, self.plan.shortest)

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
            if self.show == "common" and self._on_any(weights.shown and bool(weights.replaced)):
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
        if self._rounds is not None and self._on_any(self._rounds.weights.moved):
            self._begin_at_loaded()

    def _end_rounds(self) -> None:
        """Exchange what is left, where the length of the run was not known before."""
        if self._rounds is not None and self._on_any(self._rounds.apart):
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
        with self._rounds.weights.presented():
            state = super().lightning_module_state_dict()
            return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in state.items()}

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Wait for an exchange under way, so that what it brings can be saved."""
        if self._rounds is not None and not self.is_alone:
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

    @property
    def number(self) -> int:
        """This worker's number, by which its data can be chosen."""
        return self.worker // self.island

    @property
    def island_rank(self) -> int:
        """This process's rank in its worker, by which its share of the worker's data is chosen."""
        return self.worker % self.island

    def figures(self) -> dict[str, float]:
        return {} if self._rounds is None else self._rounds.exchange.figures

    def teardown(self) -> None:
        super().teardown()
        if self._first is not None:
            self._first.leave()
        if self._own_steps is not None:
            self._own_steps.end()
        self._first = self._own_steps = None
        self._all_rounds = ()

    def _arrive(self) -> None:
        """Wait for an exchange under way."""
        for rounds in self._all_rounds:
            rounds.arrive()

    def _moment(self, trainer: Any, batch: int) -> Moment:
        """Return the moment with its steps counted in rounds, as the engine counts."""
        self._arrive()  # levels change between exchanges
        every = self.plan.shortest if self._rounds is None else self._rounds.every
        return in_rounds(super()._moment(trainer, batch), every)


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


def warn_of_few_rounds(owner: str, compressor: Compressor, steps: int | None, every: int) -> None:
    """Warn if a sparsifier does not send most elements even once, or a run has not one round."""
    knob = compressor.knob
    if steps is None:
        return
    if knob is None or knob.field != "density" or compressor.level is None:
        refusals.warn_of_one_round(owner, steps, every)
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


@takes_fields(Compression, Kept, RoundPlan)
class RealLocalSteps(LocalHooks, RealWorker):
    """Data-parallel training that exchanges compressed weights every H steps.

    Use it as ``Trainer(strategy=LocalStepsStrategy(QSGD(bits=4), every=32))``; the LightningModule
    need not change. Each worker makes H optimizer steps with its own gradients. Then its distance
    from the common weights, ``Δ_i = θ − θ_i``, is compressed with error feedback and averaged like
    a gradient, ``outer`` makes a step of the common weights with the mean, and all go on from
    there. With H = 1, plain SGD and the default ``outer`` this is ``CompressedDDPStrategy`` with
    ``ErrorFeedback(lr_aware=True)``. There is no ``DistributedDataParallel`` wrapper, so unused
    parameters and sparse gradients need no settings.

    Validation, test and the ``state_dict`` of checkpoints see the common weights; buffers with
    floating point, such as running statistics, are averaged with each exchange, unless ``buffers``
    says otherwise, and so are parameters that are not trained once they change, as a mean teacher's
    do. Gradients are clipped
    by each worker for itself. Optimizers keep their state per worker, unless ``moments`` are given.

    Args:
        show: ``"common"``: validation and test see the common weights. ``"local"``: worker i's own.
        state: in checkpoints. ``"full"``: every worker's weights, optimizers and errors, in its own
            file in the folder ``lightning_gc_state`` beside the checkpoint; runs resume bit for
            bit, also within a round. ``"mean"``: the means over workers of their weights and
            errors, in the checkpoint itself, with worker 0's optimizers. ``"off"``: the common
            weights only; a run resumes at the last exchange.
        verify: n: in every n-th exchange workers compare their means, and for n > 1 the common
            weights; as for ``CompressedDDPStrategy``.
        ddp_kwargs: as for Lightning's ``DDPStrategy``: ``start_method``, ``process_group_backend``,
            ``timeout``, ... Arguments of its wrapper are allowed with an ``island`` of several.

    An island averages gradients by ``DistributedDataParallel``. Its module may be in shards
    instead, if it calls ``fully_shard(module, mesh=self.device_mesh["data_parallel"])`` in
    ``configure_model``, as for ``CompressedHSDPStrategy``. An elastic worker is a separate job with
    ``Trainer(devices=1, num_nodes=1, max_steps=...)``, or N devices with an island of N.

    Communication pattern:
        In an island of N an all-reduce of gradients in every step. Rank 0 of each island exchanges
        for it, and broadcasts each reply inside, compressed as it is. If the island has a module in
        shards, every rank exchanges its shards with the same rank of the others.
        Nothing between exchanges. Every H steps one exchange of the compressor's for each fragment,
        in one message per request, and an all-reduce of these buffers, on a background thread;
        without a delay workers wait for it. A dead peer is noticed at the next exchange. Lightning
        2.6 broadcasts before each batch whether worker 0 has got SIGTERM; here, once a round.

    Raises:
        ValueError: what ``CompressedDDPStrategy`` refuses; a compressor with a vote, a
            memory that reads learning rates or weights, momentum both in memory and ``outer``, a
            controller that computes with gradients, arguments for a DDP wrapper; at fit start,
            manual optimization, ``SyncBatchNorm``, callbacks that average weights or prune,
            ``ZeroRedundancyOptimizer``, an optimizer with a process group, a schedule-free one, a
            number of processes that N does not divide; a module in shards without an ``island``,
            or with ``elastic``, a loss scaler or another ``state`` than
            ``"full"``; in the first step, any optimizer that communicates.
        RuntimeError: after ten lost rounds in a row; a parameter that was unfrozen, added,
            replaced or cast after the fit began; a step of its weights that the Trainer does not
            make, or by another optimizer.

    Warns:
        UserWarning: a round with a result that is not finite: its steps are lost on all workers,
            errors are as before. A sparsifier with fewer rounds than 1/density; a run without a
            round; ``every`` steps without a gradient; a plateau scheduler with a metric that
            differs between workers.

    Example:
        >>> from lightning_gc import LocalStepsStrategy, TopK
        >>> strategy = LocalStepsStrategy(TopK(density=0.03), every=8)
        >>> strategy.memory.decay, strategy.plan.outer
        (1.0, OuterSGD(lr=1.0, momentum=0.0, nesterov=False))

    Reference:
        Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.
        Basu, Data, Karakus and Diggavi, "Qsparse-local-SGD", NeurIPS 2019.
        Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.

    Attributes:
        engine: state and configuration, once fitting has started; kept between fits.
        recording: the byte and time account of this worker, while fitting.
    """

    _exchange: ElasticExchange | None = None

    def __init__(
        self,
        compressor: Compressor | str,
        memory: Memory | str | None = None,
        scheme: Scheme | str | None = None,
        controller: Controller | str | None = None,
        *,
        show: Literal["common", "local"] = "common",
        **ddp_kwargs: Unpack[arguments.LocalStepsFields],
    ) -> None:
        owner = "LocalStepsStrategy"
        given = arguments.changed(type(self), ddp_kwargs, DistributedDataParallel.__init__)
        wraps = "island" in given
        arguments.refuse_wrapper_arguments(owner, given, wraps=wraps)
        wrapper = (DistributedDataParallel.__init__,) if wraps else ()
        arguments.refuse_unknown(type(self), compressor, given, *wrapper)
        super().__init__(compressor, memory, scheme, controller, show=show, **ddp_kwargs)
        plan = self.plan
        self._place = attached_rounds.place_of(plan)
        self._place.refuse(plan, self._given)

    @property
    def _in_shards(self) -> bool:
        """Whether FSDP2 shards the module; that may begin after the strategy was made."""
        return bool(units_of(self.lightning_module))

    @property
    def _given(self) -> attached_rounds.Given:
        configuration = self.local_workers.configuration
        return attached_rounds.Given(configuration, self.controller, self.verify)

    def setup_environment(self) -> None:
        """Join the other ranks; give a module that may be sharded the mesh of its island."""
        super().setup_environment()
        ranks = self.num_nodes * self.num_processes
        may_be = not type(self.lightning_module).configure_model.__module__.startswith(_LIGHTNING)
        if self.island > 1 and may_be and ranks % self.island == 0:
            parts = self.root_device.type, ranks // self.island, self.island, self._timeout
            self.lightning_module._device_mesh = replica_mesh(*parts)

    def setup(self, trainer: Any) -> None:
        if trainer.state.fn != "fit" and self._in_shards:
            refuse(
                f"{type(self).__name__}: a module in shards is only trained here. Validate or test "
                f"it with Trainer(strategy=ModelParallelStrategy())"
            )
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Start the exchange at worker 0's weights; wrap the module only in an island of DDP."""
        module, plan = self.model, self.plan
        trainer = self.lightning_module.trainer
        self._refuse_trainer(trainer, module)
        in_shards = self._in_shards
        place: attached_rounds.MeetingPlace = self._place
        if in_shards and plan.island > 1:
            reshard(module)  # else optimizers would have what FSDP2 gathered in an earlier fit
            place = attached_rounds.Shards(module, plan.island)
        place.refuse(plan, replace(self._given, scaler=self._scaler()))
        place.refuse_module(plan.owner, module)
        if in_shards:
            state = self._store.mode
            judge("Local steps of a sharded module", plan.owner, plan=plan, state=state)
        judge("Elastic Trainer", plan=plan, max_steps=trainer.max_steps)
        if type(self.local_workers) is not place.kind:
            workers = place.kind(self.local_workers.configuration)
            self.checkpoint_parts = CheckpointParts(workers, settings={"exchanged": "weights"})
        self._attach(
            lambda setup: attached_rounds.AttachedRounds(module, setup, plan, self._keep, place)
        )
        self._place = attached_rounds.place_of(plan)  # a number in a checkpoint is asked for once
        exchange = self._handle.meeting.exchange
        self._exchange = exchange if isinstance(exchange, ElasticExchange) else None
        assert self._until_teardown is not None
        self._until_teardown.callback(broadcast_only(self._broadcasts, trainer))
        if plan.island > 1 and not in_shards:
            self._ddp_kwargs["process_group"] = self._handle.meeting.inside
            super().configure_ddp()

    def _broadcasts(self) -> bool:
        return self.plan.elastic is not None or self._all_rounds[0].position == 0

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load; note the number that this worker had, before it asks for one."""
        loaded = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        kept = loaded.get(KEY)
        common = kept.get("common") if isinstance(kept, dict) else None
        number = common.get("elastic", {}).get("number") if isinstance(common, dict) else None
        if isinstance(self._place, attached_rounds.Rendezvous) and isinstance(number, int):
            self._place = replace(self._place, wanted=number)
        return loaded

    def on_train_start(self) -> None:
        """Begin; an elastic worker comes into the run, at the weights of the others."""
        super().on_train_start()
        if self._exchange is not None:
            trainer = self.lightning_module.trainer
            self._exchange.enter(self._all_rounds[0], TrainerLoop(trainer))
            self._all_rounds[0].weights.refuse_not_finite(type(self).__name__)

    @property
    def number(self) -> int:
        """This worker's number, by which its data can be chosen."""
        return super().number if self._exchange is None else self._exchange.number

    @property
    def roll(self) -> Roll | None:
        """The rounds of an elastic run, since this worker came in; else None."""
        return None if self._exchange is None else self._exchange.roll

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """As Lightning's; every elastic worker shuffles the data in another order."""
        given: dict[str, Any] = super().distributed_sampler_kwargs
        if self._exchange is None:
            return given
        return given | {"seed": int(os.environ.get("PL_GLOBAL_SEED", 0)) + self.number}

    def figures(self) -> dict[str, float]:
        workers = {} if self._exchange is None else {"workers": float(self._exchange.size)}
        return super().figures() | workers

    @property
    def _handle(self) -> attached_rounds.AttachedRounds:
        assert isinstance(self._attached, attached_rounds.AttachedRounds)
        return self._attached

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the common weights and buffers, as copies; those in shards complete on rank 0."""
        state = super().lightning_module_state_dict()
        shards = {name: each for name, each in state.items() if isinstance(each, DTensor)}
        if shards and self.lightning_module.trainer.interrupted:
            raise RuntimeError(
                "The module is in shards, and other ranks may not take part after an exception, so "
                "no checkpoint is written. Save within training."
            )
        for name, each in shards.items():
            whole = each.full_tensor()  # one by one: a device may not hold all of them
            state[name] = whole.cpu()
            if self.global_rank != 0:
                del state[name]
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if not self._in_shards:
            super().load_model_state_dict(checkpoint, strict)
        else:
            options = StateDictOptions(full_state_dict=True, strict=strict)
            weights = checkpoint["state_dict"]
            set_model_state_dict(self.lightning_module, weights, options=options)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state; in shards each rank's side file has its own part."""
        return {} if self._in_shards else super().optimizer_state(optimizer)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Restore each worker's own optimizers where they were saved, else worker 0's."""
        in_files: dict[str, Any] = {"optimizer_states": []} if self._in_shards else {}
        super().load_optimizer_state_dict({**checkpoint, **in_files})

    def _copy_optimizers(self, checkpoint: Any, worker: int) -> None:
        if self._in_shards and self.global_rank == 0:
            warnings.warn(
                "The checkpoint has no shards of the optimizers' states, so optimizers begin "
                "without a state.",
                stacklevel=2,
            )

    def _start_alike(self) -> None:
        assert self._rounds is not None
        if self._in_shards:
            self._handle.meeting.begin(self.lightning_module)
            return
        buffers = self._rounds.weights.buffers.alike(self.root_device)
        broadcast_all((*self.lightning_module.parameters(), *buffers))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Make this worker's own step; exchange if a round is over, or the run."""
        assert self._rounds is not None
        output = self._own_step(self._rounds, *args, **kwargs)
        with self._stopping_with_peers():
            self._handle.stepped(self._ends())
        return output

    def _exchange_the_rest(self) -> None:
        self._handle.end_rounds()

    def teardown(self) -> None:
        super().teardown()
        inside = self._ddp_kwargs.pop("process_group", None)
        if inside is not None:
            leave(inside, self._failed)


class TrainerLoop:
    """What an elastic worker needs of its Trainer.

    Args:
        trainer: that trains.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def steps(self) -> int:
        """Optimizer steps before the one that it is in, as all workers count them."""
        return int(self._trainer.global_step)

    def go_on_from(self, steps: int) -> None:
        """Count from here, with optimizers that begin again and learning rates of this step."""
        for optimizer in self._trainer.optimizers:
            optimizer.state.clear()
        missing = steps - self.steps
        progress = self._trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
        count = progress.optimizer.step.total
        count.ready = count.completed = steps
        for each in self._trainer.lr_scheduler_configs:
            if each.interval == "step" and not each.reduce_on_plateau:
                with warnings.catch_warnings():  # of a step before the optimizer's first
                    warnings.simplefilter("ignore", UserWarning)
                    for _ in range(missing // each.frequency):
                        each.scheduler.step()

    def check(self) -> None:
        """End as SIGTERM asks, also while this worker waits for others."""
        if self._trainer.received_sigterm:
            raise sigterm_exception(self._trainer)
