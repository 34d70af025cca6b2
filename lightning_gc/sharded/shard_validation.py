"""Shard validation: one table of what HSDP, FSDP and ``attach`` refuse of a model in shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_gc.compressors import Compressor
from lightning_gc.core.combinations import judge
from lightning_gc.core.refusal import refuse
from lightning_gc.exchange.validation import refuse_sparse_gradients, refuse_unsynchronised
from lightning_gc.memories import Memory
from lightning_gc.sharded import fsdp_units
from lightning_gc.sharded.fsdp_units import Unit, fills_unused, units_of

Way = Literal["HSDP", "FSDP", "attach", "gathers", "islands"]
"""HSDP and ``attach`` exchange shards between replicas; FSDP exchanges parts of gradients.

``"gathers"`` is what FSDP refuses besides if it compresses weights. ``"islands"`` exchange weights
in shards, and leave gradients to FSDP2.
"""

_CALL = (
    'call fully_shard(module, mesh=self.device_mesh["data_parallel"]) in configure_model, for the '
    "layers and at last for the whole model"
)
_MESH = (
    'give fully_shard a mesh such as init_device_mesh("cuda", (nodes, ranks_of_a_node), '
    'mesh_dim_names=("replicate", "shard"))'
)
_ISLAND = (
    "give fully_shard the mesh of the island, for the layers and at last for the whole model: "
    'self.device_mesh["data_parallel"] with a Trainer, else init_device_mesh("cuda", (islands, N), '
    'mesh_dim_names=("island", "shard"))["shard"]'
)
_DIVISOR = "set_gradient_divide_factor or set_force_sum_reduction_for_comms"


def _hooks(unit: Unit) -> bool:
    name = "_post_accumulate_grad_hooks"
    return any(param.requires_grad and getattr(param, name, None) for param in unit.params)


RULES: Mapping[tuple[Way, ...], Mapping[str, Callable[[Unit, list[int]], object]]] = {
    ("HSDP",): {
        "on a mesh of two dimensions, on which FSDP2 averages over replicas itself, uncompressed; "
        f"{_CALL}": lambda unit, ranks: unit.replicates,
        "sharded over the ranks {unit.ranks}, but its node has {ranks}: replicas would average "
        f"different parameters; {_CALL}": lambda unit, ranks: unit.ranks != ranks,
    },
    ("attach",): {
        "sharded over the ranks {unit.ranks}, but its node has {ranks}: replicas would average "
        f"different parameters; {_MESH}": lambda unit, ranks: unit.ranks != ranks,
    },
    ("FSDP",): {
        "on a mesh of two dimensions, on which FSDP2 also averages over replicas, uncompressed; "
        f"use CompressedHSDPStrategy, or {_CALL}": lambda unit, ranks: unit.replicates,
        "sharded over the ranks {unit.ranks}, but the strategy shards over {ranks}; "
        f"{_CALL}": lambda unit, ranks: unit.ranks != ranks,
        "with its own reduce-scatter, as by set_custom_reduce_scatter, but only one can replace "
        "FSDP2's; leave it out": lambda unit, ranks: unit.scattered,
        "with several groups of parameters, as by a shard_placement_fn that names meshes, but "
        "FSDP2 then takes no reduce-scatter; "
        "shard on one mesh": lambda unit, ranks: unit.shares_its_module,
    },
    ("gathers",): {
        "with its own all-gather, as by set_custom_all_gather, but only one can replace FSDP2's; "
        "leave it out, or leave weights out": lambda unit, ranks: unit.gathered,
        "with parameters that have fsdp_pre_all_gather, as torchao's float8 has, so they are "
        "compressed already; leave weights out": lambda unit, ranks: unit.gathers_itself,
        "with parameters of several dtypes, {unit.gathered_dtypes}, which FSDP2 gathers as bytes; "
        "call fully_shard for the parts of each dtype, "
        "or leave weights out": lambda unit, ranks: len(unit.gathered_dtypes) > 1,
    },
    ("islands",): {
        "on a mesh of two dimensions, on which FSDP2 averages gradients over replicas in every "
        f"step; {_ISLAND}": lambda unit, ranks: unit.replicates,
        "sharded over the ranks {unit.ranks}, but its island has {ranks}, and rank s of each "
        f"island has shard s; {_ISLAND}": lambda unit, ranks: unit.ranks != ranks,
        "with a CPUOffloadPolicy, which has never been tried with local steps; "
        "use OffloadPolicy()": lambda unit, ranks: unit.offloads,
    },
    ("HSDP", "attach"): {
        "with set_all_reduce_hook, but the exchange between replicas is its only hook; "
        "leave it out": lambda unit, ranks: unit.hooked,
        "with a CPUOffloadPolicy, but gradients must stay on the device until they are exchanged; "
        "use OffloadPolicy()": lambda unit, ranks: unit.offloads,
        "with register_post_accumulate_grad_hook, but that hook would see gradients before they "
        "are exchanged; step the optimizer after the backward pass": lambda unit, ranks: _hooks(
            unit
        ),
    },
    ("HSDP", "attach", "FSDP"): {
        f"with {_DIVISOR}, but then the exchanged gradient is not a mean, and errors have other "
        "units than gradients; "
        "leave both at their defaults": lambda unit, ranks: unit.divides_itself,
        "whose gradients are reduced in {unit.dtype}, but FSDP2 divides that partly after the "
        "exchange, so the exchanged gradient is not a mean; use "
        "MixedPrecisionPolicy(reduce_dtype=torch.float32), or precision='bf16-mixed'": (
            lambda unit, ranks: unit.dtype not in (torch.float32, torch.bfloat16)
        ),
    },
}
"""Ways -> what follows "has {unit's name}" -> whether a unit is so.

