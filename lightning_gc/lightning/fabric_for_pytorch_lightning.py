"""CompressedFabricStrategy for ``lightning_fabric``, which ``pytorch_lightning`` brings."""

from lightning_fabric.strategies import STRATEGY_REGISTRY
from lightning_fabric.strategies.ddp import DDPStrategy

from lightning_gc.lightning.fabric import CompressedFabric
from lightning_gc.lightning.names import register


class CompressedFabricStrategy(CompressedFabric, DDPStrategy):
    __doc__ = CompressedFabric.__doc__


register(STRATEGY_REGISTRY, ddp=CompressedFabricStrategy)
