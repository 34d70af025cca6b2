"""Compile the kernels of a method before the first step, in which all workers would wait."""

from __future__ import annotations

import logging

import torch

from lightning_gc.engine import Engine
from lightning_gc.kernels import dispatch
from lightning_gc.transports.simulated import Simulated

_log = logging.getLogger(__name__)

SHAPES = {"even": (32, 32), "odd": (33, 34), "even elsewhere": (32, 32), "odd elsewhere": (33, 34)}
"""Numbers of elements that are multiples of 16 and not, each at an aligned place and at another."""


def compile_kernels(engine: Engine, device: torch.device) -> None:
    """Exchange made-up gradients with a like engine, if kernels are used on ``device``.

    Kernels are compiled once for each set of constants and alignment; see ``triton_kernels``. What
    a controller changes later, such as the number of bits, is compiled then.
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
        with torch.no_grad():
            Simulated(1).run([alone.flow(grad, SHAPES, weights=weights)])
    except Exception as error:  # of a method that knows its own parameters only
        _log.warning(
            "The kernels of %r are compiled in the first step, for which all workers wait: it "
            "cannot do with made-up gradients. %s: %s",
            *(engine.compressor, type(error).__name__, error),
        )
