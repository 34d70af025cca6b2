"""Validation: refuse controllers, models and unequal workers before the first step."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _DDPSink
from torch.nn.parameter import is_lazy

from lightning_gc import controllers
from lightning_gc.compressors import Compressor
from lightning_gc.controllers import Controller
from lightning_gc.core.combinations import judge
from lightning_gc.core.refusal import refuse
from lightning_gc.core.registry import make, subclasses
from lightning_gc.kernels.dispatch import SWITCH
from lightning_gc.memories import Memory
from lightning_gc.transports.distributed import Distributed, gather_text

ELSEWHERE = {
    "error_feedback": "; memory=NoMemory() turns it off, memory=ErrorFeedback() on",
    "allow": '; give compressor="auto_feedback", or controller=Auto(allow=...)',
}
"""``elsewhere`` of strategies, and of ``attach``; see ``CheckedCalls``."""
_SAME_ARGUMENTS = "All workers need the same configuration; give them the same arguments."
_SAME_MODEL = (
    "All workers need the same parameters and buffers, in the same order, dtypes and shapes, and "
    "must train the same ones; make the model in the same way on all."
)


def check_controller(
    given: Controller | str | None,
    compressor: Compressor,
    memory: Memory,
    owner: str,
    *,
    rounds: bool = True,
) -> Controller | None:
    """Return the controller; refuse one of a wrong type, or that the configuration cannot have.

    Args:
        given: an instance, a name, or None.
        compressor: with its wrappers.
        memory: the error feedback rule.
        owner: the class or function with this argument.
        rounds: whether gradients are exchanged every H steps, so that a controller may set H.
    """
    if given is None:
        return None
    controller = make_controller(given, owner)
    controller.check(compressor.knob)
    judge("Controller", owner, controller=controller, memory=memory, rounds=rounds)
    return controller


def make_controller(given: Any, owner: str, argument: str = "controller") -> Controller:
    """Return a controller that is given as an instance or by name; refuse anything else."""
    known = subclasses(vars(controllers), Controller)
    if isinstance(given, Controller):
        return given
    if isinstance(given, str):
        found: Controller = make("controller", given, known, Controller)
        return found
    if isinstance(given, type) and issubclass(given, Controller):
        raise ValueError(
            f"{owner}({argument}={given.__name__}): that is a class; give an instance of it, "
            f"{given.__name__}(...)."
        )
    raise ValueError(
        f"{owner}({argument}={given!r}): give an instance, such as "
        f"lightning_gc.controllers.Fixed(0.01), or leave it out."
    )


_ADAM = {"betas", "eps", "amsgrad"}
"""Keys in ``param_groups`` of Adam and AdamW, but not of Lion, Muon and their like."""
_FEW = 0.1
"""Density from which on a sparsifier sends a seventh of the bytes or more."""


def check_optimizers(
    compressor: Compressor, memory: Memory, optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Refuse optimizers that conflict with the memory; warn on rank 0 of Adam's momentum.

    Measured with error feedback, beyond 7 times fewer bytes: docs/choosing-a-compressor.md.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group in groups:
        memory.check_optimizer(group)
    knob, first = compressor.knob, not dist.is_initialized() or dist.get_rank() == 0
    many = knob is not None and knob.field == "density" and (compressor.level or 0) >= _FEW
    few = compressor.traits.kind in ("sparsifier", "low rank") and memory.feeds_back and not many
    if first and few and any(group.keys() >= _ADAM and group["betas"][0] > 0 for group in groups):
        warnings.warn(
            f"Adam's momentum cost sparsifiers and low-rank methods such as {compressor} 0.3 to "
            f"0.5 nats: write betas=(0.0, 0.999), and tune the learning rate again.",
            stacklevel=2,
        )


def check_timeout(owner: str, timeout: Any) -> None:
    """Raise ValueError for a timeout that is not a ``timedelta``: torch fails late on a number."""
    if timeout is not None and not isinstance(timeout, timedelta):
        number = timeout if isinstance(timeout, int | float) else 60
        why = f"give a timedelta; write timeout=timedelta(seconds={number})"
        refuse(owner, why, timeout=timeout)


def refuse_lazy(module: nn.Module) -> None:
    """Raise ValueError for a lazy module: workers compare shapes before the first batch."""
    for name, child in module.named_modules():
        own = (*child.parameters(recurse=False), *child.buffers(recurse=False))
        if any(is_lazy(tensor) for tensor in own):
            raise ValueError(
                f"{name or 'The module'} is {type(child).__name__}, whose tensors have no shape "
                f"before a first forward pass, but workers compare shapes before training. Give "
                f"its sizes, or run a batch through the model in __init__ or configure_model."
            )


def refuse_unknown_device(device: torch.device) -> None:
    """Raise ValueError for a device that is neither the host nor CUDA, which includes ROCm."""
    if device.type not in ("cpu", "cuda"):
        why = "has no float64" if device.type == "mps" else "has never been tried"
        raise ValueError(
            f"Gradients are on {str(device)!r}, which {why}; lightning_gc works on 'cpu' and on "
            f"'cuda', NVIDIA's or AMD's. On this machine use Trainer(accelerator='cpu'), or in "
            f"plain torch move the module to the CPU."
        )


def refuse_sparse_gradients(module: nn.Module) -> None:
    """Raise ValueError if an embedding has sparse gradients, which are not flat."""
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
            raise ValueError(
                f"{name} is {type(child).__name__}(sparse=True). Sparse gradients cannot be "
                f"compressed; use sparse=False. TopK sends few of its elements anyway."
            )


def refuse_second_hook(ddp: DistributedDataParallel, *, closed: bool | None) -> None:
    """Raise RuntimeError if a module has a communication hook: DDP allows one, and keeps it.

    ``_apply_optimizer_in_backward`` and ``mixed_precision`` make DDP register one as well.
    ``_comm_hooks`` would not do: a copied module has the list of the original, but no hook.

    Args:
        ddp: the module.
        closed: whether the handle of our hook is closed, so that the hook can be used again; None:
            it has no hook of ours.
    """
    hook = ddp._get_ddp_logging_data().get("comm_hook")
    if closed is False:
        raise RuntimeError(
            "attach was called on this DistributedDataParallel module before, and that handle is "
            "open. Call handle.close(), and then attach again."
        )
    if hook and closed is None:
        raise RuntimeError(
            f"This DistributedDataParallel module already has the communication hook {hook}, and "
            f"DDP allows one. Wrap the model again and register no other hook. An optimizer that "
            f"steps within the backward pass registers one, and so does DDP's mixed_precision: use "
            f"torch.autocast instead."
        )


def refuse_steps_within_backward(ddp: DistributedDataParallel) -> None:
    """Raise RuntimeError for torch's optimizers in the backward pass: they register DDP's hook.

    DDP does so in its first forward pass.
    """
    if getattr(ddp, "_lazy_init_ran", False):
        return
    for name, param in ddp.module.named_parameters():
        if hasattr(param, "_in_backward_optimizers"):
            raise RuntimeError(
                f"{name} has an optimizer that steps within the backward pass, by "
                f"_apply_optimizer_in_backward, for which DDP registers its only communication "
                f"hook. Make one optimizer, and call step() after loss.backward()."
            )


def refuse_own_gradients(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], cause: Callable[[], str]
) -> None:
    """Raise RuntimeError if an optimizer would step on gradients that were not exchanged.

    Gradients of zeros pass: torch makes a step with them to create an optimizer's state.

    Args:
        optimizer: its step comes next, and nothing was exchanged since the last one.
        names: parameter -> name, of those with gradients that should have been exchanged.
        cause: returns why, as far as it is known, and what to do.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and param in names and bool(param.grad.any()):
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step was called, but no gradient has been "
                    f"exchanged since its last step, such as that of {names[param]}, so workers "
                    f"would drift apart. {cause()}."
                )


