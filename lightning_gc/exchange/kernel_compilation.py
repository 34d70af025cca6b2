"""Compile the kernels of a method before the first step, in which all workers would wait."""

from __future__ import annotations

import logging

import torch

from lightning_gc.compressors import Compressor
from lightning_gc.core.message import FORMAT
from lightning_gc.engine import Engine
from lightning_gc.kernels import dispatch
from lightning_gc.transports.simulated import Simulated

_log = logging.getLogger(__name__)

SHAPES = {"even": (32, 32), "odd": (33, 34), "even elsewhere": (32, 32), "odd elsewhere": (33, 34)}
"""Numbers of elements that are multiples of 16 and not, each at an aligned place and at another."""


def compile_kernels(engine: Engine, device: torch.device) -> None:
    """Exchange made-up gradients with a like engine, if kernels are used on ``device``.

    Kernels are compiled once for each set of constants and alignment; see ``kernels.gpu.launch``.
    What a controller changes later, such as the number of bits, is compiled then.
    """
    if not dispatch.may_compile(device):
        return
    grad = torch.linspace(
        -1, 1, sum(a * b for a, b in SHAPES.values()), dtype=torch.float32, device=device
    )
    grad[::100] = 1e30  # reaches any threshold
    weights = {
        name: torch.zeros(shape, dtype=torch.float32, device=device)
        for name, shape in SHAPES.items()
    }
    alone = Engine(engine.compressor, engine.memory, engine.scheme)
    try:
        for measured in (False, True):  # kernels differ in steps that measure the error
            alone.statistics.norms_wanted = measured
            with torch.no_grad():
                Simulated(1).run([alone.flow(grad.clone(), SHAPES, weights=weights)])
            alone.advance()
    except Exception as error:  # of a method that knows its own parameters only
        _log.warning(
            "The kernels of %r are compiled in the first step, for which all workers wait: it "
            "cannot do with made-up gradients. %s: %s",
            *(engine.compressor, type(error).__name__, error),
        )


FIXES = {
    "wire format": (
        "They would expect messages of other sizes; install the same version of lightning_gc on "
        "all."
    ),
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
    "numba": (
        "This method decodes by matrix products, whose last bits differ with and without numba, so "
        "workers' weights would part unnoticed. Install numba on all workers, or on none."
    ),
}
"""Name -> why a difference is refused, and what to do."""


def arithmetic(device: torch.device, compressor: Compressor) -> dict[str, str]:
    """Return name -> text of what must be equal on all workers.

    On CUDA this tries all Triton kernels, if that has not been done yet.
    """
    release = torch.__version__
    same = {"wire format": str(FORMAT), "torch": release, "kernels": dispatch.in_words(device)}
    if device.type == "cpu":
        # Builds for one GPU or another have the same code for the host; so do, for what decodes
        # elements one by one, AVX2 and AVX-512.
        same["torch"] = release.partition("+")[0]
        same["vector instructions"] = _vectors().replace("AVX512", "AVX2")
    if not compressor.traits.portable:
        same["device"] = device_in_words(device)
        if device.type == "cpu":
            same["numba"] = dispatch.numba_in_words()
    return same


def device_in_words(device: torch.device) -> str:
    """Return the device's architecture and size; on the host torch's choice of instructions."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        kind = f"compute capability {gpu.major}.{gpu.minor}"
        return f"{kind} with {gpu.multi_processor_count} multiprocessors"
    return f"{device.type} with {_vectors()}"


def _vectors() -> str:
    return torch.backends.cpu.get_cpu_capability()
