"""The strategies, real and simulated, and CompressionMonitor for ``pytorch_lightning``."""

from lightning_fabric.utilities.data import _auto_add_worker_init_fn
from lightning_fabric.utilities.seed import reset_seed
from pytorch_lightning import Callback
from pytorch_lightning.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)
from pytorch_lightning.trainer.connectors.data_connector import _get_distributed_sampler
from pytorch_lightning.utilities.data import _update_dataloader

from lightning_gc.lightning.ddp import CompressedDDP
from lightning_gc.lightning.local_steps_strategy import RealLocalSteps
from lightning_gc.lightning.monitor import Monitor
from lightning_gc.lightning.names import register
from lightning_gc.lightning.sharded import CompressedFSDP, CompressedHSDP
from lightning_gc.lightning.simulation.ddp import SimulatedDDP
from lightning_gc.lightning.simulation.simulated_local_steps import SimulatedLocalSteps
from lightning_gc.lightning.workarounds import FirstCallback


class CompressedDDPStrategy(CompressedDDP, DDPStrategy):
    __doc__ = CompressedDDP.__doc__


class CompressedHSDPStrategy(CompressedHSDP, ModelParallelStrategy):
    __doc__ = CompressedHSDP.__doc__


class CompressedFSDPStrategy(CompressedFSDP, ModelParallelStrategy):
    __doc__ = CompressedFSDP.__doc__


class _FirstCallback(FirstCallback, Callback):
    __doc__ = FirstCallback.__doc__


class LocalStepsStrategy(RealLocalSteps, DDPStrategy):
    __doc__ = RealLocalSteps.__doc__
    _first_callback = _FirstCallback


class _SingleDevice(SingleDeviceStrategy):
    # Lightning's own distribution of samples over processes.
    _sampler = staticmethod(_get_distributed_sampler)
    _with_sampler = staticmethod(_update_dataloader)
    _seed_workers = staticmethod(_auto_add_worker_init_fn)
    _reset_seed = staticmethod(reset_seed)


class SimulatedDDPStrategy(SimulatedDDP, _SingleDevice):
    __doc__ = SimulatedDDP.__doc__


class SimulatedLocalStepsStrategy(SimulatedLocalSteps, _SingleDevice):
    __doc__ = SimulatedLocalSteps.__doc__
    _first_callback = _FirstCallback


class CompressionMonitor(Monitor, Callback):
    __doc__ = Monitor.__doc__


register(
    StrategyRegistry,
    ddp=CompressedDDPStrategy,
    hsdp=CompressedHSDPStrategy,
    fsdp=CompressedFSDPStrategy,
    local_steps=LocalStepsStrategy,
)
