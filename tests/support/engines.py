"""A single engine that takes steps without any other worker."""

import torch
from torch import Tensor

from lightning_gc.engine import Engine
from lightning_gc.transports import Simulated


def step_alone(engine: Engine, **named: Tensor) -> dict[str, Tensor]:
    """One worker, one bucket, one round; returns the means by name."""
    flat = torch.cat([grad.reshape(-1) for grad in named.values()])
    flow = engine.flow(flat, {name: tuple(grad.shape) for name, grad in named.items()})
    engine.advance()
    Simulated(1).run([flow])
    sizes = [grad.numel() for grad in named.values()]
    return dict(zip(named, flat.split(sizes), strict=True))
