"""Compile the kernels of a method before the first step, in which all workers would wait."""

from __future__ import annotations

import importlib
import logging
from dataclasses import replace

import torch

from lightning_gc.compressors.wrappers.menu import compressors_of
from lightning_gc.core.message import FORMAT
from lightning_gc.core.settings import short
from lightning_gc.exchange.compression import Configuration
from lightning_gc.kernels import dispatch
from lightning_gc.transports.simulated import Simulated

_log = logging.getLogger(__name__)

SHAPES = {"even": (32, 32), "odd": (33, 34), "even elsewhere": (32, 32), "odd elsewhere": (33, 34)}
"""Numbers of elements that are multiples of 16 and not, each at an aligned place and at another."""


def compile_kernels(configuration: Configuration, device: torch.device) -> dict[str, str]:
    """Exchange made-up gradients, and return what must be equal on all workers.

    Kernels are compiled once for each set of constants and alignment; see ``kernels.gpu.launch``.
    What a controller changes later, such as the number of bits, is compiled then. On the host
    another process compiles, except where all workers must share a kernel's last bits.

    Returns:
        Name -> text; ``validation.FIXES`` says why a difference is refused.
    """
    used = set[str]()
    for entry in compressors_of(configuration.compressor) if dispatch.may_compile(device) else ():
        used |= _exchange_alone(replace(configuration, compressor=entry), device)
    portable = configuration.compressor.traits.portable
    release = torch.__version__
    same = {"wire format": str(FORMAT), "torch": release, "lightning_gc": own_release()}
    same["kernels"] = dispatch.in_words(used, device)
    if device.type == "cpu":
        # Builds for one GPU or another have the same code for the host; so do, for what decodes
        # elements one by one, AVX2 and AVX-512.
        same["torch"] = release.partition("+")[0]
        same["vector instructions"] = _vectors().replace("AVX512", "AVX2")
        if not portable:
            rounded = sorted(f for f in used & dispatch.ROUNDED if dispatch.host.works(f))
            same["numba"] = ", ".join(rounded) or "not used"
    if not portable:
        same["device"] = device_in_words(device)
    return same


def _exchange_alone(configuration: Configuration, device: torch.device) -> set[str]:
    """Return the families of kernels that an exchange asks for."""
    grad = torch.linspace(
        -1, 1, sum(a * b for a, b in SHAPES.values()), dtype=torch.float32, device=device
    )
    grad[::100] = 1e30  # reaches any threshold
    weights = {
        name: torch.zeros(shape, dtype=torch.float32, device=device)
        for name, shape in SHAPES.items()
    }
    alone = configuration.engine(0, 1)
    with dispatch.watched() as used:
        try:
            for measured in (False, True):  # kernels differ in steps that measure the error
                alone.statistics.norms_wanted = measured
                Simulated(1).run([alone.flow(grad.clone(), SHAPES, weights=weights)])
                alone.advance()
        except Exception as error:  # of a method that knows its own parameters only
            used |= dispatch.ROUNDED
            notes = getattr(error, "__notes__", ())  # of a kernel that does not start
            _log.warning(
                "The kernels of %s are compiled in the first step, for which all workers wait: it "
                "cannot do with made-up gradients. %s",
                short(configuration.compressor),
                " ".join((f"{type(error).__name__}: {error}", *notes)),
            )
    return used


def device_in_words(device: torch.device) -> str:
    """Return the device's architecture and size; on the host torch's choice of instructions."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        kind = f"compute capability {gpu.major}.{gpu.minor}"
        return f"{kind} with {gpu.multi_processor_count} multiprocessors"
    return f"{device.type} with {_vectors()}"


def own_release() -> str:
    """Return the version of this package."""
    # The package imports all others for type checkers, so an import at the top would be a cycle.
    return str(importlib.import_module("lightning_gc").__version__)


def _vectors() -> str:
    return torch.backends.cpu.get_cpu_capability()
