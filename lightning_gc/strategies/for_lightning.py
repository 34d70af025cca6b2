"""The strategy and the monitor for users of ``import lightning``."""

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_gc.monitor import Monitor
from lightning_gc.strategies.ddp import CompressedDDP, register


class CompressedDDPStrategy(CompressedDDP, DDPStrategy):
    __doc__ = CompressedDDP.__doc__


class CompressionMonitor(Monitor, Callback):
    __doc__ = Monitor.__doc__


register(StrategyRegistry, CompressedDDPStrategy)
