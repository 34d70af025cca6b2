"""Error curves: what each level would leave of a gradient, and what it would send."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.compressors import Compressor
from lightning_gc.controllers import Curve, Point
from lightning_gc.engine import Engine
from lightning_gc.transports.simulated import Simulated

TRIES = 2
"""Times that a method with a state, such as PowerSGD's factors, compresses the same tensor."""


def error_curves(
    engine: Engine, gradients: Mapping[str, Tensor], levels: Sequence[float]
) -> dict[str, Curve]:
    """Return the curve of each parameter that some level compresses and whose gradient is finite.

    Each is compressed by itself, by one simulated worker, from fresh state. Nothing of the engine
    is changed, and no random numbers of training are used up: generators are seeded anew.

    Args:
        engine: with compressor, scheme and step.
        gradients: parameter name -> gradient, left alone.
        levels: that are tried, within the knob's range.

    Communication pattern:
        None.
    """
    compressors = [engine.levels.sample(level) for level in levels]
    found = {}
    for name, gradient in gradients.items():
        shape = tuple(gradient.shape)
        if not engine.levels.takes(shape):
            continue
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        if not math.isfinite(norm):
            continue
        points = tuple(
            Point(float(level), *_point(engine, compressor, name, gradient))
            for level, compressor in zip(levels, compressors, strict=True)
        )
        found[name] = Curve(norm, points)
    return found


def _point(
    engine: Engine, compressor: Compressor, name: str, gradient: Tensor
) -> tuple[float, float]:
    """Return ``‖x − C(x)‖`` and the bytes of one worker's messages."""
    state: dict[str, dict[str, Any]] = {name: {}}
    flat = gradient.detach().reshape(-1).float()
    error = nbytes = 0.0
    for number in range(TRIES):
        buffer, out = flat.clone(), torch.zeros_like(flat)
        shapes = {name: tuple(gradient.shape)}
        step = compressor.compressing_step(engine.step + number)
        bucket = Bucket(buffer, shapes, step=step, seed=engine.seed, state=state)
        transport = Simulated(1)
        with torch.no_grad():
            transport.run([compressor.flow(bucket, buffer, out, engine.scheme)])
        error = float(torch.linalg.vector_norm(buffer, dtype=torch.float64))
        nbytes = float(transport.message_bytes[0])
        if not state[name]:
            break
    return error, nbytes