def not_reached(ddp: DistributedDataParallel, names: Mapping[Tensor, str]) -> dict[Tensor, str]:
    """Return the parameters that a backward pass of DDP has not reached, so that it never ended.

    Torch's own check says whether it ended, and lists the parameters by number. Their gradients
    would not show it: one may be left from an earlier pass.
    """
    try:
        ddp._check_reducer_finalized()
    except RuntimeError as error:
        listed = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
    else:
        return {}
    exchanged = {p: n for p, n in names.items() if n not in ddp.parameters_to_ignore}
    if listed is not None and len(exchanged) == len(ddp.reducer.get_backward_stats()):
        numbered = list(exchanged.items())
        return dict(numbered[int(number)] for number in listed[1].split())
    return {p: n for p, n in exchanged.items() if p.grad is None or not bool(p.grad.any())}


def why_not_reached(ddp: DistributedDataParallel, unreached: Mapping[Tensor, str], fix: str) -> str:
    """Return why DDP waits for parameters' gradients, and what to do.

    Args:
        ddp: the module.
        unreached: parameter -> name.
        fix: how ``find_unused_parameters=True`` is written.
    """
    several, frozen = len(unreached) > 1, not any(param.requires_grad for param in unreached)
    names = in_short(list(unreached.values()))
    if frozen:
        waits = f"{names}, which {'were' if several else 'was'} frozen after DDP was made"
    else:
        waits = f"{names}, which took no part in this worker's loss"
    if ddp.static_graph:
        fix = f"static_graph=True allows no change of the graph. Leave it out and write {fix}"
    elif ddp.find_unused_parameters:
        fix = (
            "find_unused_parameters=True is set and took them for used. Call backward() without "
            "inputs=, and let forward return tensors, or lists, dicts or dataclasses of tensors"
        )
    else:
        them = "them" if several else "it"
        them = f"freeze {them} before" if frozen else f"let the loss depend on {them}"
        fix = f"If that is intended, write {fix}. Otherwise {them}"
    return f"DDP waits for the gradient{'s' * several} of {waits}. {fix}"


