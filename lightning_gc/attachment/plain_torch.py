"""attach: compressed gradient exchange for a plain DistributedDataParallel or FSDP2 module."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, Unpack, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lightning_gc.attachment.attached import Attached, AttachedDDP, Setup
from lightning_gc.attachment.attached_shards import AttachedScatters, AttachedShards
from lightning_gc.compressors import Compressor
from lightning_gc.controllers import Controller
from lightning_gc.core.combinations import judge
from lightning_gc.core.refusal import refuse
from lightning_gc.core.registry import did_you_mean
from lightning_gc.core.settings import takes_fields
from lightning_gc.exchange import Compression, WayIn
from lightning_gc.exchange.automatic import IN_FSDP
from lightning_gc.exchange.compression import CompressionFields
from lightning_gc.exchange.validation import ELSEWHERE, check_timeout
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.sharded import shard_validation
from lightning_gc.sharded.fsdp_units import units_of
from lightning_gc.sharded.sharded_workers import FSDPWorkers, ShardedWorkers
from lightning_gc.sharded.unit_gathers import Weights, weights_of
from lightning_gc.sharded.unit_scatters import ReduceScatter
from lightning_gc.sharded.weights_controller import with_weights


@takes_fields(Compression)
def attach(
    module: DistributedDataParallel | FSDPModule,
    compressor: Compressor | str | None = None,
    memory: Memory | str | None = None,
    scheme: Scheme | str | None = None,
    controller: Controller | str | None = None,
    *,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = (),
    scaler: torch.amp.GradScaler | None = None,
    timeout: timedelta | None = None,
    bucket_cap_mb: float = 25,
    weights: Weights | None = None,
    weights_controller: Controller | str | None = None,
    hops: Literal[1, 2] = 1,
    workers_per_node: int | None = None,
    **fields: Unpack[CompressionFields],
) -> Attached:
    """Compress the gradients that a ``DistributedDataParallel`` or FSDP2 module exchanges.

    Registers a communication hook. Call it on all workers, before the first backward pass. After
    ``close`` it may be called on the module again.

    The mesh that ``fully_shard(..., mesh=mesh)`` was given decides for a model in shards. On a mesh
    of two dimensions, replicas and shards, the exchange between replicas is compressed, as in
    ``CompressedHSDPStrategy``. Without a mesh, or on one of one dimension, FSDP2's own
    reduce-scatters and all-gathers are, as in ``CompressedFSDPStrategy``. Either mesh must have all
    ranks; of a model that ``parallelize_module`` has cut, together with the tensor-parallel one.

    Args:
        module: a ``DistributedDataParallel`` module without a communication hook, or one that
            ``fully_shard`` was called on, after all of its parts. Or ``torch.compile`` of either,
            before its first forward pass.
        compressor: required: an instance, or a name from the registry. As with
            ``CompressedDDPStrategy``, a bare one works per parameter; see ``min_numel``.
        memory: the error feedback rule; the compressor's default if left out.
        scheme: how payloads become a mean; the compressor's default if left out.
        controller: chooses levels; the training loop calls ``begin_epoch`` or ``begin_batch``.
        optimizers: of the module's parameters. Memories that depend on learning rates or refuse
            some settings need them, and so does every controller. None: no optimizer. The steps of
            all optimizers of the process are checked, given or not.
        scaler: of fp16 training, with DDP only. Errors are kept unscaled, and restored when it
            skips a step.
        timeout: of the exchange's collectives. Default: the process group's timeout, which is the
            only one of a model in shards without replicas.
        bucket_cap_mb: of a model in shards with replicas: megabytes of a rank's shards from which
            on a bucket is full, as for ``CompressedHSDPStrategy``. DDP has its own.
        weights: of a model in shards without replicas, as for ``CompressedFSDPStrategy``, like the
            next three: compressor of FSDP2's all-gathers. ``Identity()`` as the compressor leaves
            gradients as they are.
        weights_controller: chooses levels of ``weights``, when the loop calls ``begin_epoch``.
        hops: in which gradients are exchanged, 1 or 2.
        workers_per_node: ranks of a node, for two hops; None: ``LOCAL_WORLD_SIZE``, which torchrun
            sets, divided by the number of tensor-parallel ranks.
        fields: what is exchanged, each described above.

    In a model in shards ``verify`` lets replicas compare their shards; without replicas only
    ``"payload"`` is possible. An error of a step is raised by ``check``, the next forward pass, or
    ``close``.

    Returns:
        A handle for levels, byte counts, checkpoints and closing.

    Communication pattern:
        As ``CompressedDDPStrategy`` or ``CompressedHSDPStrategy``: one background thread with its
        own process group. As ``CompressedFSDPStrategy``: FSDP2's own group, thread and stream.

    Raises:
        ValueError: a combination that cannot work, an unknown name, sparse gradients, workers that
            differ, as for the strategies, a memory that needs more than a hook, a model in shards
            on several meshes, a module of ``torch.compile`` that has run, or of ``replicate``.
            In a forward pass: a static graph that begins with accumulated gradients.
        RuntimeError: the module already has a communication hook; in a forward pass, a parameter
            that was unfrozen, added or replaced since; before an optimizer's step, gradients that
            were not exchanged, as after ``ddp.module(x)`` or under ``no_sync``; a model in shards
            with torch before 2.7, or 2.9 without replicas.
        PeerError: in a forward or backward pass, an exchange has failed.

    Example:
        ``examples/plain_torch.py`` trains and resumes; in short::

            ddp = DistributedDataParallel(model)
            handle = lightning_gc.attach(ddp, TopK(0.01), optimizers=optimizer)
            ...
            loss.backward()
            optimizer.step()
    """
    refuse_unknown("attach", fields)
    if compressor is None:
        refuse("attach needs a compressor; write attach(module, QSGD(4))")
    check_timeout("attach", timeout)
    module = _uncompiled(module)
    _refuse_other_modules(module)
    model = cast(nn.Module, module)
    units = units_of(model)
    tensors = shard_validation.tensor_group_of(units)
    size = 1 if tensors is None else tensors.size()
    alone = isinstance(module, FSDPModule) and not any(unit.replicates for unit in units)
    way = _ALONE if alone else _REPLICAS if units else WayIn("attach")
    if alone:
        shard_validation.check_legs("attach", compressor, weights, hops, workers_per_node)
        shard_validation.refuse_settings("attach(...) of a model in shards", "FSDP")
        of_others = {"scheme": scheme, "timeout": timeout, "bucket_cap_mb": bucket_cap_mb}
        for name, own in of_others.items():
            place = "attach to a model in shards without replicas"
            judge(place, "attach", name=name, value=own)
        shard_validation.check_verify("attach", fields.get("verify", Compression.verify))
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        scheme = ReduceScatter(workers_per_node or (max(local // size, 1) if hops == 2 else 1))
    else:
        of_weights = ("weights", weights), ("weights_controller", weights_controller)
        for name, value in (*of_weights, ("hops", hops), ("workers_per_node", workers_per_node)):
            judge("attach to another module", "attach", name=name, value=value)
    given = Compression(compressor, memory, scheme, controller, **fields)
    compression = given.resolved(way)
    if isinstance(optimizers, torch.optim.Optimizer):
        optimizers = [optimizers]
    its = list(optimizers or ())
    decides = compression.controller
    for name, chooses in {"controller": decides, "weights_controller": weights_controller}.items():
        weighed = isinstance(chooses, Controller) and chooses.needs.weighed
        if chooses is not None and not weighed:  # such as Accordion
            judge("Decisions", "attach", name=name, given=chooses, optimizers=its)
    if isinstance(module, DistributedDataParallel):
        setup = Setup.of_loop(way, compression, its, module, scaler=scaler, timeout=timeout)
        return AttachedDDP(module, setup).watch()
    judge("attach to a model in shards", "attach", scaler=scaler)
    shard_validation.check_bucket_cap("attach", bucket_cap_mb)
    judge("Models in shards", "attach", controller=decides)
    configuration = compression.configuration
    shard_validation.check_tensor_parallel("attach", size, configuration.compressor)
    if not alone:
        mesh = shard_validation.replicated_mesh(units, tensors)
        setup = Setup.of_loop(way, compression, its, model, ShardedWorkers, timeout=timeout)
        return AttachedShards(model, setup, mesh, bucket_cap_mb, units).watch()
    shard_validation.refuse_errors(
        "attach", configuration.compressor, configuration.memory, memory is not None
    )
    gathers = None
    if weights is not None:
        gathers = weights_of("attach", weights, given.seed, given.min_numel)
    both = with_weights("attach", decides, weights_controller, gathers)
    compression = replace(compression, controller=both)
    setup = Setup.of_loop(way, compression, its, model, FSDPWorkers, timeout=timeout)
    group = shard_validation.group_of_all(units, tensors)
    setup = replace(setup, device=units[0].device)
    return AttachedScatters(model, setup, group, gathers, tensors).watch()


_ALONE = WayIn("attach", more_workers="use more ranks, or leave attach out", no_choice=IN_FSDP)
_REPLICAS = WayIn(
    "attach",
    more_workers="give fully_shard a mesh with more replicas, or leave attach out",
)


def _uncompiled(module: Any) -> Any:
    """Return the module that ``torch.compile`` was given; refuse one that runs without our hooks.

    Torch compiles in the first forward pass, and hooks of an earlier ``attach`` lie in that pass.
    """
    inside = getattr(module, "_orig_mod", None)
    if isinstance(inside, DistributedDataParallel):
        ran = getattr(inside, "_lazy_init_ran", False)
    elif isinstance(inside, FSDPModule):
        ran = inside._get_fsdp_state()._is_root is not None
    else:
        return module
    if ran and inside not in Attached.known:
        refuse(
            f"attach({type(module).__name__}(...)): the compiled module has run already. Call "
            f"attach before its first forward pass, before or after torch.compile"
        )
    return inside


def _refuse_other_modules(module: object) -> None:
    """Raise ValueError for a module whose exchange of gradients is not one that we can replace."""
    given, wanted = type(module).__name__, (DistributedDataParallel, FSDPModule)
    inside = list(module.modules()) if isinstance(module, nn.Module) else []
    bases = {base for each in inside for base in type(each).__mro__}
    if any(base.__module__.startswith(_REPLICATE) for base in bases):
        refuse(
            f"attach({given}(...)): modules of torch's replicate(...) are not supported; use "
            f"DistributedDataParallel(model) instead of replicate(model)"
        )
    if isinstance(module, wanted):
        return
    held = next((type(each).__name__ for each in inside if isinstance(each, wanted)), None)
    if held is not None:
        refuse(
            f"attach({given}(...)): the module holds a {held}, which exchanges the gradients; give "
            f"attach that one"
        )
    refuse(
        f"attach({given}(...)): give a DistributedDataParallel module, or one that fully_shard was "
        f"called on; wrap the model first: attach(DistributedDataParallel(model), ...)"
    )


def refuse_unknown(owner: str, given: Mapping[str, object]) -> None:
    """Raise ValueError for an argument that ``attach``, or one that calls it, does not take."""
    *known, _ = inspect.signature(attach).parameters
    for name in given:
        if name not in known:
            instead = ELSEWHERE.get(name) or did_you_mean(name, known)
            refuse(f"{owner}({name}=...): unknown argument{instead}")


_REPLICATE = "torch.distributed._composable.replicate"
"""The modules with both kinds of torch's ``replicate``: by DDP, and by FSDP2."""
