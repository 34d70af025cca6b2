"""FSDP's settings: refuse those that cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_gc.compressors import Compressor
from lightning_gc.memories import Memory
from lightning_gc.synchronizer.fsdp_units import has_custom_scatters


def check_settings(owner: str, mesh_arguments: Mapping[str, Any]) -> None:
    """Raise RuntimeError for a torch that is too old; ValueError for arguments of a mesh.

    Args:
        owner: the class, for the sentence.
        mesh_arguments: ``ModelParallelStrategy``'s, but for those with their default, which
            LightningCLI gives.
    """
    if not has_custom_scatters():
        raise RuntimeError(
            f"{owner} needs torch 2.9 or later, whose FSDP2 has set_custom_reduce_scatter; this is "
            f"torch {torch.__version__}. Install a newer one, or use CompressedHSDPStrategy."
        )
    for name, fix in (
        ("data_parallel_size", "all ranks share the model; leave it out"),
        ("tensor_parallel_size", "tensor parallelism has not been tried with it; leave it out"),
    ):
        if name in mesh_arguments:
            raise ValueError(f"{owner}({name}={mesh_arguments[name]!r}): {fix}.")


def check_memory(owner: str, compressor: Compressor, memory: Memory, given: bool) -> None:
    """Raise ValueError for a memory that keeps anything: errors are of whole parameters here.

    Args:
        owner: the class, for the sentence.
        compressor: with its wrappers.
        memory: as given, or the compressor's own.
        given: whether the user has asked for it.
    """
    if not memory.buffers:
        return
    price = (
        "errors of whole parameters, 4 bytes for each of the model's on every rank, which is what "
        "FSDP is there to save, and which this strategy does not keep"
    )
    if given:
        raise ValueError(
            f"{owner}(memory={memory!r}): it would keep {price}. Leave it out and use an unbiased "
            f"compressor such as QSGD(8), or CompressedHSDPStrategy, whose errors are of shards."
        )
    raise ValueError(
        f"{owner}({compressor.method!r}): this method feeds back its errors by {memory!r}, which "
        f"would be {price}. Use an unbiased one such as QSGD(8), CompressedHSDPStrategy, whose "
        f"errors are of shards, or memory='none' to drop them knowingly."
    )