def in_short(names: Sequence[str], most: int = 6) -> str:
    """Return names as one reads them; of a long list the first ones and how many more."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def refuse_complex_parameters(names: Mapping[Tensor, str], compressor: Compressor) -> None:
    """Raise ValueError for complex parameters: their gradients are exchanged as pairs of floats."""
    found = [name for param, name in names.items() if param.is_complex()]
    if found and not compressor.traits.exact:
        raise ValueError(
            f"{', '.join(found)} is complex, which only Identity() and Lossless() exchange; keep "
            f"real numbers, torch.view_as_real(...), as the parameter, and use "
            f"torch.view_as_complex in forward."
        )


def refuse_unsynchronised(
    module: nn.Module,
    names: Mapping[Tensor, str],
    optimizers: Iterable[torch.optim.Optimizer],
    elsewhere: str,
) -> None:
    """Raise RuntimeError if a parameter is trained, but is none of ``names``, which are exchanged.

    DDP exchanges what required a gradient when it was made. Parameters that are unfrozen, added or
    swapped later would be trained by each worker on its own, and plain DDP does not notice.

    ``elsewhere``: what to do about a tensor of an optimizer that is not the module's; maybe empty.
    """
    for name, param in module.named_parameters():
        if param.requires_grad and param.numel() and param not in names:
            raise RuntimeError(
                f"{name} was unfrozen, added or replaced after the fit began. Its gradient is not "
                f"exchanged, so workers would drift apart. Change the model between two fits, or "
                f"before you make DDP."
            )
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if param.requires_grad and param.numel() and param not in names:
                    raise RuntimeError(
                        f"Parameter group {number} of {type(optimizer).__name__} has a tensor of "
                        f"shape {tuple(param.shape)} that is not a parameter of the module. Its "
                        f"gradient is not exchanged here, so workers may drift apart. Make it a "
                        f"parameter of the module before the fit, or set requires_grad=False."
                        f"{elsewhere and ' '}{elsewhere}"
                    )


def refuse_static_accumulation(ddp: DistributedDataParallel) -> None:
    """Raise ValueError for a forward pass if its backward pass ends in torch's INTERNAL ASSERT.

    With ``static_graph=True`` torch from 2.1 on ends the first backward pass of all as if it were
    synchronised, which under ``no_sync`` it is not (pytorch pull request 187732).
    """
    if (
        ddp.static_graph
        and not ddp.require_backward_grad_sync
        and not ddp._static_graph_delay_allreduce_enqueued
        and torch.is_grad_enabled()
        and _ends_first_pass_synchronised()
    ):
        raise ValueError(
            f"DistributedDataParallel(static_graph=True) in torch {torch.__version__} cannot begin "
            f"with a backward pass that accumulates gradients. Synchronise the first pass, or use "
            f"static_graph=False."
        )


@functools.cache
def _ends_first_pass_synchronised() -> bool:
    """Return whether torch ends a static graph's first backward pass so under ``no_sync``."""
    ended: list[bool] = []
    stub = SimpleNamespace(
        static_graph=True,
        require_backward_grad_sync=False,
        _static_graph_delay_allreduce_enqueued=False,
        _ddp_sink_clone=False,
        reducer=SimpleNamespace(_delay_all_reduce=lambda: ended.append(True)),
    )
    with torch.enable_grad():
        leaf = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True)
        (out,) = _DDPSink.apply(lambda: stub, leaf * 1)
        out.sum().backward()
    return bool(ended)


