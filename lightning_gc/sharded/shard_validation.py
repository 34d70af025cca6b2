"""Shard validation: refuse models that are sharded in another way than HSDP needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_gc.controllers import Controller
from lightning_gc.exchange.validation import refuse_unsynchronised
from lightning_gc.sharded.fsdp_units import Unit, units_of

DOCUMENTED = (
    'call fully_shard(module, mesh=self.device_mesh["data_parallel"]) in configure_model, for the '
    "layers and at last for the whole model"
)


def refuse_unlike_shards(model: nn.Module, node: Sequence[int], mesh_dims: int = 1) -> None:
    """Raise ValueError if the model's units are not those of one node, or gradients go elsewhere.

    Args:
        model: as ``configure_model`` has left it.
        node: global ranks among which every unit must be sharded.
        mesh_dims: dimensions of the mesh that ``fully_shard`` was given.
    """
    units = sharded_units(model)
    for unit in units:
        _refuse_unit(unit, node)
    refuse_outside(model, units, mesh_dims)


def sharded_units(model: nn.Module) -> list[Unit]:
    """Return the model's units; ValueError if it has none."""
    units = units_of(model)
    if not units:
        raise ValueError(f"has a model without FSDP2; {DOCUMENTED}.")
    return units


def refuse_outside(model: nn.Module, units: Sequence[Unit], mesh_dims: int = 1) -> None:
    """Raise ValueError for trained parameters outside of all units, or on a mesh of their own."""
    sharded = {param for unit in units for param in unit.params}
    outside = [
        name
        for name, param in model.named_parameters()
        if param.requires_grad and param not in sharded
    ]
    if outside:
        raise ValueError(
            f"trains {', '.join(outside[:4])}{' and others' * (len(outside) > 4)} outside of all "
            f"that fully_shard was called on, whose gradients nobody would average; {DOCUMENTED}."
        )
    for name, param in model.named_parameters():
        if isinstance(param, DTensor) and param.device_mesh.ndim > mesh_dims:
            raise ValueError(
                f"has {name} on a mesh of {param.device_mesh.ndim} dimensions, as with tensor "
                f"parallelism, with which this has never been tried; use a mesh of {mesh_dims}."
            )


def refuse_new_parameters(
    model: nn.Module, names: Mapping[Tensor, str], optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Raise RuntimeError for a parameter that is trained now, and was not when training began.

    Args:
        model: with units.
        names: sharded parameter -> name, of all that were trained then.
        optimizers: of the model.
    """
    known = dict(names)
    for unit in units_of(model):
        known |= dict.fromkeys(unit.stands_in(), unit.name)
    refuse_unsynchronised(model, known, optimizers)


def _refuse_unit(unit: Unit, node: Sequence[int]) -> None:
    if unit.replicates:
        raise ValueError(
            f"has {unit.name} on a mesh of two dimensions, on which FSDP2 averages over replicas "
            f"itself, uncompressed; {DOCUMENTED}."
        )
    if unit.ranks != list(node):
        raise ValueError(
            f"has {unit.name} sharded over the ranks {unit.ranks}, but its node has "
            f"{list(node)}: replicas would average different parameters; {DOCUMENTED}."
        )
    if unit.hooked:
        raise ValueError(
            f"has {unit.name} with set_all_reduce_hook, but the exchange between replicas is its "
            f"only hook; leave it out."
        )
    if unit.offloads:
        raise ValueError(
            f"has {unit.name} with a CPUOffloadPolicy, whose gradients leave the device before "
            f"they are exchanged; use OffloadPolicy(), which keeps them."
        )
    if unit.divides_itself:
        raise ValueError(
            f"has {unit.name} with set_gradient_divide_factor or "
            f"set_force_sum_reduction_for_comms, with which FSDP2 divides after the exchange, so "
            f"that errors would be in other units than gradients; leave both at their defaults."
        )
    if unit.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"has {unit.name} whose gradients are reduced in {unit.dtype}, which FSDP2 divides "
            f"partly after the exchange, so that errors would be in other units than gradients; "
            f"use MixedPrecisionPolicy(reduce_dtype=torch.float32), or precision='bf16-mixed'."
        )
    for param in unit.params:
        if param.requires_grad and getattr(param, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"has {unit.name} with register_post_accumulate_grad_hook, which would see "
                f"gradients before they are exchanged; step the optimizer after the backward pass."
            )


def refuse_whole_gradients(owner: str, controller: Controller | None) -> None:
    """Raise ValueError for a controller that looks at what no rank has whole."""
    if controller is not None and controller.needs.curves:
        raise ValueError(
            f"{owner}: {type(controller).__name__} compresses whole gradients to see what each "
            f"level costs, and a rank has shards of them; use BySize, Plan, or Accordion."
        )


def check_bucket_cap(owner: str, bucket_cap_mb: Any) -> None:
    """Raise ValueError for what is no number of megabytes."""
    number = isinstance(bucket_cap_mb, int | float) and not isinstance(bucket_cap_mb, bool)
    if not number or not bucket_cap_mb > 0:
        raise ValueError(
            f"{owner}(bucket_cap_mb={bucket_cap_mb!r}): give megabytes, more than 0, such as 25."
        )


def refuse_unlike_scatters(model: nn.Module, ranks: Sequence[int]) -> None:
    """Raise ValueError if the model's units are not sharded over all ranks, or reduce otherwise.

    Args:
        model: as ``configure_model`` has left it.
        ranks: among which every unit must be sharded.
    """
    units = sharded_units(model)
    for unit in units:
        _refuse_scattered_unit(unit, ranks)
    refuse_outside(model, units)


def _refuse_scattered_unit(unit: Unit, ranks: Sequence[int]) -> None:
    if unit.replicates:
        raise ValueError(
            f"has {unit.name} on a mesh of two dimensions, on which FSDP2 averages over replicas "
            f"besides, uncompressed; use CompressedHSDPStrategy, or {DOCUMENTED}."
        )
    if unit.ranks != list(ranks):
        raise ValueError(
            f"has {unit.name} sharded over the ranks {unit.ranks}, but the strategy shards over "
            f"{list(ranks)}; {DOCUMENTED}."
        )
    if unit.scattered:
        raise ValueError(
            f"has {unit.name} with a reduce-scatter of its own, as by set_custom_reduce_scatter, "
            f"in whose place gradients would be compressed; leave it out."
        )
    if unit.shares_its_module:
        raise ValueError(
            f"has {unit.name} with several groups of parameters, as by a shard_placement_fn that "
            f"names meshes, for which FSDP2 takes no reduce-scatter; shard on one mesh."
        )
    if unit.divides_itself:
        raise ValueError(
            f"has {unit.name} with set_gradient_divide_factor or "
            f"set_force_sum_reduction_for_comms, with which FSDP2 asks for no mean; leave both at "
            f"their defaults."
        )
    if unit.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"has {unit.name} whose gradients are reduced in {unit.dtype}, which FSDP2 divides "
            f"partly after the exchange; use MixedPrecisionPolicy(reduce_dtype=torch.float32), or "
            f"precision='bf16-mixed'."
        )
