"""Define the baselines: no synchronisation (the limit), plain DDP, torch's hooks; their bytes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lightning_gc.core.refusal import refuse
from lightning_gc.flavours import public_class
from lightning_gc.lightning.ddp import CompressedDDP
from lightning_gc.methods.lightning_flavour import pl
from lightning_gc.methods.method import Method, parse_method
from lightning_gc.transports.base import all_reduce_bytes

NONE, PLAIN = "no synchronisation", "plain DDP"
FP16, POWER_SGD = "torch fp16 hook", "torch PowerSGD hook"
RANK = 2  # of PowerSGD
BF16 = "torch bf16 hook"
NO_EXCHANGE = "DDP without an exchange"
BASELINES = (NONE, PLAIN, FP16, POWER_SGD)


def baselines(process_group_backend: str) -> tuple[str, ...]:
    """Return what is always measured; torch refuses its bf16 hook over Gloo."""
    return BASELINES if process_group_backend == "gloo" else (*BASELINES[:3], BF16, POWER_SGD)


def keep_local(state, bucket):  # type: ignore[no-untyped-def]
    """Hook that sends nothing. It has no annotations, because DDP would check them."""
    grad = bucket.buffer()
    devices = [grad.device] if grad.device.type == "cuda" else []
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(grad)
    return future


_HOOKS: dict[str, Any] = {
    FP16: default_hooks.fp16_compress_hook,
    BF16: default_hooks.bf16_compress_hook,
    NO_EXCHANGE: keep_local,
}


class HookStrategy(pl.strategies.DDPStrategy):
    """DDP with one of torch's communication hooks, on CPU too, where Lightning registers none."""

    def __init__(self, hook: tuple[Any, Any], **settings: Any) -> None:
        super().__init__(**settings)
        self.hook = hook

    def _register_ddp_hooks(self) -> None:
        self.model.register_comm_hook(*self.hook)  # type: ignore[union-attr, operator]


class UnsynchronisedStrategy(pl.strategies.DDPStrategy):
    """Trains each worker alone on its share of the data."""

    def configure_ddp(self) -> None:
        """Do not wrap the module in DDP."""

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """Return this worker's value, also for ``self.log(..., sync_dist=True)``."""
        return tensor


def baseline_strategy(method: str, process_group_backend: str, **settings: Any) -> Any:
    """Return a new strategy of a baseline.

    Args:
        method: one of ``BASELINES``, ``BF16`` or ``NO_EXCHANGE``.
        process_group_backend: ``"gloo"`` or ``"nccl"``.
        settings: further ones of ``DDPStrategy``.
    """
    settings["process_group_backend"] = process_group_backend
    if method == NONE:
        return UnsynchronisedStrategy(**settings)
    if method == PLAIN:
        return pl.strategies.DDPStrategy(**settings)
    if method in _HOOKS:
        return HookStrategy((None, _HOOKS[method]), **settings)
    if process_group_backend == "gloo":
        # PowerSGD chains callbacks on Gloo's futures; with several buckets these can dead-lock.
        settings["bucket_cap_mb"] = 10_000
    state = powerSGD_hook.PowerSGDState(None, RANK, start_powerSGD_iter=2)
    return HookStrategy((state, powerSGD_hook.powerSGD_hook), **settings)


def computed_bytes(method: str, parameters: Iterable[Tensor], workers: int) -> int:
    """Return the gradient bytes that one worker sends in a step, for a ring all-reduce.

    Args:
        method: one of ``BASELINES``, ``BF16`` or ``NO_EXCHANGE``.
        parameters: parameters with gradients, which have the same dtype.
        workers: W.
    """
    sizes = {
        NONE: lambda p: 0,
        NO_EXCHANGE: lambda p: 0,
        PLAIN: lambda p: p.numel() * p.element_size(),
        FP16: lambda p: p.numel() * 2,
        BF16: lambda p: p.numel() * 2,
        POWER_SGD: lambda p: low_rank_numel(p) * p.element_size(),
    }
    return all_reduce_bytes(sum(map(sizes[method], parameters)), workers)


def low_rank_numel(tensor: Tensor) -> int:
    """Return the elements of P and Q that PowerSGD's hook sends for a gradient."""
    rows = tensor.shape[0] if tensor.dim() else 1
    columns = tensor.numel() // max(rows, 1)
    low = (rows + columns) * min(rows, columns, RANK)
    # PowerSGD's ``min_compression_rate``: tensors that would shrink less are sent dense.
    return low if low * 2 < tensor.numel() else tensor.numel()


DEFAULT = ("cast", "qsgd", "topk", "powersgd:rank=2")


def select_methods(words: Sequence[str], known: Mapping[str, Method]) -> dict[str, Method]:
    """Return the methods that words name, and refuse those that cannot work.

    Args:
        words: each a method of the file, a compressor's name, or ``name:field=value,...``, where
            ``memory`` and ``scheme`` may stand among the fields.
        known: the methods of the file.

    Raises:
        ValueError: an unknown name or field, a value or combination that is refused, local steps.
    """
    methods = {word: known.get(word) or parse_method(word) for word in words}
    for word, method in methods.items():
        if method.rounds is not None or method.rounds_space:
            refuse(
                f"{word} has local steps (rounds): most of its steps exchange nothing, so seconds "
                "per step do not compare. Leave it out here. lightning-gc tune compares it"
            )
        make_strategy(method)
    return methods


def make_strategy(method: Method, **settings: Any) -> Any:
    """Return a new strategy for a method; fields that are not fixed keep their defaults."""
    return public_class(CompressedDDP)(
        method.make_compressor({}),
        memory=method.memory,
        scheme=method.scheme,
        controller=method.controller,
        **settings,
    )
