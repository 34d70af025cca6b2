"""Combinations: the table of settings that do not go together, and what to give instead.

Every room judges by this table. The page "What goes with what" and ``lightning-gc list
combinations`` show it. A rule reads what settings declare and imports no class; what only a class
can tell is given to ``judge``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def judge(place: str, owner: object = "", /, **given: Any) -> None:
    """Raise ``ValueError`` with the first sentence of a place that holds.

    Args:
        place: a key of ``RULES``.
        owner: the class or function with these settings.
        **given: what the rules of this place read.
    """
    known = SimpleNamespace(**given)
    for sentence, holds in RULES[place].items():
        if holds(known):
            raise ValueError(sentence.format(owner=owner, **given))


def shown(sentence: str) -> str:
    """Return a sentence of the table with names for values, as the page shows it.

    Example:
        >>> shown("{owner}(every={plan.every!r}, {compressor}): use {most} or less.")
        'every=..., <compressor>: use <most> or less.'
    """
    sentence = re.sub(r"^\{owner\}\((.*?)\): ", r"\1: ", sentence)
    sentence = re.sub(r"=\{[^}]*\}", "=...", sentence)
    return re.sub(r"\{(?:\w+\.)*([a-z]\w*)[^}]*\}", r"<\1>", sentence)


_MANY = 5_040
"""A number of workers that consists of nodes of any usual size."""


def _has_momentum(memory: Any) -> bool:
    """Return whether a memory refuses an optimizer with momentum."""
    try:
        memory.check_optimizer({"momentum": 0.9})
    except ValueError:
        return True
    return False


def _grace(plan: Any) -> bool:
    """Return whether a round of the plan may end without late workers."""
    return plan.unequal is not None and plan.unequal.grace is not None


RULES: dict[str, dict[str, Callable[[Any], object]]] = {
    "Memory": {
        "{memory} stores buffers in fewer bits, but they are rescaled with the learning rate or "
        "equal on all workers, and each worker would round them again; keep them in float32 "
        "(stored=None).": lambda g: (
            g.memory.stored is not None and (g.memory.lr_aware or g.memory.common)
        ),
        "{compressor} sends what has added up over steps, but {memory} adds up nothing, so nothing "
        "would be sent; use "
        "ErrorFeedback().": lambda g: g.compressor.traits.needs_sums and not g.memory.accumulates,
        "{memory} feeds back what was not sent, but the result of {compressor} is a majority vote, "
        "not the mean of what was sent; use NoMemory(), or EFSignSGD() for signs with error "
        "feedback.": lambda g: g.memory.feeds_back and not g.compressor.traits.conserves,
    },
    "MomentumCorrection": {
        "{memory} corrects the momentum that waits in the error, but {compressor} is unbiased and "
        "leaves none; use NoMemory(), "
        "or a biased compressor such as TopK(0.01).": lambda g: g.compressor.traits.unbiased,
        "{memory} drops the momentum of elements that are sent, and {compressor} sends all of "
        "them, so nothing would remain; use LocalMomentum(), "
        "or a sparsifier.": lambda g: g.compressor.traits.kind != "sparsifier",
        "{memory} drops the momentum of elements that a worker has sent, but {scheme} encodes "
        "means of several workers; use AllGather(), "
        "or another memory.": lambda g: g.scheme is not None and g.scheme.averages_first,
    },
    "Menu": {
        "{compressor}: its compressors have different default memories: {theirs}. Give the memory "
        "that all are to have, such as memory='error_feedback'.": lambda g: g.several,
    },
    "Scheme": {
        "{compressor} has its own communication rounds, so it takes no scheme, but was given "
        "{scheme}; leave scheme out.": lambda g: g.own_rounds,
        "{scheme} averages payloads, but payloads of {compressor} are not linear: their mean is "
        "not the mean of the gradients. Use AllGather() or "
        "TwoShot().": lambda g: g.scheme.averages and not g.compressor.traits.linear,
        "{scheme} cuts tensors into shards, which have no state, but {compressor} needs state of "
        "the full tensor. "
        "Use AllGather().": lambda g: g.scheme.cuts and g.compressor.traits.needs_sums,
    },
    "Hierarchical and TwoHop": {
        "{scheme} averages in nodes first, but the workers of {compressor} vote, and a majority of "
        "node majorities is not the majority of all workers. "
        "Use TwoShot().": lambda g: not g.compressor.traits.conserves,
    },
    "SparseReduce": {
        "{scheme} splits selected elements by position, but {compressor} does not select any. Use "
        "{other}, or a compressor such as TopK(0.01).": lambda g: not g.selects,
    },
    "min_numel": {
        "{owner}(min_numel={min_numel!r}): {compressor} says itself which tensors are compressed; "
        "leave min_numel out, or give the compressor without its wrapper.": lambda g: g.wrapped,
        "{owner}(min_numel={min_numel!r}): {compressor} compresses every tensor; leave min_numel "
        "out, or give SizeSwitch({compressor}, "
        "min_numel={min_numel}).": lambda g: g.min_numel and not g.wrapped,
    },
    "Optimizer": {
        "{memory} has the momentum, so the optimizer must have none, but its {field} is {value!r}; "
        "use torch.optim.SGD or Muon with momentum=0, AdamW with betas=(0.0, 0.999), or "
        "memory=ErrorFeedback().": lambda g: g.momentum,
        "{memory} must add weight decay before the exchange; the optimizer adds it after, "
        "weight_decay={decay!r}; set it to 0 there and use "
        "MomentumCorrection(weight_decay={decay!r}).": lambda g: g.adds and g.decay,
    },
    "Training loop": {
        "{memory} moves the weights around each forward pass, which a communication hook cannot; "
        "use CompressedDDPStrategy, "
        "or memory=ErrorFeedback().": lambda g: g.memory.lookahead and g.way == "attach",
        "{memory} moves the weights around each forward and backward pass, which only automatic "
        "optimization distinguishes; use that, or "
        "memory=ErrorFeedback().": lambda g: g.memory.lookahead and g.way == "manual optimization",
        "{memory} rescales errors by the learning rates, which attach does not know; give "
        "attach(..., optimizers=optimizer).": lambda g: (
            g.memory.lr_aware and g.way == "attach" and not g.optimizers
        ),
        "{memory} rescales errors by the learning rates, so the optimizer must be known from the "
        "first step on; set up both together: fabric.setup(model, "
        "optimizer).": lambda g: g.memory.lr_aware and g.way == "Fabric" and not g.optimizers,
    },
    "Decisions": {
        "{owner}(..., {name}={given}): a controller sees the learning rates; "
        "give optimizers=optimizer.": lambda g: not g.optimizers,
    },
    "Controller": {
        "{controller} watches the error, but {memory} keeps none; "
        "use memory=ErrorFeedback().": lambda g: g.controller.needs.errors and not g.memory.buffers,
        "{owner}(controller={controller}): it sets the steps of a round, and here gradients are "
        "exchanged at every step; "
        "use LocalStepsStrategy.": lambda g: g.controller.needs.rounds and not g.rounds,
    },
    "Controller and level": {
        "{controller!r} sets a compressor's level, but this compressor has no level; use one with "
        "a level, such as TopK(0.01), or leave the controller out.": lambda g: g.knob is None,
        "{controller!r}: the level {outside[0]!r} is outside the range of this compressor's "
        "{knob.field}, {knob.low:g} to {knob.high:g}; give levels from there, such as "
        "{usual:g}.": lambda g: g.outside,
    },
    "Accordion": {
        "{controller!r}: low={controller.low!r} compresses harder than high={controller.high!r}, "
        "as a higher {knob.field} means more {knob.more}; swap the two.": lambda g: g.harder,
    },
    "DynamicBitWidth": {
        "{owner}(steps={controller.steps!r}): level {after!r} compresses harder than {before!r} "
        "before it, as a higher {knob.field} means more {knob.more}; steps lead to less "
        "compression.": lambda g: g.harder,
    },
    "GainSearch": {
        "{controller!r}: give levels from least compression to most; a higher {knob.field} means "
        "more {knob.more}.": lambda g: g.harder,
    },
    "BandwidthAware": {
        "{controller!r} takes bytes to be in proportion to the level, but a higher {knob.field} "
        "means more {knob.more}; use a compressor whose knob is a density, bits or a "
        "rank.": lambda g: g.knob.more != "bytes",
        "{controller!r}: give levels from least compression to most, {descending}.": lambda g: (
            g.harder
        ),
    },
    "CongestionAIMD": {
        "{controller!r} raises the level to send more, but a higher {knob.field} means more "
        "{knob.more}; use a compressor whose knob is a density, "
        "bits or a rank.": lambda g: g.knob.more != "bytes",
    },
    "DQSGD and AdaQS": {
        "{controller} sets the bits of a quantiser, but this compressor {has}; "
        "use QSGD(4).": lambda g: g.knob is None or g.knob.field != "bits",
    },
    "Controllers of a threshold": {
        "{controller!r} chooses a threshold, but this compressor has {what}; "
        "use HardThreshold.": lambda g: g.knob is None or g.knob.field != "threshold",
    },
    "Auto": {
        "{controller!r} chooses among the compressors of a Menu; give the strategy "
        'compressor="auto", or a Menu.': lambda g: (
            g.where == "controller" and (g.knob is None or g.knob.field != "choice")
        ),
        '{owner}: "auto" cannot choose here, since FSDP2 exchanges within its own passes, where '
        "nothing can be weighed; name a method, such as 'qsgd', or use HSDP, whose exchange "
        "between replicas can be chosen.": lambda g: g.where == "FSDP",
        '{owner}: "auto" cannot choose here, since local steps save time by H, the steps from one '
        "exchange to the next; name a method, such as 'cast', "
        "and choose H.": lambda g: g.where == "local steps",
        '{owner}(compressor="{compressor}", controller={controller!r}): the controller of "auto" '
        "is Auto, such as controller=Auto(allow='feedback'); leave it out, or give a "
        "compressor.": lambda g: g.where == "another controller",
        "{owner}(compressor={compressor!r}, controller={controller!r}): the compressor says what "
        'is permitted; give compressor="auto", or leave allow out.': lambda g: (
            g.where == "allow" and g.controller.allow not in ("rounding", g.allow)
        ),
    },
    "weights_controller": {
        "{owner}(weights_controller={controller}): weights are not compressed. Use "
        "weights=Uniform(8, block_size=64) too, "
        "or leave weights_controller out.": lambda g: g.settings is None,
        "{owner}(weights_controller={controller}): {settings.compressor.method} has no level. Use "
        "weights=WeightDifferences(Uniform(4, block_size=64)), or leave weights_controller "
        "out.": lambda g: g.settings.knob is None and g.settings.differences,
        "{owner}(weights_controller={controller}): {settings.compressor.method} has no level. Use "
        "weights=Uniform(8, block_size=64), "
        "or leave weights_controller out.": lambda g: g.settings.knob is None,
        "{owner}(weights_controller={controller}): it measures gradients, their errors or their "
        "messages, which do not describe weights. Use Schedule, Plan or "
        "DynamicBitWidth.": lambda g: g.measures,
        "{owner}(weights_controller={controller}): a trace is of one controller. Use "
        "{of_gradients}(trace=''), "
        "or leave weights_controller out.": lambda g: g.other is not None and g.other.needs.trace,
    },
    "Local steps": {
        "{owner}(every={plan.every!r}, fragments={plan.fragments!r}): at most one fragment is "
        "exchanged after a step; "
        "use fragments={plan.shortest} or fewer.": lambda g: g.plan.fragments > g.plan.shortest,
        "{owner}(delay={plan.delay!r}): two exchanges are {apart} steps apart, and a result must "
        "have been taken over before the next one; use delay={most} or less, or exchange less "
        "often.": lambda g: g.plan.delay > g.most,
        "{owner}(moments={plan.moments!r}, delay={plan.delay!r}): a mean of moments from "
        "{plan.delay} steps ago would undo the optimizer's steps since; use delay=0, or "
        "moments=None.": lambda g: g.plan.moments is not None and g.plan.delay,
        "{owner}(island={plan.island!r}, unequal={plan.unequal!r}): the processes of an island "
        "would measure unlike speeds and count unlike tokens; "
        "leave unequal out.": lambda g: g.plan.island > 1 and g.plan.unequal is not None,
        "{owner}(delay={plan.delay!r}, unequal=Unequal(grace={plan.unequal.grace!r})): a late "
        "worker takes a result over when it comes, and the others after {plan.delay} steps; use "
        "delay=0, or grace=None.": lambda g: _grace(g.plan) and g.plan.delay,
        "{owner}(fragments={plan.fragments!r}, unequal=Unequal(grace={plan.unequal.grace!r})): a "
        "late worker would miss only some of its parameters; use fragments=1, "
        "or grace=None.": lambda g: _grace(g.plan) and g.plan.fragments > 1,
        "{owner}(moments={plan.moments!r}, unequal=Unequal(grace={plan.unequal.grace!r})): a late "
        "worker's moments would count though its steps do not; use moments=None, "
        "or grace=None.": lambda g: _grace(g.plan) and g.plan.moments is not None,
    },
    "Budget of local steps": {
        "{owner}(every={plan.every!r}, controller={levels!r}): {levels!r} is a second one that "
        "decides; give one of levels, "
        "once.": lambda g: g.plan.every.levels is not None or g.levels.needs.rounds,
    },
    "Local steps exchange differences of weights": {
        "{owner}({compressor}): its workers vote, and the result has equal magnitudes, so it is "
        "not the mean of their differences of weights; use EFSignSGD() for signs with magnitudes, "
        "or QSGD(4).": lambda g: not g.compressor.traits.conserves,
        "{owner}(memory={memory}): differences of weights contain the learning rate already, so "
        "errors must not follow it; use memory=ErrorFeedback().": lambda g: g.memory.lr_aware,
        "{owner}(memory={memory}): it changes gradients by weights or weights by errors at each "
        "optimizer step, but weights are exchanged only every H steps; "
        "use memory=ErrorFeedback().": lambda g: g.memory.lookahead or g.memory.reads_weights,
        "{owner}(memory={memory}, outer={outer}): the memory has the outer momentum; use "
        "outer=OuterSGD(lr={outer.lr!r}), "
        "or memory=ErrorFeedback().": lambda g: g.outer.momentum and _has_momentum(g.memory),
        "{owner}(controller={controller}): it computes with gradients and learning rates, but "
        "differences of weights contain both; use Accordion or a "
        "Schedule.": lambda g: g.needs is not None and (g.needs.errors or g.needs.scale),
        "{owner}(every={plan.every}, controller={controller}): both set the steps of a round; "
        "give every=8, say, or another controller.": lambda g: (
            g.needs is not None and g.needs.rounds and g.plan.growing is not None
        ),
    },
    "LocalSteps": {
        "{owner}(every={plan.every}): only the loop can say when a batch begins; give "
        "controller={plan.every}, "
        "and call begin_batch before each batch.": lambda g: hasattr(g.plan.every, "levels"),
        "{owner}(elastic=..., timeout={timeout!r}): elastic workers wait as long as "
        "Elastic(timeout={plan.elastic.timeout:g}) says, in seconds; "
        "set it there.": lambda g: g.plan.elastic is not None and g.timeout is not None,
        "{owner}(unequal=Unequal(pace={plan.unequal.pace!r})): the loop makes every step, so none "
        "can be skipped; use pace='equal', or LocalStepsStrategy.": lambda g: (
            g.plan.unequal is not None and g.plan.unequal.pace != "equal"
        ),
        "{owner}(unequal=Unequal(weigh='tokens')): the loop's batches are not seen; use "
        "weigh='equal', or LocalStepsStrategy.": lambda g: (
            g.plan.unequal is not None and g.plan.unequal.weigh == "tokens"
        ),
    },
    "Local steps between processes": {
        "{owner}(unequal=Unequal(grace={plan.unequal.grace!r})): an exchange between processes "
        "waits for all of them. Use grace=None with pace='measured', "
        "or SimulatedLocalStepsStrategy to study late workers.": lambda g: _grace(g.plan),
    },
    "Local steps of a model in shards": {
        "{owner}(island={plan.island}, elastic={plan.elastic!r}): a worker that joins would need "
        "the shards of each rank, and a snapshot has one rank's. Leave elastic out, or use "
        "LocalStepsStrategy(island={plan.island}, "
        "elastic=...) with complete models.": lambda g: g.plan.elastic is not None,
        "{owner}(island={plan.island}, scaler=...): a model in shards reduces gradients in float32 "
        "or bfloat16, which need no loss scaling; "
        "leave it out.": lambda g: g.scaler is not None and g.scaler.is_enabled(),
    },
    "Elastic local steps": {
        "{owner}(elastic={elastic!r}, delay={plan.delay}, fragments={plan.fragments}): an elastic "
        "round exchanges all weights and waits for the result; "
        "use delay=0 and fragments=1.": lambda g: g.plan.delay or g.plan.fragments > 1,
        "{owner}(elastic={elastic!r}, moments={plan.moments!r}): a worker that joins begins "
        "without moments; leave moments out.": lambda g: g.plan.moments is not None,
        "{owner}(elastic={elastic!r}, unequal={plan.unequal!r}): an elastic round that is repeated "
        "would scale distances twice; leave unequal out.": lambda g: g.plan.unequal is not None,
        "{owner}(elastic={elastic!r}, controller={controller!r}): elastic workers begin at unlike "
        "times, so no epoch is common to them; "
        "give the level to the compressor.": lambda g: g.controller is not None,
        "{owner}(elastic={elastic!r}, verify={verify!r}): the members of every elastic round "
        "compare their results anyway; leave verify out.": lambda g: g.verify,
        "{owner}(elastic={elastic!r}, scheme={configuration.scheme}): its nodes need a fixed "
        "number of workers; "
        "use AllGather() or TwoShot().": lambda g: g.configuration.neighbours(_MANY) > 1,
    },
    "Models in shards": {
        "{owner}: {controller.__class__.__name__} compresses full gradients to see what each "
        "level costs, and a rank has shards of them; use "
        "Plan or Accordion.": lambda g: g.controller is not None and g.controller.needs.curves,
    },
    "Tensor-parallel ranks": {
        "{owner}({compressor.method}, tensor_parallel_size={ranks}): its choice depends on all "
        "tensors. Tensor-parallel ranks have different parts of them, so their copies of norms "
        "would differ; use TopK.": lambda g: g.ranks > 1 and g.compressor.traits.reads_model,
    },
    "FSDP": {
        "{owner}(): it compresses gradients, weights, or both. Give gradients=QSGD(bits=4), "
        "weights=Int8(block_size=256), say.": lambda g: g.gradients is None and g.weights is None,
        "{owner}(workers_per_node={workers_per_node!r}): it is for gradients in two hops. Give "
        "hops=2 and gradients too, or leave it out.": lambda g: (
            g.workers_per_node is not None and (g.hops == 1 or g.gradients is None)
        ),
    },
    "FSDP's shards": {
        "{compressor} averages in its own rounds, after which every worker has the full mean, but "
        "each needs one shard of it, so a payload must be for one worker. Use QSGD(8), "
        "say.": lambda g: g.own_rounds,
        "{compressor} needs per-tensor state and accumulated errors; FSDP shards have neither. Use "
        "QSGD(8), say.": lambda g: g.compressor.traits.needs_sums,
        "The result of {compressor} is a vote, and what a shard's owner gets here is the mean of "
        "what was decoded. Use QSGD(8), say.": lambda g: not g.compressor.traits.conserves,
    },
    "FSDP's errors": {
        "{owner}(memory={memory}): it would keep errors of full parameters on every rank, "
        "{width:.3g} bytes for each parameter of the model. FSDP exists to save that memory. Give "
        "memory=NarrowResidual('int8') to pay 1.03 bytes, leave it out and use an unbiased "
        "compressor such as QSGD(8), or use CompressedHSDPStrategy, which keeps errors of "
        "shards.": lambda g: (
            g.memory.buffers and g.given and (g.memory.stored is None or g.memory.common)
        ),
        "{owner}({compressor.method}): this method feeds back its errors by {memory}. It would "
        "keep errors of full parameters on every rank, {width:.3g} bytes for each parameter of the "
        "model. FSDP exists to save that memory. Give memory=NarrowResidual('int8') to pay 1.03 "
        "bytes. Otherwise use an unbiased method such as QSGD(8), or CompressedHSDPStrategy, which "
        "keeps errors of shards. "
        "memory='none' drops the errors.": lambda g: g.memory.buffers and not g.given,
    },
    "attach to a model in shards": {
        "{owner}(..., scaler=...): a model in shards reduces gradients in float32 or bfloat16, "
        "which need no loss scaling; "
        "leave it out.": lambda g: g.scaler is not None and g.scaler.is_enabled(),
    },
    "attach to a model in shards without replicas": {
        "{owner}(..., {name}={value!r}): a model in shards without replicas has FSDP2's "
        "reduce-scatters, units and process group. Leave it out; give "
        "init_process_group(timeout=...), or hops=2 for nodes.": lambda g: g.value not in (None, 25)
    },
    "attach to another module": {
        "{owner}(..., {name}={value!r}): it is for a module that fully_shard was called on without "
        "replicas; leave it out.": lambda g: g.value not in (None, 1),
    },
    "DistributedDataParallel": {
        "{owner} got {hook}={value!r}, but the gradient exchange is DDP's only hook. Remove "
        "{hook}, or use Lightning's DDPStrategy.": lambda g: g.hook,
        "{owner} got mixed_precision=..., which takes up DDP's only communication hook. Use "
        "{instead} instead.": lambda g: g.mixed_precision is not None,
    },
    "Arguments of DistributedDataParallel": {
        "{owner}({name}=...): the processes of an island average whole gradients, in a group of "
        "their own; leave it "
        "out.": lambda g: g.wraps and g.name in (*g.hooks, "mixed_precision", "process_group"),
        "{owner}({name}=...): that is for DistributedDataParallel, in which nothing is wrapped "
        "here; leave it out.": lambda g: not g.wraps and g.name in (*g.hooks, *g.wrappers),
    },
    "static_graph": {
        "static_graph=True with manual optimization does not synchronise the first step in this "
        "version of Lightning; use Lightning 2.6 or later, "
        "or static_graph=False.": lambda g: g.static_graph and not g.automatic and g.old,
    },
    "LocalSteps and the module": {
        "{owner} counts the steps of one optimizer, so it needs automatic optimization. Set "
        "automatic_optimization = True. Join several optimizers: return Together([muon, adamw]). "
        "For one loss per optimizer, as in a GAN, "
        "use CompressedDDPStrategy.": lambda g: not g.automatic,
    },
    "LocalSteps and callbacks": {
        "{callback} prunes by a worker's own weights, which differ between workers with {owner}, "
        "and so would what each prunes; remove the callback and prune after the fit, or use "
        "CompressedDDPStrategy.": lambda g: "ModelPruning" in g.names,
        "{callback} averages a worker's own weights, which differ between workers, and {owner} "
        "already averages over workers; remove the "
        "callback.": lambda g: g.names & {"WeightAveraging", "StochasticWeightAveraging"},
    },
    "Elastic Trainer": {
        "Elastic workers count their steps together, so that all end at the same one; use "
        "Trainer(max_steps=...).": lambda g: (
            g.plan.elastic is not None and (g.max_steps is None or g.max_steps < 0)
        ),
    },
    "Local steps of a sharded module": {
        "{owner}(island={plan.island}, state={state!r}): only each rank's own file has its shards "
        "of the optimizers; use state='full'.": lambda g: g.state != "full",
    },
    "Simulated workers": {
        "{owner}(verify=...): simulated workers share one mean, so there is nothing to compare; "
        "leave it out, or use {instead} with processes.": lambda g: g.verify,
    },
    "Simulated local steps": {
        "{owner}(elastic={plan.elastic!r}): elastic workers are processes; train them with "
        "LocalStepsStrategy, "
        "and replay their rounds here with roll=...": lambda g: g.plan.elastic is not None,
        "{owner}(speeds={speeds!r}, roll=...): a roll does not say how long its rounds took; leave "
        "speeds out.": lambda g: g.speeds is not None and g.roll is not None,
        "{owner}(workers={workers}, speeds={speeds!r}): give one speed for each worker, or leave "
        "workers out.": lambda g: g.speeds is not None and g.workers not in (None, len(g.speeds)),
        "{owner}(unequal={plan.unequal!r}): simulated workers run one after the other, so their "
        "speeds cannot be measured; give speeds=(1.0, 0.5), in steps per second, one for each "
        "worker.": lambda g: (
            g.speeds is None
            and g.plan.unequal is not None
            and (g.plan.unequal.pace == "measured" or _grace(g.plan))
        ),
    },
    "Experiment": {
        "budget={of.budget:g} with objective='pareto': a Pareto front has all budgets. Leave the "
        "budget out, or use "
        "objective='metric'.": lambda g: g.of.budget is not None and g.of.objective == "pareto",
        "workers={of.workers} simulated and devices={of.devices} real: give one of the "
        "two.": lambda g: g.of.workers > 1 and g.of.devices > 1,
        "devices={of.devices} needs os.killpg to end a run's processes, which {platform} lacks. "
        "Tune on Linux, "
        "or use workers={of.devices} simulated.": lambda g: g.of.devices > 1 and not g.has_groups,
    },
    "Trainer of an experiment": {
        "accumulate_grad_batches={batches} with workers={of.workers}: all workers need equally "
        "many micro-batches in a step. Use 1, or a multiple of {of.workers}. For {batches} "
        "micro-batches of each worker write {all_batches}.": lambda g: (
            g.of.workers > 1 and g.batches != 1 and g.batches % g.of.workers
        ),
    },
    "Sender": {
        "{memory!r} works with what a message has not: the weights of a training loop. Give "
        "another memory, "
        "such as ErrorFeedback().": lambda g: g.memory.lookahead or g.memory.reads_weights,
        "{memory!r} works with an estimate that all receivers need. Give another memory, such as "
        "ErrorFeedback().": lambda g: g.memory.common,
    },
    "Compressors of a Menu": {
        "Menu: {compressor} ({name!r}) cannot stand beside others: it is a menu itself; list its "
        "compressors in one menu.": lambda g: hasattr(g.compressor, "chosen"),
        "Menu: {compressor} ({name!r}) cannot stand beside others: its workers vote and leave no "
        "error that the next method could send; "
        "use EFSignSGD() for signs.": lambda g: not g.compressor.traits.conserves,
        "Menu: {compressor} ({name!r}) cannot stand beside others: it reads its state of all "
        "tensors at the start of a step, which another method does not leave; "
        "use TopK(0.01).": lambda g: g.compressor.traits.reads_model,
    },
}
"""Place -> sentence, with placeholders for what ``judge`` was given -> whether it holds."""
