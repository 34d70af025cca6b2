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
        "without Triton's kernels has warned why. Mend that, or uninstall triton on all."
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
    same = {"torch": torch.__version__, "kernels": dispatch.in_words(device)}
    return same if compressor.traits.portable else same | {"device": device_in_words(device)}


def device_in_words(device: torch.device) -> str:
    """Return the device's model; on the host the instructions that torch has chosen."""
    if device.type == "cuda":
        cores = torch.cuda.get_device_properties(device).multi_processor_count
        return f"{torch.cuda.get_device_name(device)} with {cores} multiprocessors"
    return f"{device.type} with {torch.backends.cpu.get_cpu_capability()}"