A rule is given the ranks over which every unit must be sharded. Other ways accept what it refuses.
"""


def refuse_model(
    model: nn.Module,
    ranks: Sequence[int],
    way: Way,
    *more: Way,
    tensors: dist.ProcessGroup | None = None,
) -> str:
    """Raise ValueError if the model is sharded in another way than ``way`` needs; return "".

    Args:
        model: on which ``fully_shard`` was called.
        ranks: global ranks over which every unit must be sharded.
        way: how gradients are exchanged.
        more: other ways with rules.
        tensors: the tensor-parallel group; None: tensors must not be parallel.
    """
    refuse_sparse_gradients(model)
    units, call = units_of(model), _ISLAND if way == "islands" else _CALL
    if not units:
        raise ValueError(f"has a model without FSDP2; {call}.")
    mine = [rules for ways, rules in RULES.items() if not {way, *more}.isdisjoint(ways)]
    for unit in units:
        for sentence, is_broken in (row for rules in mine for row in rules.items()):
            if is_broken(unit, list(ranks)):
                said = sentence.format(unit=unit, ranks=list(ranks))
                raise ValueError(f"has {unit.name} {said}.")
    sharded = {param for unit in units for param in unit.params}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    outside = [name for name, param in trained.items() if param not in sharded]
    if outside:
        raise ValueError(
            f"trains {', '.join(outside[:4])}{' and others' * (len(outside) > 4)} outside of all "
            f"units of fully_shard, so their gradients would not be averaged; {call}."
        )
    dims = {param: unit.mesh.ndim for unit in units for param in unit.params}
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            _refuse_mesh(name, param, dims.get(param, 1), way, tensors)
    return ""


def _refuse_mesh(
    name: str, param: DTensor, dims: int, way: Way, tensors: dist.ProcessGroup | None
) -> None:
    """Raise ValueError if a parameter's mesh has more than FSDP2's and tensor-parallel ranks."""
    mesh = param.device_mesh
    beyond = range(dims, mesh.ndim)
    if all(mesh.size(each) == 1 for each in beyond):
        return
    known = [] if tensors is None else dist.get_process_group_ranks(tensors)
    if len(beyond) > 1 or (known and dist.get_process_group_ranks(mesh.get_group(dims)) != known):
        raise ValueError(
            f"has {name} on the mesh {mesh.mesh_dim_names or tuple(mesh.shape)}: besides the ranks "
            f"over which FSDP2 shards, one group of tensor-parallel ranks can have a parameter, "
            f"and here it is {known or 'none'}. Meshes of experts, contexts and pipelines are not "
            f"supported; leave them out."
        )
    if tensors is None:
        fix = f"give tensor_parallel_size={mesh.size(dims)}"
        if way == "islands":
            fix = "islands have never been tried with it; leave it out"
        raise ValueError(f"has {name} on a mesh of tensor-parallel ranks; {fix}.")
    placement: Any = param.placements[dims]
    if placement.is_shard() and param.shape[placement.dim] % tensors.size():
        raise ValueError(
            f"has {name} of shape {tuple(param.shape)}, whose dimension {placement.dim} "
            f"{tensors.size()} tensor-parallel ranks cannot share equally; make it a multiple."
        )


def tensor_group_of(units: Sequence[Unit]) -> dist.ProcessGroup | None:
    """Return the tensor-parallel group of a model's units, for ``attach``; None if it has none."""
    for unit in units:
        for param in unit.params:
            mesh: DeviceMesh = cast(DTensor, param).device_mesh
            if mesh.ndim > unit.mesh.ndim:
                group: dist.ProcessGroup = mesh.get_group(unit.mesh.ndim)
                return group if group.size() > 1 else None
    return None


