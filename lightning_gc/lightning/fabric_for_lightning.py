"""CompressedFabricStrategy for ``lightning.fabric``, which ``lightning`` brings."""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy

from lightning_gc.lightning.fabric import CompressedFabric
from lightning_gc.lightning.names import register


class CompressedFabricStrategy(CompressedFabric, DDPStrategy):
    __doc__ = CompressedFabric.__doc__


register(STRATEGY_REGISTRY, ddp=CompressedFabricStrategy)
