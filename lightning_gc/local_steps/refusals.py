"""Refuse modules, optimizers and steps that need other workers between two exchanges."""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_gc.core.refusal import refuse
from lightning_gc.core.saved_state import unsaved


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
            refuse(
                f"{name} is SyncBatchNorm, which communicates in every forward pass, and {owner} "
                f"is there to avoid that; use BatchNorm, without Trainer(sync_batchnorm=True): its "
                f"running statistics are averaged with each exchange"
            )


_COMMUNICATING = {"ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"}
"""Names in ``torch.distributed.optim``: its import has side effects."""
_GROUPS = {"ProcessGroup", "DeviceMesh"}
"""Names in ``torch.distributed``, which some builds of torch lack."""
_FILLING = "torch.distributed.checkpoint.state_dict"
"""Module with functions that make a step to create an optimizer's state."""
_COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of the operators that ``torch.distributed`` calls; send and receive are there too.

Those of ``_c10d_functional_autograd`` call these.
"""


@runtime_checkable
class _Averages(Protocol):
    """An optimizer that has two sets of weights, as schedule-free ones have."""

    def train(self) -> Any: ...
    def eval(self) -> Any: ...


def refuse_optimizers(owner: str, optimizers: Iterable[Optimizer]) -> None:
    """Raise ValueError for an optimizer that cannot step alone, also if another one holds it.

    One that communicates in ``step`` is known by its class, or by an attribute: a process group or
    device mesh of several workers, which distributed Muon and Shampoo keep. One that averages its
    weights itself, as schedule-free ones do, is known by its methods ``train`` and ``eval``. A
    framework's wrapper has both for whatever it holds, so the optimizer inside is asked.
    """
    for optimizer in optimizers:
        for part in with_held(optimizer):
            classes = [
                c for c in type(part).__mro__ if c.__module__.startswith("torch.distributed")
            ]
            known = _COMMUNICATING & {cls.__name__ for cls in classes}
            if known:
                found = f"is or holds a {known.pop()}"
                raise ValueError(_why_refused(owner, optimizer, optimizer, found))
            if isinstance(part, _Averages) and innermost(part) is part:
                refuse(
                    f"{type(part).__name__} has train() and eval(), between which it moves the "
                    f"weights to their average, and with {owner} each worker would have "
                    f"another average. Use torch.optim.AdamW with a schedule, or "
                    f"CompressedDDPStrategy"
                )
            for name, value in getattr(part, "__dict__", {}).items():
                kinds = _GROUPS & {cls.__name__ for cls in type(value).__mro__}
                if kinds and value.size() > 1:
                    held = f"has a {kinds.pop()} of {value.size()} workers as {name}"
                    raise ValueError(_why_refused(owner, optimizer, part, held))


def innermost(optimizer: Any) -> Any:
    """Return the optimizer with the hooks that torch calls; Fabric and Accelerate hand on steps."""
    while HOOKS not in vars(optimizer) and isinstance(
        getattr(optimizer, "optimizer", None), Optimizer
    ):
        optimizer = optimizer.optimizer
    return optimizer


HOOKS = "_optimizer_step_post_hooks"
"""Attribute of every optimizer that has the hooks torch calls."""


def with_held(optimizer: Any) -> list[Any]:
    """Return an optimizer and those that it holds, each once."""
    found: list[Any] = []
    left = [optimizer]
    while left:
        part = left.pop(0)
        if any(part is each for each in found):
            continue
        found.append(part)
        for value in getattr(part, "__dict__", {}).values():
            held = value.values() if isinstance(value, dict) else value
            several = held if isinstance(value, dict | list | tuple) else (value,)
            left += [each for each in several if isinstance(each, Optimizer)]
    return found


def _why_refused(owner: str, optimizer: Any, part: Any, found: str) -> str:
    name = type(part).__name__
    within = "" if part is optimizer else f" in {type(optimizer).__name__}"
    use = "an optimizer for one worker, such as torch.optim.AdamW"
    if "muon" in name.lower():
        use = "a Muon for one worker, such as torch.optim.Muon or SingleDeviceMuon"
    return (
        f"{name}{within} {found}, which communicates with other workers in each step. With {owner} "
        f"a worker makes its steps alone, and only weights are exchanged. Use {use}, or exchange "
        f"gradients at each step, with CompressedDDPStrategy or attach."
    )


class OwnSteps:
    """Hears all optimizer steps of the exchanged weights: the worker's own count, others end it.

    The own optimizers are those given. An optimizer that one of them holds counts as well, if it
    steps all parameters, as ``SAM.base_optimizer`` does when ``second_step`` is called by hand.

    Refused are, before they move a weight: in the first step a collective, which every worker calls
    first, so that none waits for another; the step of any other optimizer of exchanged weights, as
    one made for a warm restart, and of a part by itself, as within the backward pass. An optimizer
    that communicates in later steps only is not noticed.

    Torch calls an optimizer's hooks once more within a ``step`` that calls ``super().step()``, and
    those of held ones. A step is heard once. One that has raised is forgotten.

    Refused after the first step is a Python object in an optimizer's state, if checkpoints are to
    have each worker's: they hold no code. A step by which ``torch.distributed.checkpoint`` creates
    a state does not count.

    Warns of ``every`` steps in a row, or 2, that had no gradient and changed no weight.

    Args:
        owner: the strategy or class, for the sentence.
        names: exchanged parameter -> name.
        every: returns H, times the workers that make steps here.
        before: called before each step.
        after: called after each step.
        counted: whether a step of any optimizer counts now.
        fix: what to do about the step of an optimizer that was not given.
        saved: whether checkpoints have each worker's optimizers.

    Attributes:
        begun: whether a first step has been made.
    """

    def __init__(
        self,
        owner: str,
        names: Mapping[Tensor, str],
        every: Callable[[], int],
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
        counted: Callable[[], bool] = lambda: False,
        fix: str = "",
        saved: bool = True,
    ) -> None:
        self._owner, self._names, self._every, self._saved = owner, names, every, saved
        self._do_before, self._do_after, self._counted, self._fix = before, after, counted, fix
        self.begun = False
        self._given: Sequence[Optimizer] = ()
        self._parts: Sequence[Optimizer] = ()  # and those that they hold
        self._hooks: list[Any] = []
        self._under_way: list[Optimizer] = []  # the outermost first
        self._frame: Any = None  # of the outermost's step
        self._watch: _Watch | None = None
        self._trains = True  # whether there were gradients before the step
        self._fills = False  # whether the step only creates the optimizer's state
        self._idle = self._versions = 0  # steps in a row without gradients; after the last of them

    @property
    def inside(self) -> bool:
        """Whether a step is under way."""
        return bool(self._under_way)

    def begin(self, optimizers: Iterable[Optimizer]) -> None:
        """Hear steps from now on; these are the worker's own optimizers."""
        self._given = tuple(optimizers)
        self._parts = [part for each in self._given for part in with_held(each)]
        # A compiled step would compile hooks too, and with them the exchange.
        before, after = torch.compiler.disable(self._before), torch.compiler.disable(self._after)
        for part in self._parts:
            if HOOKS in vars(part):
                self._hooks += [
                    part.register_step_pre_hook(before),
                    part.register_step_post_hook(after),
                ]
        # Torch keeps this one for the process, and must not keep the worker with it.
        hear = torch.compiler.disable(partial(_call, weakref.WeakMethod(self._hear)))
        self._hooks.append(register_optimizer_step_pre_hook(hear))

    def end(self) -> None:
        """Hear no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._forget()

    def _forget(self) -> None:
        self._under_way, self._frame = [], None
        if self._watch is not None:
            self._watch.end()
        self._watch = None

    def _hear(self, optimizer: Optimizer) -> None:
        """Refuse a step of exchanged weights that does not count."""
        if any(optimizer is part for part in self._parts) or self.inside or self._counted():
            return
        name = self._stepped_by(optimizer)
        if name is not None:
            self._refuse(optimizer, name, self._fix)

    def _stepped_by(self, optimizer: Optimizer) -> str | None:
        """Return the name of an exchanged weight that the optimizer steps, if there is one."""
        params = (param for group in optimizer.param_groups for param in group["params"])
        return next((self._names[param] for param in params if param in self._names), None)

    def _refuse(self, optimizer: Optimizer, name: str | None, fix: str) -> None:
        given = " and ".join(type(each).__name__ for each in self._given)
        raise RuntimeError(
            f"{self._owner} counts the steps of the {given} that it was given, but another "
            f"{type(optimizer).__name__} steps {name}. Such steps would not count, and workers "
            f"would drift apart. {fix}."
        )

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self.inside and not _on_stack(self._frame):
            self._forget()  # it has raised
        if not self.inside:
            self._begin_step(optimizer, bool(args) or kwargs.get("closure") is not None)
        self._under_way.append(optimizer)
        if len(self._under_way) > 1 or self.begun:
            return None
        self._watch = watch = _Watch(self._why, partial(_on_stack, self._frame))
        args = tuple(watch.leaving(each) if callable(each) else each for each in args)
        if callable(kwargs.get("closure")):
            kwargs = kwargs | {"closure": watch.leaving(kwargs["closure"])}
        return args, kwargs

    def _begin_step(self, optimizer: Optimizer, closure: bool) -> None:
        if not any(optimizer is each for each in self._given):
            own = {p for group in optimizer.param_groups for p in group["params"]}
            whole = next(each for each in self._given if optimizer in with_held(each))
            params = (p for group in whole.param_groups for p in group["params"])
            if any(p in self._names and p not in own for p in params):
                fix = f"Call the step() of {type(whole).__name__} that holds it"
                self._refuse(optimizer, self._stepped_by(optimizer), fix)
        if _is_capturing(self._names):
            raise RuntimeError(
                f"{self._owner} counts the steps of {type(optimizer).__name__}, but this one is "
                f"captured in a CUDA graph, whose replays call no step. Capture the forward and "
                f"backward pass only, and call step() after each replay."
            )
        self._fills = _fills_state(optimizer)
        if not self._fills:
            self._do_before()
        self._frame = threading.get_ident(), _calling_frame()
        self._trains = not closure and self._has_gradients

    def _why(self, found: str) -> str:
        outer, part = self._under_way[0], self._under_way[-1]
        return _why_refused(self._owner, outer, part, found)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._under_way.pop()
        if self._under_way:
            return
        self._forget()
        if self._fills:
            return
        if not self.begun and self._saved:
            _refuse_objects(self._owner, self._given)
        self.begun = True
        if self._trains or self._has_gradients:
            self._idle = 0
        else:
            self._note_idle(optimizer)
        self._do_after()

    @property
    def _has_gradients(self) -> bool:
        return any(param.grad is not None for param in self._names)

    def _note_idle(self, optimizer: Optimizer) -> None:
        """Count a step that had no gradient; one that changes weights all the same trains."""
        before, self._versions = self._versions, versions(self._names)
        self._idle = self._idle + 1 if not self._idle or before == self._versions else 0
        if self._idle == max(self._every(), 2):
            warnings.warn(
                f"{self._owner} has counted {self._idle} steps of {type(optimizer).__name__} in a "
                f"row in which no exchanged weight had a gradient, so nothing was trained. Call "
                f"backward before step, on the model and the optimizer that {self._owner} has.",
                stacklevel=2,
            )


def _fills_state(optimizer: Optimizer) -> bool:
    """Return whether ``torch.distributed.checkpoint`` makes a step to create an optimizer's state.

    It does so at a rate of 0 with gradients of zeros. A step of training may look alike. Its rate
    is a number or on the host: one on a device is not read.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    if optimizer.state or any(getattr(r, "is_cuda", False) or float(r) != 0 for r in rates):
        return False
    here: Any = sys._getframe(1)
    while here is not None and here.f_globals.get("__name__") != _FILLING:
        here = here.f_back
    return here is not None