def check_tensor_parallel(owner: str, ranks: Any, compressor: Compressor) -> None:
    """Raise ValueError unless so many ranks can share tensors with gradients that it compresses."""
    if type(ranks) is not int or ranks < 1:
        why = "give the number of ranks that have each layer together, at least 1"
        refuse(owner, why, tensor_parallel_size=ranks)
    judge("Tensor-parallel ranks", owner, compressor=compressor, ranks=ranks)


def refuse_pass(unit: Unit, names: Mapping[Tensor, str], numel: int, *, divided: bool) -> None:
    """Raise RuntimeError if a unit's reduction is not what ranks agreed on when the fit began.

    Args:
        unit: that is reduced in a backward pass.
        names: sharded parameter -> name, of all that were trained then.
        numel: elements of this rank's shard in the reduction.
        divided: FSDP2 divides by something else than the number of ranks.
    """
    if any(piece.param not in names for piece in unit.pieces()):
        raise RuntimeError(
            f"A parameter of {unit.name} was unfrozen, added or replaced after the fit began, so "
            f"no other rank expects its gradient. Change the model between two fits."
        )
    if divided:
        raise RuntimeError(
            f"{unit.name} has {_DIVISOR} since the fit began, but then the exchanged gradient is "
            f"not a mean. Leave both at their defaults."
        )
    if numel != unit.padded_numel():
        newer = "" if fills_unused() else ", or use torch 2.13 or later"
        raise RuntimeError(
            f"{unit.name} trains {unit.padded_numel()} elements of this rank's shard, but the "
            f"backward pass has {numel}: FSDP2 leaves parameters without a gradient out, and does "
            f"not say which. Let all of them take part in the loss{newer}."
        )


def refuse_new_parameters(
    model: nn.Module,
    names: Mapping[Tensor, str],
    optimizers: Iterable[torch.optim.Optimizer],
    elsewhere: str,
) -> None:
    """Raise RuntimeError for a parameter that is trained now, and was not when training began.

    Args:
        model: with units.
        names: sharded parameter -> name, of all that were trained then.
        optimizers: of the model.
        elsewhere: as for ``refuse_unsynchronised``.
    """
    known = dict(names)
    for unit in units_of(model):
        known |= dict.fromkeys(unit.stands_in(), unit.name)
    refuse_unsynchronised(model, known, optimizers, elsewhere)


def refuse_settings(owner: str, way: Way, mesh_arguments: Mapping[str, Any] | None = None) -> None:
    """Raise RuntimeError for a torch that is too old, ValueError for arguments of a mesh.

    Args:
        owner: the class or function, for the sentence.
        way: how gradients are exchanged.
        mesh_arguments: arguments of ``ModelParallelStrategy`` other than their defaults, which
            LightningCLI gives.
    """
    sizes = "all ranks share the model"
    known, torch_version, method = fsdp_units.has_custom_scatters, "2.9", "custom_reduce_scatter"
    if way != "FSDP":
        sizes = "it follows from replicas"
        known, torch_version, method = fsdp_units.has_hooks, "2.7", "all_reduce_hook"
    if not known():
        raise RuntimeError(
            f"{owner} needs torch {torch_version} or later, because it calls set_{method} of "
            f"FSDP2. This is torch {torch.__version__}. Install a newer one, or use "
            f"CompressedDDPStrategy."
        )
    if "data_parallel_size" in (mesh_arguments or {}):
        given = (mesh_arguments or {})["data_parallel_size"]
        raise ValueError(f"{owner}(data_parallel_size={given!r}): {sizes}; leave it out.")


