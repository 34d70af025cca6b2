"""Arithmetic: what decides the last bits of a decoded mean, and so must be equal on all workers.

DDP sends parameters once, at the start; then every worker applies the mean that it has decoded. So
a bit that one worker decodes differently stays in its weights, and nobody notices.
"""

from __future__ import annotations

import torch

from lightning_gc.compressors import Compressor
from lightning_gc.kernels import dispatch

FIXES = {
    "torch": (
        "Versions may round differently, and workers' weights would part unnoticed; install the "
        "same version on all."
    ),
    "kernels": (
        "They may differ in the last bit, and workers' weights would part unnoticed; a worker "
        "without Triton's kernels has no triton, or has warned why. Install triton on all, or on "
        "none."
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
}
"""Name -> why a difference is refused, and what to do."""


def arithmetic(device: torch.device, compressor: Compressor) -> dict[str, str]:
    """Return name -> text of what must be equal on all workers.

    On CUDA this tries all Triton kernels, if that has not been done yet.
    """
    release = torch.__version__
    same = {"torch": release, "kernels": dispatch.in_words(device)}
    if device.type == "cpu":
        # Builds for one GPU or another have the same code for the host; so do, for what decodes
        # elements one by one, AVX2 and AVX-512.
        same["torch"] = release.partition("+")[0]
        same["vector instructions"] = _vectors().replace("AVX512", "AVX2")
    return same if compressor.traits.portable else same | {"device": device_in_words(device)}


def device_in_words(device: torch.device) -> str:
    """Return the device's architecture and size; on the host torch's choice of instructions."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        kind = f"compute capability {gpu.major}.{gpu.minor}"
        return f"{kind} with {gpu.multi_processor_count} multiprocessors"
    return f"{device.type} with {_vectors()}"


def _vectors() -> str:
    return torch.backends.cpu.get_cpu_capability()
