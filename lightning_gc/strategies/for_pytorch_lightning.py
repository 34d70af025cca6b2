"""The strategy and the monitor for users of ``import pytorch_lightning``."""

from pytorch_lightning import Callback
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from lightning_gc.monitor import Monitor
from lightning_gc.strategies.ddp import CompressedDDP, register


class CompressedDDPStrategy(CompressedDDP, DDPStrategy):
    __doc__ = CompressedDDP.__doc__


class CompressionMonitor(Monitor, Callback):
    __doc__ = Monitor.__doc__


register(StrategyRegistry, CompressedDDPStrategy)
