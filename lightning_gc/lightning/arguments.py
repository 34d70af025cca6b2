"""Name the arguments of strategies; refuse unknown ones, and those of hooks or a DDP wrapper.

Choose DDP's ``bucket_cap_mb`` on CUDA.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Literal, TypedDict

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gc.checkpoint.side_file_store import KeptFields
from lightning_gc.compressors import COMPRESSORS, Compressor
from lightning_gc.core.combinations import judge
from lightning_gc.core.notices import say
from lightning_gc.core.settings import left_out, parameters_of, unknown_argument
from lightning_gc.exchange.bucketing import RECORDED, WRITTEN, cap_on_cuda, caps, layout
from lightning_gc.exchange.compression import CompressionFields
from lightning_gc.exchange.validation import check_timeout
from lightning_gc.lightning.api import StrategyAPI
from lightning_gc.local_steps import RoundFields

_HOOK_ARGUMENTS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")


class DDPArguments(TypedDict, total=False):
    """Arguments of both ``DDPStrategy`` and of ``DistributedDataParallel``, for type checkers.

    Arguments of hooks are refused, and so are arguments that an older torch does not know.
    """

    accelerator: Any
    parallel_devices: Any
    cluster_environment: Any
    checkpoint_io: Any
    process_group_backend: str | None
    timeout: timedelta | None
    start_method: Literal["popen", "spawn", "fork", "forkserver"]
    broadcast_buffers: bool | None
    init_sync: bool
    bucket_cap_mb: float | None
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    delay_all_reduce_named_params: Any
    param_to_hook_all_reduce: Any
    device_mesh: Any
    skip_all_reduce_unused_params: bool
    bucket_cap_mb_list: Any
    batched_grad_copy: bool
    forward_sync_buffers: bool | None


class DDPFields(CompressionFields, KeptFields, DDPArguments, total=False):
    """Arguments of ``CompressedDDPStrategy`` that are given by name."""

    precision_plugin: Any


class LocalStepsFields(DDPFields, RoundFields, total=False):
    """Arguments of ``LocalStepsStrategy`` that are given by name."""


class FabricFields(CompressionFields, DDPArguments, total=False):
    """Arguments of ``CompressedFabricStrategy`` that are given by name."""

    state: Literal["full", "mean", "off"]
    precision: Any


class ShardedArguments(TypedDict, total=False):
    """Arguments of ``ModelParallelStrategy``, for type checkers."""

    save_distributed_checkpoint: bool
    process_group_backend: str | None
    timeout: timedelta | None


class HSDPFields(CompressionFields, KeptFields, ShardedArguments, total=False):
    """Arguments of ``CompressedHSDPStrategy`` that are given by name."""


class FSDPFields(CompressionFields, ShardedArguments, total=False):
    """Arguments of ``CompressedFSDPStrategy`` that are given by name."""

    state: Literal["full", "mean", "off"]


class SimulatedFields(CompressionFields, KeptFields, total=False):
    """Arguments of ``SimulatedDDPStrategy`` by name, with ``SingleDeviceStrategy``'s."""

    device: Any
    accelerator: Any
    checkpoint_io: Any
    precision_plugin: Any


class SimulatedLocalStepsFields(SimulatedFields, RoundFields, total=False):
    """Arguments of ``SimulatedLocalStepsStrategy`` that are given by name."""


def refuse_other_hooks(owner: str, ddp_kwargs: Mapping[str, Any], instead: str) -> None:
    """Raise ValueError if an argument registers another hook than the gradient exchange.

    Args:
        owner: the strategy's name.
        ddp_kwargs: arguments of DDPStrategy and DistributedDataParallel.
        instead: what to write for DDP's mixed precision.
    """
    taken = [name for name in _HOOK_ARGUMENTS if ddp_kwargs.get(name) is not None]
    hook = taken[0] if taken else ""
    mixed_precision, value = ddp_kwargs.get("mixed_precision"), ddp_kwargs.get(hook)
    given = {"hook": hook, "value": value, "mixed_precision": mixed_precision}
    judge("DistributedDataParallel", owner, **given, instead=instead)


