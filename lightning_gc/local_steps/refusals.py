"""Refusals of local steps: settings, callbacks and optimizers that cannot work with them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gc.compressors import Compressor
from lightning_gc.controllers import Controller
from lightning_gc.exchange.workers import Configuration
from lightning_gc.local_steps.round_plan import Outer, RadialDirectional, RoundPlan
from lightning_gc.local_steps.unequal import Unequal
from lightning_gc.memories import Memory


def refuse_settings(
    owner: str,
    compressor: Compressor,
    memory: Memory,
    controller: Controller | None,
    outer: Outer,
) -> None:
    """Raise ValueError for settings that need gradients: exchanged are differences of weights.

    Such a difference already contains the learning rates.

    Args:
        owner: the strategy, for the sentence.
        compressor: of the differences.
        memory: of errors of these differences.
        controller: of levels, or None.
        outer: the outer step.
    """
    if not compressor.traits.conserves:
        raise ValueError(
            f"{owner}({compressor}): its workers vote, and the result has equal magnitudes, so "
            f"it is not the mean of their differences of weights; use EFSignSGD() for signs with "
            f"magnitudes, or QSGD(4)."
        )
    if memory.lr_aware:
        raise ValueError(
            f"{owner}(memory={memory}): differences of weights contain the learning rate "
            f"already, so errors must not follow it; use memory=ErrorFeedback()."
        )
    if memory.lookahead or memory.reads_weights:
        raise ValueError(
            f"{owner}(memory={memory}): it changes gradients by weights or weights by errors at "
            f"each optimizer step, but weights are exchanged only every H steps; use "
            f"memory=ErrorFeedback()."
        )
    if outer.momentum:
        try:
            memory.check_optimizer({"momentum": outer.momentum})
        except ValueError:
            raise ValueError(
                f"{owner}(memory={memory}, outer={outer}): the memory has the outer momentum; "
                f"use outer=OuterSGD(lr={outer.lr!r}), or memory=ErrorFeedback()."
            ) from None
    if isinstance(outer, RadialDirectional) and compressor.traits.kind == "sparsifier":
        raise ValueError(
            f"{owner}({compressor}, outer={outer}): the mean of a few elements would be "
            f"stretched to the length of all; use a quantiser, such as QSGD(4), or "
            f"outer=OuterSGD()."
        )
    if controller is not None and (controller.needs.errors or controller.needs.scale):
        raise ValueError(
            f"{owner}(controller={controller!r}): it computes with gradients and learning rates, "
            f"but differences of weights contain both; use Accordion or a Schedule."
        )


def check_rounds(owner: str, plan: RoundPlan, controller: Controller | None) -> None:
    """Raise ValueError for a controller whose H the plan cannot have.

    Args:
        owner: the strategy, for the sentence.
        plan: as the strategy begins.
        controller: of H, of levels, or None.
    """
    every = () if controller is None else controller.needs.rounds
    if every and plan.growing is not None:
        raise ValueError(
            f"{owner}(every={plan.growing!r}, controller={controller!r}): both set the steps of a "
            f"round; give every=8, say, or another controller."
        )
    for steps in every:
        dataclasses.replace(plan, every=steps)


_MANY = 5_040
"""A number of workers that consists of nodes of any usual size."""


def refuse_elastic(
    owner: str,
    elastic: Any,
    plan: RoundPlan,
    controller: Controller | None,
    configuration: Configuration,
    verify: Any,
    outer: Outer,
    unequal: Unequal | None,
) -> None:
    """Raise ValueError for settings that rounds of changing members cannot obey.

    Args:
        owner: the strategy, for the sentence.
        elastic: as the user has set it.
        plan: when what is exchanged.
        controller: of levels, or None.
        configuration: of the exchange.
        verify: what workers compare.
        outer: the outer step.
        unequal: how unequal workers share rounds, or None.
    """
    if plan.delay or plan.fragments > 1:
        raise ValueError(
            f"{owner}(elastic={elastic!r}, delay={plan.delay}, fragments={plan.fragments}): an "
            f"elastic round exchanges all weights and waits for the result; use delay=0 and "
            f"fragments=1."
        )
    if plan.moments is not None:
        raise ValueError(
            f"{owner}(elastic={elastic!r}, moments={plan.moments!r}): a worker that joins begins "
            f"without moments; leave moments out."
        )
    if unequal is not None:
        raise ValueError(
            f"{owner}(elastic={elastic!r}, unequal={unequal!r}): an elastic round that is repeated "
            f"would scale distances twice; leave unequal out."
        )
    if isinstance(outer, RadialDirectional):
        raise ValueError(
            f"{owner}(elastic={elastic!r}, outer={outer}): an elastic round that is repeated "
            f"would scale distances twice; use outer={outer.sgd!r}."
        )
    if controller is not None:
        raise ValueError(
            f"{owner}(elastic={elastic!r}, controller={controller!r}): elastic workers begin at "
            f"unlike times, so no epoch is common to them; give the level to the compressor."
        )
    if verify:
        raise ValueError(
            f"{owner}(elastic={elastic!r}, verify={verify!r}): the members of every elastic round "
            f"compare their results anyway; leave verify out."
        )
    if configuration.neighbours(_MANY) > 1:
        raise ValueError(
            f"{owner}(elastic={elastic!r}, scheme={configuration.scheme}): its nodes need a "
            f"fixed number of workers; use AllGather() or TwoShot()."
        )


def check_unequal(owner: str, plan: RoundPlan, unequal: Unequal | None) -> None:
    """Raise ValueError for a way to share rounds that the plan cannot have.

    Args:
        owner: the strategy, for the sentence.
        plan: of the rounds.
        unequal: how unequal workers share them, or None.
    """
    if unequal is None:
        return
    if not isinstance(unequal, Unequal):
        raise ValueError(f"{owner}(unequal={unequal!r}): give an instance, such as Unequal().")
    if unequal.grace is not None and plan.delay:
        raise ValueError(
            f"{owner}(delay={plan.delay}, unequal=Unequal(grace={unequal.grace!r})): a late "
            f"worker takes a result over when it comes, and the others after {plan.delay} steps; "
            f"use delay=0, or grace=None."
        )
    if unequal.grace is not None and plan.fragments > 1:
        raise ValueError(
            f"{owner}(fragments={plan.fragments}, unequal=Unequal(grace={unequal.grace!r})): a "
            f"late worker would miss only some of its parameters; use fragments=1, or grace=None."
        )
    if unequal.grace is not None and plan.moments is not None:
        raise ValueError(
            f"{owner}(moments={plan.moments!r}, unequal=Unequal(grace={unequal.grace!r})): a late "
            f"worker's moments would count though its steps do not; use moments=None, or "
            f"grace=None."
        )


def refuse_grace(owner: str, unequal: Unequal | None) -> None:
    """Raise ValueError for a grace window among processes, whose exchanges need all of them."""
    if unequal is not None and unequal.grace is not None:
        raise ValueError(
            f"{owner}(unequal=Unequal(grace={unequal.grace!r})): an exchange between processes "
            f"waits for all of them. Use grace=None with pace='measured', or "
            f"SimulatedLocalStepsStrategy to study late workers."
        )


def check_island(owner: str, island: int, unequal: Unequal | None) -> None:
    """Raise ValueError for a number of processes of a worker that cannot be had.

    Args:
        owner: the strategy, for the sentence.
        island: N, processes of a worker.
        unequal: how unequal workers share rounds, or None.
    """
    if isinstance(island, bool) or not isinstance(island, int) or island < 1:
        raise ValueError(
            f"{owner}(island={island!r}): give the number of processes that train as one worker, 1 "
            f"or more; use the number of devices of a node."
        )
    if island > 1 and unequal is not None:
        raise ValueError(
            f"{owner}(island={island}, unequal={unequal!r}): the processes of an island would "
            f"measure unlike speeds and count unlike tokens; leave unequal out."
        )


_AVERAGING = {"WeightAveraging", "StochasticWeightAveraging"}
"""Names, since there are two packages, and versions that lack one."""


def refuse_in_trainer(owner: str, trainer: Any, module: nn.Module) -> None:
    """Raise ValueError for settings of Trainer and module that local steps cannot obey."""
    if not trainer.lightning_module.automatic_optimization:
        raise ValueError(
            f"{owner} counts the steps of one optimizer, so it needs automatic optimization. Set "
            f"automatic_optimization = True. Join several optimizers: return Together([muon, "
            f"adamw]). For one loss per optimizer, as in a GAN, use CompressedDDPStrategy."
        )
    refuse_synchronised_norms(owner, module)
    for callback in trainer.callbacks:
        names = {cls.__name__ for cls in type(callback).__mro__}
        if "ModelPruning" in names:
            raise ValueError(
                f"{type(callback).__name__} prunes by a worker's own weights, which differ between "
                f"workers with {owner}, and so would what each prunes; remove the callback and "
                f"prune after the fit, or use CompressedDDPStrategy."
            )
        if _AVERAGING & names:
            raise ValueError(
                f"{type(callback).__name__} averages a worker's own weights, which differ between "
                f"workers, and {owner} already averages over workers; remove the callback."
            )


def refuse_shards(owner: str, module: nn.Module, *, islands: bool) -> None:
    """Raise ValueError for a parameter in shards, as FSDP2 and tensor parallelism have them.

    ``islands``: the owner takes them as an island.
    """
    shard = next((n for n, p in module.named_parameters() if isinstance(p, DTensor)), None)
    if shard is not None:
        raise ValueError(
            f"{owner}({type(module).__name__}(...)): {shard} is a DTensor, so no process has a "
            f"worker's weights. Give each process the complete model"
            + (", or shard it by fully_shard among N ranks and give island=N." if islands else ".")
        )


def refuse_synchronised_norms(owner: str, module: nn.Module) -> None:
    """Raise ValueError for a layer that communicates in every forward pass."""
    for name, child in module.named_modules():
        if isinstance(child, nn.SyncBatchNorm):
            raise ValueError(
                f"{name} is SyncBatchNorm, which communicates in every forward pass, and {owner} "
                f"is there to avoid that; use BatchNorm, without Trainer(sync_batchnorm=True): its "
                f"running statistics are averaged with each exchange."
            )


_COMMUNICATING = {"ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"}
"""Names in ``torch.distributed.optim``, whose import has side effects."""
_GROUPS = {"ProcessGroup", "DeviceMesh"}
"""Names in ``torch.distributed``, which some builds of torch lack."""
_COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
"""Namespaces of the operators that ``torch.distributed`` calls; send and receive are there too."""


def refuse_optimizers(owner: str, optimizers: Iterable[Optimizer]) -> None:
    """Raise ValueError for an optimizer that cannot step alone, also if another one holds it.

    One that communicates in ``step`` is known by its class, or by an attribute: a process group or
    device mesh of several workers, which distributed Muon and Shampoo keep. One that averages its
    weights itself, as schedule-free ones do, is known by its methods ``train`` and ``eval``.
    """
    for optimizer in optimizers:
        for part in _with_wrapped(optimizer):
            classes = [
                c for c in type(part).__mro__ if c.__module__.startswith("torch.distributed")
            ]
            known = _COMMUNICATING & {cls.__name__ for cls in classes}
            if known:
                raise ValueError(_why_refused(owner, optimizer, f"is or holds a {known.pop()}"))
            if callable(getattr(part, "train", None)):  # and so it has eval() too
                raise ValueError(
                    f"{type(part).__name__} has train() and eval(), between which it moves the "
                    f"weights to their average, and with {owner} each worker would have "
                    f"another average. Use torch.optim.AdamW with a schedule, or "
                    f"CompressedDDPStrategy."
                )
            for name, value in getattr(part, "__dict__", {}).items():
                kinds = _GROUPS & {cls.__name__ for cls in type(value).__mro__}
                if kinds and value.size() > 1:
                    held = f"has a {kinds.pop()} of {value.size()} workers as {name}"
                    raise ValueError(_why_refused(owner, optimizer, held))


def _with_wrapped(optimizer: Any) -> list[Any]:
    """Return an optimizer and those that it holds, each once."""
    found: list[Any] = []
    left = [optimizer]
    while left:
        part = left.pop()
        if any(part is each for each in found):
            continue
        found.append(part)
        for value in getattr(part, "__dict__", {}).values():
            held = value.values() if isinstance(value, dict) else value
            several = held if isinstance(value, dict | list | tuple) else (value,)
            left += [each for each in several if isinstance(each, Optimizer)]
    return found


def _why_refused(owner: str, optimizer: Any, found: str) -> str:
    return (
        f"{type(optimizer).__name__} {found}, which communicates with other workers in each step. "
        f"With {owner} a worker makes its steps alone, and only weights are exchanged. Use an "
        f"optimizer for one worker, such as torch.optim.AdamW, or exchange gradients at each step, "
        f"with CompressedDDPStrategy or attach."
    )


class OwnSteps:
    """Hears a worker's optimizer step, and refuses one that communicates in its first step.

    Every worker refuses it at its own first collective, so that none waits for another. An
    optimizer that communicates in later steps only is not noticed.

    Torch calls an optimizer's hooks once more within a ``step`` that calls ``super().step()``. A
    step is heard once.

    Args:
        owner: the strategy or class, for the sentence.
        before: called before each step.
        after: called after each step.

    Attributes:
        begun: whether a first step has been made.
    """

    def __init__(
        self,
        owner: str,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self._owner, self._do_before, self._do_after = owner, before, after
        self.begun = False
        self._hooks: list[Any] = []
        self._depth = 0
        self._watch: _Watch | None = None

    def begin(self, optimizer: Optimizer) -> None:
        """Hear the steps of this optimizer from now on."""
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def end(self) -> None:
        """Hear no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._depth = [], 0
        self._leave()

    @contextlib.contextmanager
    def heard(self, optimizer: Optimizer) -> Iterator[None]:
        """Hear the steps within this."""
        self.begin(optimizer)
        try:
            yield
        finally:
            self.end()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not self._depth:
            self._do_before()
        self._depth += 1
        if self._depth > 1 or self.begun:
            return None
        self._watch = watch = _Watch(lambda found: _why_refused(self._owner, optimizer, found))
        args = tuple(watch.leaving(each) if callable(each) else each for each in args)
        if callable(kwargs.get("closure")):
            kwargs = kwargs | {"closure": watch.leaving(kwargs["closure"])}
        watch.__enter__()  # type: ignore[no-untyped-call]
        return args, kwargs

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._leave()
        self.begun = True
        self._do_after()

    def _leave(self) -> None:
        if self._watch is not None:
            self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._watch = None


class _Watch(TorchDispatchMode):
    """Raises ValueError at a collective of this thread; the exchange runs in another thread."""

    def __init__(self, why: Callable[[str], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._why = why

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COLLECTIVES:
            raise ValueError(self._why(f"calls {func}"))
        return func(*args, **(kwargs or {}))

    def leaving(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return the closure, run outside of this mode."""

        def outside(*args: Any, **kwargs: Any) -> Any:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            try:
                return closure(*args, **kwargs)
            finally:
                self.__enter__()  # type: ignore[no-untyped-call]

        return outside
