"""Declare what this library uses of Lightning's strategies and Trainer, for type checkers.

Mixins name ``StrategyAPI`` as their base, so that a type checker knows the methods behind
``super()``. At runtime it is ``object``: mixins are joined with the strategies of two packages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

PRIVATE = {
    "Trainer": ("_accelerator_connector", "_results", "_signal_connector"),
    "LightningModule": ("_device_mesh", "_trainer"),
    "Trainer's connectors": ("_layer_sync", "_parallel_devices", "_sigterm_notifier_fn"),
    "loops": (
        "_batches_that_stepped",
        "_broadcast_sigterm_tensor",  # since 2.6
        "_combined_loader",
        "_data_fetcher",
        "_results",
        "_should_accumulate",
        "_should_check_val_fx",
    ),
    "logged results": ("_forked_name", "_logger_connector", "_progress_bar_metrics"),
    "strategies": (
        "_accelerator",
        "_configure_launcher",
        "_data_parallel_size",
        "_ddp_kwargs",
        "_device_mesh",
        "_launcher",
        "_pl_static_graph_delay_done",  # since 2.6
        "_register_ddp_hooks",
        "_root_device",
        "_save_distributed_checkpoint",
        "_setup_distributed",
        "_setup_model",
        "_tensor_parallel_size",
        "_timeout",
    ),
    "loading data": ("_auto_add_worker_init_fn", "_get_distributed_sampler", "_update_dataloader"),
}
"""Private names of Lightning that this library reads, by their owner; since 2.4 or as marked."""

if TYPE_CHECKING:
    from datetime import timedelta

    import torch
    from torch import Tensor
    from torch.optim import Optimizer

    class StrategyAPI:
        """Members of a strategy that mixins call; members of Fabric's strategy are marked."""

        accelerator: Any
        checkpoint_io: Any
        cluster_environment: Any
        global_rank: int
        lightning_module: Any
        local_rank: int
        lr_scheduler_configs: list[Any]
        model: Any
        num_nodes: int
        num_processes: int
        optimizers: list[Optimizer]
        precision: Any  # Fabric
        precision_plugin: Any
        process_group_backend: str | None
        root_device: torch.device
        world_size: int

        _accelerator: Any
        _data_parallel_size: Any
        _ddp_kwargs: dict[str, Any]
        _device_mesh: Any
        _tensor_parallel_size: Any
        _launcher: Any
        _root_device: torch.device
        _save_distributed_checkpoint: bool
        _timeout: timedelta | None

        @property
        def distributed_sampler_kwargs(self) -> dict[str, Any]: ...

        def all_gather(self, *args: Any, **kwargs: Any) -> Any: ...
        def all_reduce(self, *args: Any, **kwargs: Any) -> Any: ...  # Fabric
        def backward(self, *args: Any, **kwargs: Any) -> Any: ...
        def barrier(self, *args: Any, **kwargs: Any) -> Any: ...
        def batch_to_device(self, *args: Any, **kwargs: Any) -> Any: ...
        def broadcast(self, *args: Any, **kwargs: Any) -> Any: ...
        def _setup_model(self, model: Any) -> Any: ...
        def configure_ddp(self) -> None: ...
        def lightning_module_state_dict(self) -> dict[str, Any]: ...
        def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]: ...
        def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None: ...
        def load_optimizer_state_dict(self, checkpoint: Any) -> None: ...
        def on_exception(self, exception: BaseException) -> None: ...
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None: ...
        def on_train_end(self) -> None: ...
        def on_train_start(self) -> None: ...
        def on_validation_end(self) -> None: ...
        def on_validation_start(self) -> None: ...
        def optimizer_state(self, optimizer: Any) -> dict[str, Any]: ...
        def optimizer_step(self, *args: Any, **kwargs: Any) -> Any: ...
        def post_backward(self, closure_loss: Tensor) -> None: ...
        def pre_backward(self, closure_loss: Tensor) -> None: ...
        def process_dataloader(self, dataloader: Any) -> Any: ...
        def reduce(self, *args: Any, **kwargs: Any) -> Any: ...
        def remove_checkpoint(self, filepath: Any) -> None: ...
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None: ...
        def setup(self, *args: Any, **kwargs: Any) -> Any: ...
        def setup_distributed(self) -> None: ...
        def setup_environment(self) -> None: ...
        def setup_module(self, module: torch.nn.Module) -> Any: ...  # Fabric
        def setup_module_and_optimizers(self, *args: Any, **kwargs: Any) -> Any: ...  # Fabric
        def setup_optimizer(self, optimizer: Optimizer) -> Optimizer: ...  # Fabric
        def setup_optimizers(self, trainer: Any) -> None: ...
        def teardown(self) -> None: ...
        def test_step(self, *args: Any, **kwargs: Any) -> Any: ...
        def training_step(self, *args: Any, **kwargs: Any) -> Any: ...
        def validation_step(self, *args: Any, **kwargs: Any) -> Any: ...

        def _configure_launcher(self) -> None: ...
        def _setup_distributed(self) -> None: ...

else:
    StrategyAPI = object