def refuse_wrapper_arguments(owner: str, given: Iterable[str], *, wraps: bool = False) -> None:
    """Raise ValueError for arguments of ``DistributedDataParallel`` and of its hooks.

    Args:
        owner: a strategy without that wrapper, or with it inside an island.
        given: names of arguments that are not its own, but for those with their default.
        wraps: whether it has the wrapper, and only refuses hooks and another process group.
    """
    wrappers = list(inspect.signature(DistributedDataParallel.__init__).parameters)[1:]
    for name in given:
        hooks = {"hooks": _HOOK_ARGUMENTS, "wrappers": wrappers, "wraps": wraps}
        judge("Arguments of DistributedDataParallel", owner, name=name, **hooks)


@contextlib.contextmanager
def bucket_size(strategy: StrategyAPI, module: nn.Module, *, waits: bool) -> Iterator[None]:
    """Within the body, give DDP a ``bucket_cap_mb`` on CUDA, unless the user gives a size.

    The size follows from the shapes and ``waits``, so it is equal on all workers. If it is not
    DDP's, worker 0 logs it.

    Args:
        strategy: with the user's arguments of DDP.
        module: to be wrapped.
        waits: whether an exchange can make the host wait, so that it is never recorded. If this
            depends on the number of workers, so does the size.
    """
    given = strategy._ddp_kwargs
    named = ("bucket_cap_mb", "bucket_cap_mb_list")  # the list since torch 2.13
    if strategy.root_device.type != "cuda" or any(given.get(n) is not None for n in named):
        yield
        return
    nbytes = [p.numel() * p.element_size() for p in module.parameters() if p.requires_grad][::-1]
    cap = cap_on_cuda(nbytes, WRITTEN if waits else RECORDED)
    if cap is None:
        yield
        return
    if strategy.global_rank == 0:
        ours, usual = (len(layout(nbytes, caps(each))) for each in (cap, None))
        say(
            "Buckets of %d MiB, %d in place of %d, because each takes the GPU's host time. "
            "bucket_cap_mb sets another size.",
            *(cap, ours, usual),
        )
    strategy._ddp_kwargs = given | {"bucket_cap_mb": cap}
    try:
        yield
    finally:
        strategy._ddp_kwargs = given  # another module may get another size


def refuse_unknown(
    strategy: type,
    compressor: Compressor | str,
    given: Mapping[str, Any],
    *takes_the_rest: Callable[..., Any],
) -> None:
    """Raise ValueError for an argument that nothing between ``strategy`` and its end takes.

    Args:
        strategy: a class. Its ``__init__`` and its bases' hand on arguments that they do not know.
        compressor: as given; its own fields are not called misspelt.
        given: the arguments.
        takes_the_rest: what gets those that no base takes.
    """
    check_timeout(strategy.__name__, given.get("timeout"))
    makers = (*_makers(strategy), *takes_the_rest)
    left = {name for each in makers for name in left_out(each)}
    known = [name for each in makers for name in _arguments(each) if name not in left]
    for name, value in given.items():
        if name not in known:
            field = _of_compressor(compressor, name, value)
            raise ValueError(unknown_argument(strategy, name, known, field))


def _of_compressor(compressor: Compressor | str, name: str, value: Any) -> str:
    """Return how to set the compressor's field of this name, if it has one."""
    named = COMPRESSORS.get(compressor) if isinstance(compressor, str) else None
    cls = type(compressor.method) if isinstance(compressor, Compressor) else named
    if cls is None or name not in getattr(cls, "__dataclass_fields__", ()):
        return ""
    return f"; give an instance: {cls.__name__}({name}={value!r})"


def changed(
    strategy: type, given: Mapping[str, Any], *takes_the_rest: Callable[..., Any]
) -> dict[str, Any]:
    """Return the arguments with another value than the default: LightningCLI gives them all.

    Args:
        strategy: as for ``refuse_unknown``, like the next two; its own defaults come first.
        given: names of the arguments and their values.
        takes_the_rest: what gets those that no base takes.
    """
    defaults: dict[str, Any] = {}
    for each in reversed((*_makers(strategy), *takes_the_rest)):
        defaults |= {name: argument.default for name, argument in _arguments(each).items()}
    return {
        name: value
        for name, value in given.items()
        if name not in defaults or not _same(value, defaults[name])
    }


def _same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))


def _makers(strategy: type) -> list[Callable[..., Any]]:
    return [vars(cls)["__init__"] for cls in strategy.__mro__[:-1] if "__init__" in vars(cls)]


def _arguments(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {n: each for n, each in parameters_of(function).items() if each.kind not in several}
