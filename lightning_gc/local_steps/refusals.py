"""Refusals of local steps: settings, callbacks and optimizers that cannot work with them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gc.compressors import Compressor
from lightning_gc.controllers import Controller
from lightning_gc.exchange.workers import Configuration
from lightning_gc.local_steps.round_plan import OuterSGD, RoundPlan
from lightning_gc.memories import Memory


def refuse_settings(
    owner: str,
    compressor: Compressor,
    memory: Memory,
    controller: Controller | None,
    outer: OuterSGD,
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
            f"{owner}({compressor!r}): its workers vote, and the result has equal magnitudes, so "
            f"it is not the mean of their differences of weights; use EFSignSGD() for signs with "
            f"magnitudes, or QSGD(4)."
        )
    if memory.lr_aware:
        raise ValueError(
            f"{owner}(memory={memory!r}): differences of weights contain the learning rate "
            f"already, so errors must not follow it; use memory=ErrorFeedback()."
        )
    if memory.lookahead or memory.reads_weights:
        raise ValueError(
            f"{owner}(memory={memory!r}): it changes gradients by weights or weights by errors at "
            f"each optimizer step, but weights are exchanged only every H steps; use "
            f"memory=ErrorFeedback()."
        )
    if outer.momentum:
        try:
            memory.check_optimizer({"momentum": outer.momentum})
        except ValueError:
            raise ValueError(
                f"{owner}(memory={memory!r}, outer={outer!r}): the memory has the outer momentum; "
                f"use outer=OuterSGD(lr={outer.lr!r}), or memory=ErrorFeedback()."
            ) from None
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
) -> None:
    """Raise ValueError for settings that rounds of changing members cannot obey.

    Args:
        owner: the strategy, for the sentence.
        elastic: as the user has set it.
        plan: when what is exchanged.
        controller: of levels, or None.
        configuration: of the exchange.
        verify: what workers compare.
    """
    if plan.delay or plan.fragments > 1:
        raise ValueError(
            f"{owner}(elastic={elastic!r}, delay={plan.delay}, fragments={plan.fragments}): an "
            f"elastic round exchanges all weights and waits for the result; use delay=0 and "
            f"fragments=1."
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
            f"{owner}(elastic={elastic!r}, scheme={configuration.scheme!r}): its nodes need a "
            f"fixed number of workers; use AllGather() or TwoShot()."
        )


_AVERAGING = {"WeightAveraging", "StochasticWeightAveraging"}
"""Names, since there are two packages, and versions that lack one."""


def refuse_in_trainer(owner: str, trainer: Any, module: nn.Module) -> None:
    """Raise ValueError for settings of Trainer and module that local steps cannot obey."""
    if not trainer.lightning_module.automatic_optimization:
        raise ValueError(
            f"{owner} counts the steps of one optimizer, so it needs automatic optimization. Set "
            f"automatic_optimization = True, or use CompressedDDPStrategy."
        )
    for name, child in module.named_modules():
        if isinstance(child, nn.SyncBatchNorm):
            raise ValueError(
                f"{name} is SyncBatchNorm, which communicates in every forward pass, and {owner} "
                f"is there to avoid that; use BatchNorm, without Trainer(sync_batchnorm=True): its "
                f"running statistics are averaged with each exchange."
            )
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


_COMMUNICATING = {"ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"}
"""Names in ``torch.distributed.optim``, whose import has side effects."""
_COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
"""Namespaces of the operators that ``torch.distributed`` calls; send and receive are there too."""


def refuse_communicating(owner: str, optimizers: Iterable[Optimizer]) -> None:
    """Raise ValueError for a class of torch's that communicates in ``step``, also if wrapped."""
    for optimizer in optimizers:
        for part in _with_wrapped(optimizer):
            classes = [
                c for c in type(part).__mro__ if c.__module__.startswith("torch.distributed")
            ]
            known = _COMMUNICATING & {cls.__name__ for cls in classes}
            if known:
                raise ValueError(_why_refused(owner, optimizer, f"is or holds a {known.pop()}"))


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
        f"With {owner} a worker makes its steps alone, and the weights are exchanged by the "
        f"strategy. Return the optimizer for one worker, such as torch.optim.AdamW, from "
        f"configure_optimizers, or use CompressedDDPStrategy."
    )


class FirstStep:
    """Refuses an optimizer that communicates in its first step, before the first collective.

    Every worker refuses it at its own first collective, so that none waits for another. An
    optimizer that communicates in later steps only is not noticed.

    Args:
        owner: the strategy's name.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self.over = False

    @contextlib.contextmanager
    def watched(self, optimizer: Optimizer) -> Iterator[None]:
        """Watch ``optimizer.step`` within this, but not its closure, which trains the module."""
        before = vars(optimizer).get(
            "step"
        )  # a scheduler's wrapper is the object's, not the class's
        step = optimizer.step

        @functools.wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            watch = _Watch(lambda found: _why_refused(self._owner, optimizer, found))
            args = tuple(watch.leaving(each) if callable(each) else each for each in args)
            if callable(kwargs.get("closure")):
                kwargs["closure"] = watch.leaving(kwargs["closure"])
            with watch:
                output = step(*args, **kwargs)
            self.over = True
            return output

        optimizer.step = watched  # type: ignore[method-assign]
        try:
            yield
        finally:
            if before is None:
                del optimizer.step
            else:
                optimizer.step = before  # type: ignore[method-assign]


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
