"""Shard validation: refuse models that are sharded in another way than HSDP needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_gc.synchronizer.fsdp_units import Unit, units_of

DOCUMENTED = (
    'call fully_shard(module, mesh=self.device_mesh["data_parallel"]) in configure_model, for the '
    "layers and at last for the whole model"
)


def refuse_unlike_shards(model: nn.Module, node: Sequence[int]) -> None:
    """Raise ValueError if the model's units are not those of one node, or gradients go elsewhere.

    Args:
        model: as ``configure_model`` has left it.
        node: global ranks among which every unit must be sharded.
    """
    units = sharded_units(model)
    for unit in units:
        _refuse_unit(unit, node)
    refuse_outside(model, units)


def sharded_units(model: nn.Module) -> list[Unit]:
    """Return the model's units; ValueError if it has none."""
    units = units_of(model)
    if not units:
        raise ValueError(f"has a model without FSDP2; {DOCUMENTED}.")
    return units


def refuse_outside(model: nn.Module, units: Sequence[Unit]) -> None:
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
        if isinstance(param, DTensor) and param.device_mesh.ndim > 1:
            raise ValueError(
                f"has {name} on a mesh of {param.device_mesh.ndim} dimensions, as with tensor "
                f"parallelism, with which this has never been tried; use a mesh of one."
            )


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