def _refuse_objects(owner: str, optimizers: Iterable[Optimizer]) -> None:
    """Raise ValueError for an optimizer with state that checkpoints could only pickle."""
    for optimizer in optimizers:
        try:
            found = unsaved(optimizer.state_dict())
        except Exception:  # of the optimizer's own code; the checkpoint says so, on all workers
            continue
        if found:
            refuse(
                f"{owner}: the state of {type(optimizer).__name__} has {found}, and checkpoints "
                f"of each worker hold tensors, numbers, texts, lists and dicts only. Keep it "
                f"outside of the optimizer's state, or as one of these"
            )


def _call(method: weakref.WeakMethod[Any], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Call a method of an object that may be gone."""
    bound = method()
    if bound is not None:
        bound(optimizer)


def _is_capturing(params: Iterable[Tensor]) -> bool:
    on_cuda = any(param.is_cuda for param in params)
    return on_cuda and torch.cuda.is_current_stream_capturing()


def _calling_frame() -> Any:
    """Return the frame of the step that has called a hook of this module."""
    here: Any = sys._getframe(1)
    while here.f_globals["__name__"] in (__name__, "torch._dynamo.eval_frame"):
        here = here.f_back
    return here


def _on_stack(frame: tuple[int, Any]) -> bool:
    """Return whether a frame of a thread is being run, as seen from it; True from other threads."""
    thread, wanted = frame
    if thread != threading.get_ident():
        return True
    here: Any = sys._getframe(1)
    while here is not None and here is not wanted:
        here = here.f_back
    return here is not None


def versions(params: Iterable[Tensor]) -> int:
    """Return a number that changes when torch changes a tensor in place; no tensor is read."""
    return sum(param._version for param in params)


def warn_of_one_round(owner: str, steps: int, every: int) -> None:
    """Warn of a run of fewer steps than a round has, if it is one."""
    if steps < every:
        warnings.warn(
            f"{owner}(every={every}): the run has {steps} steps, fewer than a round, so workers "
            f"exchange only once, at its end. Use every={max(steps // 10, 1)}, say.",
            stacklevel=2,
        )


class UncountedPasses:
    """Warns of weights that are trained without a step that counts, as by a loop of its own.

    A forward pass with gradients that follows another one without a step between them is no fault:
    micro-batches are accumulated. It is one if weights have changed in between again and again.
    ``.data`` is not seen to change.

    In a loop that makes a step after each pass this costs one addition for each.

    Args:
        owner: the class, for the sentence.
        names: exchanged parameter -> name.
        every: returns H.
        inside: whether a step is under way; its closure may run passes.
        first: called before the first pass after a step.
    """

    def __init__(
        self,
        owner: str,
        names: Mapping[Tensor, str],
        every: Callable[[], int],
        inside: Callable[[], bool],
        first: Callable[[], None],
    ) -> None:
        self._owner, self._names, self._every, self._inside = owner, names, every, inside
        self._first = first
        self._passes = self._changes = self._versions = 0

    def step(self) -> None:
        """Note that a step has been counted."""
        self._passes = self._changes = 0

    def before(self, module: nn.Module) -> None:
        """Note that a forward pass begins."""
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        if self._inside():
            return
        self._passes += 1
        if self._passes == 1:
            self._first()
        if self._passes > 2 and versions(self._names) != self._versions:
            self._changes += 1
        if self._changes and self._passes > self._every():
            self.step()
            warnings.warn(
                f"{self._owner}: the weights have changed in {self._every()} or more forward "
                f"passes without a step of its optimizer, so nothing was exchanged. Train by the "
                f"optimizer that {self._owner} was given.",
                stacklevel=2,
            )

    def after(self, module: nn.Module) -> None:
        """Note that a forward pass ends, which may itself change weights, as by ``max_norm``."""
        if not torch.compiler.is_compiling() and self._passes > 1:
            self._versions = versions(self._names)


class _Watch:
    """Raises ValueError at a collective of this thread; the exchange runs in another thread.

    The operators of collectives get a kernel of ours while some step is watched; nothing else does.
    A mode of torch would see all operators, and ``torch.compile`` gives a function up for good that
    it meets within one.

    Args:
        why: returns the sentence.
        runs: whether the step is still under way; it may have raised.
    """

    _watching: ClassVar[weakref.WeakSet[_Watch]] = weakref.WeakSet()
    _kernels: ClassVar[list[torch.library.Library]] = []

    def __init__(self, why: Callable[[str], str], runs: Callable[[], bool]) -> None:
        self._why, self._runs = why, runs
        self._thread = threading.get_ident()
        self._away = 0  # closures under way
        self._watching.add(self)
        if not self._kernels:
            self._kernels.extend(torch.library.Library(name, "IMPL") for name in _COLLECTIVES)
            for name in torch._C._dispatch_get_all_op_names():
                self._listen_to(name)

    @classmethod
    def _listen_to(cls, name: str) -> None:
        """Call ``_hear`` before an operator, if it begins a collective."""
        space, _, operator = name.partition("::")
        library = next((each for each in cls._kernels if each.ns == space), None)
        if library is None or operator == "wait_tensor":
            return
        packet, _, overload = operator.partition(".")
        found = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")

        def before_autograd(keys: Any, *args: Any, **kwargs: Any) -> Any:
            cls._tell(found)
            return found.redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)

        def on_device(*args: Any, **kwargs: Any) -> Any:
            cls._tell(found)
            return found._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)

        # Where torch has no kernel of its own, so that none is replaced.
        if space == "c10d":
            library.impl(operator, before_autograd, "Autograd", with_keyset=True)
        elif torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeExplicitAutograd"):
            for device in ("CPU", "CUDA"):
                library.impl(operator, on_device, device)

    @classmethod
    def _tell(cls, found: Any) -> None:
        for watch in tuple(cls._watching):
            watch._hear(found)

    def _hear(self, found: Any) -> None:
        if threading.get_ident() == self._thread and not self._away and self._runs():
            raise ValueError(self._why(f"calls {found}"))

    def end(self) -> None:
        """Watch no more."""
        self._watching.discard(self)
        while self._kernels and not self._watching:
            self._kernels.pop()._destroy()

    def leaving(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return the closure, which is not watched."""

        def outside(*args: Any, **kwargs: Any) -> Any:
            self._away += 1
            try:
                return closure(*args, **kwargs)
            finally:
                self._away -= 1

        return outside