FIXES = {
    "wire format": (
        "They would expect messages of other sizes; install the same version of lightning_gc on "
        "all."
    ),
    "lightning_gc": (
        "Versions may compress and send differently; install the same version on all workers."
    ),
    "torch": (
        "Versions may round differently, and workers' weights would part unnoticed; install the "
        "same version on all."
    ),
    "kernels": (
        "They may differ in the last bit, and workers' weights would part unnoticed; a worker "
        f"without Triton's kernels has no triton, has {SWITCH}=torch, or has warned why. Install "
        f"triton on all, or set {SWITCH}=torch on all."
    ),
    "vector instructions": (
        "With and without fused multiply-add results differ in the last bit, and workers' weights "
        "would part unnoticed; unset ATEN_CPU_CAPABILITY, or use machines of one kind."
    ),
    "device": (
        "This method decodes by matrix products, whose last bits differ between devices, so "
        "workers' weights would part unnoticed. Use devices of one model, or a method that treats "
        "elements one by one, such as TopK or QSGD."
    ),
    "numba": (
        "This method decodes by matrix products, whose last bits differ with and without numba, so "
        "workers' weights would part unnoticed. Install numba on all workers, or on none. "
        f"{SWITCH}=torch on all is as good as none."
    ),
}
"""Name -> why a difference is refused, and what to do."""


def check_agreement(
    configuration: Mapping[str, str],
    transport: Distributed,
    device: torch.device,
    model: Mapping[str, str] | None = None,
) -> None:
    """Raise ValueError on all workers if one's configuration or model differs from worker 0's.

    For a key of ``arithmetic``, the sentence says why it must be equal.

    Args:
        configuration: name -> text.
        transport: to the other workers.
        device: one that it can send from.
        model: ``Workers.model``. Its digest is sent, and the descriptions only if digests differ.
    """
    same = configuration if model is None else {**configuration, MODEL: digest_of(model)}
    found = _difference(same, transport, device)
    if found is None:
        return
    name = found[1].partition("=")[0]
    fix = FIXES.get(name, _SAME_ARGUMENTS)
    if model is not None and name == MODEL:
        found, fix = _difference(model, transport, device) or found, _SAME_MODEL
    worker, expected, other = found
    raise ValueError(f"Worker {worker} has {other}, but worker 0 has {expected}. {fix}")


MODEL = "tensors of the model"
"""Name of its digest among the settings that must be equal on all workers."""


def _difference(
    own: Mapping[str, str], transport: Distributed, device: torch.device
) -> tuple[int, str, str] | None:
    """Return the first worker that differs, with the first lines of worker 0 and it that do."""
    ours = "\n".join(f"{name}={value}" for name, value in own.items())
    texts = [text.splitlines() for text in gather_text(ours, transport, device)]
    for worker, text in enumerate(texts):
        for expected, found in itertools.zip_longest(texts[0], text, fillvalue="nothing more"):
            if found != expected:
                return worker, expected, found
    return None


def digest_of(named: Mapping[str, object]) -> str:
    """Return number and digest of names and what is said of each, in order."""
    lines = [f"{name} {value}" for name, value in named.items()]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return f"{len(lines)} of digest {digest[:12]}"


_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def warn_of_one_queue(ddp: DistributedDataParallel) -> None:
    """Warn if kernels of both groups share the one queue that the environment leaves a GPU."""
    backends = dist.get_backend_config(ddp.process_group)
    if "nccl" not in backends or os.environ.get(_QUEUES) != "1":
        return
    others = []
    if any(isinstance(child, nn.SyncBatchNorm) for child in ddp.module.modules()):
        others.append("SyncBatchNorm")
    if ddp.find_unused_parameters:
        others.append("find_unused_parameters=True")
    if others:
        warnings.warn(
            f"{_QUEUES}=1 gives a GPU one queue for the exchange of gradients and for the "
            f"collectives of {' and '.join(others)}. Their order can differ between workers, "
            f"and then all wait for ever. Unset {_QUEUES}, or do without {' and '.join(others)}.",
            stacklevel=2,
        )


def warn_of_one_worker(compressor: Compressor, alone: str, what: str, fix: str) -> None:
    """Warn that nothing is gained, unless the compressor changes nothing either.

    Args:
        compressor: with its wrappers.
        alone: who there is only one of, and between whom nothing is sent.
        what: is compressed.
        fix: what to do.
    """
    if not compressor.traits.plain:
        warnings.warn(
            f"{alone}, but {what} are still compressed, which slows training and saves nothing; "
            f"{fix}.",
            stacklevel=2,
        )
