"""Scatter validation: refuse models whose reduce-scatters cannot be compressed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lightning_gc.synchronizer.fsdp_units import Unit
from lightning_gc.synchronizer.shard_validation import DOCUMENTED, refuse_outside, sharded_units


def refuse_unlike_scatters(model: nn.Module, ranks: Sequence[int]) -> None:
    """Raise ValueError if the model's units are not sharded over all ranks, or reduce otherwise.

    Args:
        model: as ``configure_model`` has left it.
        ranks: among which every unit must be sharded.
    """
    units = sharded_units(model)
    for unit in units:
        _refuse_unit(unit, ranks)
    refuse_outside(model, units)


def _refuse_unit(unit: Unit, ranks: Sequence[int]) -> None:
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