def refuse_errors(owner: str, compressor: Compressor, memory: Memory, given: bool) -> None:
    """Raise ValueError for a memory with state, unless given and stored in fewer bits.

    FSDP's errors have full size on each rank.

    Args:
        owner: the class, for the sentence.
        compressor: with its wrappers.
        memory: as given, or the compressor's own.
        given: whether the user has asked for it.
    """
    width = 4.0 if memory.stored is None else memory.stored.bytes_per_element
    settings = {"compressor": compressor, "memory": memory, "given": given}
    judge("FSDP's errors", owner, **settings, width=width * len(memory.buffers))


def check_legs(
    owner: str, gradients: object, weights: object, hops: int, workers_per_node: int | None
) -> None:
    """Raise ValueError if FSDP is to compress nothing, or in hops that do not exist.

    Args:
        owner: the class or function, for the sentence.
        gradients: their compressor, or None.
        weights: their compressor, or None.
        hops: in which gradients are exchanged.
        workers_per_node: as given.
    """
    if hops not in (1, 2) or isinstance(hops, bool):
        refuse(owner, "use 1, or 2 for within the node and then between nodes", hops=hops)
    legs = {"gradients": gradients, "weights": weights}
    judge("FSDP", owner, **legs, hops=hops, workers_per_node=workers_per_node)


def check_verify(owner: str, verify: Any) -> None:
    """Raise ValueError unless FSDP's ranks can compare that: 0 or ``"payload"``."""
    if verify not in (0, "payload") or isinstance(verify, bool):
        raise ValueError(
            f"{owner}(verify={verify!r}): each rank gets the mean of another shard, so no two "
            f"ranks can compare. Give 'payload' to compare a checksum of every message, or 0."
        )


def check_bucket_cap(owner: str, bucket_cap_mb: Any) -> None:
    """Raise ValueError unless it is a positive number of megabytes."""
    number = isinstance(bucket_cap_mb, int | float) and not isinstance(bucket_cap_mb, bool)
    if not number or not bucket_cap_mb > 0:
        refuse(owner, "give megabytes, more than 0, such as 25", bucket_cap_mb=bucket_cap_mb)


def group_of_all(units: Sequence[Unit], tensors: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group over which the units are sharded, for ``attach``.

    Args:
        units: of the model.
        tensors: the tensor-parallel group.

    Raises:
        ValueError: the two do not have all ranks.
    """
    mesh = units[0].mesh
    if mesh.ndim != 1 or mesh.size() * _size(tensors) != dist.get_world_size():
        raise ValueError(
            f"attach(...): the model is on the mesh {mesh.mesh.tolist()}, but all "
            f"{dist.get_world_size()} ranks must be in it. Give fully_shard no mesh, or one of "
            f"replicas and shards."
        )
    group: dist.ProcessGroup = mesh.get_group()
    return group


def _size(tensors: dist.ProcessGroup | None) -> int:
    return 1 if tensors is None else tensors.size()


def replicated_mesh(units: Sequence[Unit], tensors: dist.ProcessGroup | None) -> DeviceMesh:
    """Return the mesh of replicas and shards that all units are on, for ``attach``.

    With parallel tensors it has their group as a third dimension.

    Raises:
        ValueError: they are on another mesh, on several, or on one without all ranks.
        RuntimeError: this torch has no hook.
    """
    refuse_settings("attach(...) of a model in shards", "attach")
    for unit in units:
        if not unit.replicates:
            raise ValueError(
                f"attach(...): {unit.name} is sharded over all of its mesh, so it has no replicas "
                f"to exchange gradients with; {_MESH}."
            )
    mesh = units[0].mesh
    for unit in units:
        if unit.mesh != mesh:
            raise ValueError(
                f"attach(...): {unit.name} is on the mesh {unit.mesh.mesh.tolist()}, but "
                f"{units[0].name} on {mesh.mesh.tolist()}; give fully_shard one mesh for all."
            )
    if mesh.ndim != 2 or mesh.size() * _size(tensors) != dist.get_world_size():
        raise ValueError(
            f"attach(...): the model is on the mesh {mesh.mesh.tolist()}, but all "
            f"{dist.get_world_size()} ranks must be in it, as replicas and shards; {_MESH}."
        )
    if tensors is None:
        return mesh
    meshes = (cast(DTensor, param).device_mesh for unit in units for param in unit.params)
    return next(each for each in meshes if each.ndim == 3)
