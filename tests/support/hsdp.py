"""Fits of models in shards: 2 replicas on 2 ranks each, over Gloo, in real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

from lightning_gc.lightning.for_pytorch_lightning import CompressedHSDPStrategy
from tests.support.accelerator import BACKEND, DEVICE
from tests.support.fitting import quiet_trainer

RANKS = 4


class NativeHSDP(ModelParallelStrategy):
    """What torch itself offers: HSDP with a dense all-reduce, on a mesh of two dimensions."""

    def __init__(self, replicas: int, **options: Any) -> None:
        super().__init__(data_parallel_size=RANKS, tensor_parallel_size=1, **options)
        self.replicas = replicas

    def setup_environment(self) -> None:
        super().setup_environment()
        shape = (self.replicas, RANKS // self.replicas)
        names = ("replicate", "shard")
        self._device_mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=names)
        self.lightning_module._device_mesh = self._device_mesh  # type: ignore[union-attr]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": RANKS, "rank": self.global_rank}


class Sharded(pl.LightningModule):
    """A net in units of its own, one of them frozen, with rows that S does not divide.

    Args:
        policy: mixed precision of the units.
        adam: trained by AdamW, else by SGD.
        seed: of its weights.
        momentum: of SGD.
    """

    def __init__(
        self,
        policy: MixedPrecisionPolicy | None = None,
        adam: bool = False,
        seed: int = 0,
        momentum: float = 0.9,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.ModuleList([nn.Linear(8, 37), nn.Linear(37, 40), nn.Linear(40, 40)])
        self.head = nn.Linear(40, 3)
        self.gain = nn.Parameter(torch.ones(1))  # empty on all ranks but the first of a node
        self.body[1].bias.requires_grad_(False)
        self.frozen = nn.Linear(40, 40)
        self.frozen.requires_grad_(False)
        self.policy, self.adam = policy or MixedPrecisionPolicy(), adam
        self.momentum = momentum
        self.losses: list[float] = []

    @property
    def mesh(self) -> Any:
        """What the documentation says; of two dimensions where torch itself replicates."""
        native = isinstance(self.trainer.strategy, NativeHSDP)
        return self.device_mesh if native else self.device_mesh["data_parallel"]  # type: ignore[index]

    def configure_model(self) -> None:
        if hasattr(self.head, "set_requires_gradient_sync"):
            return
        for layer in (*self.body, self.frozen, self.head, self):
            fully_shard(layer, mesh=self.mesh, mp_policy=self.policy)

    def forward(self, batch: Tensor) -> Tensor:
        for layer in self.body:
            batch = torch.tanh(layer(batch))
        output: Tensor = self.head(batch + 0.1 * self.frozen(batch)) * self.gain
        return output

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self(batch) - batch[:, :3] * 2).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        trained = [param for param in self.parameters() if param.requires_grad]
        if self.adam:
            return torch.optim.AdamW(trained, lr=0.01)
        return torch.optim.SGD(trained, lr=0.05, momentum=self.momentum)


class OtherwiseSharded(Sharded):
    """A module that is sharded in another way than documented.

    Args:
        how: name of a method.
        on: the rank that does so; None: all.
    """

    def __init__(self, how: str, on: int | None = None) -> None:
        super().__init__()
        self.how, self.on = how, on

    def configure_model(self) -> None:
        if self.on in (None, self.global_rank):
            getattr(self, self.how)()
        else:
            self.as_documented()

    def as_documented(self) -> None:
        super().configure_model()

    def unsharded(self) -> None:
        pass

    def only_the_head(self) -> None:
        fully_shard(self.head, mesh=self.mesh)

    def in_float16(self) -> None:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
        fully_shard(self, mesh=self.mesh, mp_policy=policy)


def batches_of(rank: int, steps: int, seed: int = 0) -> list[Tensor]:
    """Return a rank's own data."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [torch.randn(6, 8, generator=generator) for _ in range(steps)]


def batches(rank: int, steps: int) -> Any:
    """Return them as a loader."""
    return DataLoader(batches_of(rank, steps), batch_size=None)  # type: ignore[arg-type]


def hsdp(compressor: Any, replicas: int = 2, **options: Any) -> CompressedHSDPStrategy:
    """Return the strategy of a rank that runs in a process of its own."""
    return CompressedHSDPStrategy(
        compressor, replicas=replicas, process_group_backend=BACKEND, **options
    )


def fit_sharded(
    rank: int,
    strategy: Any,
    steps: int = 4,
    module: Callable[[], Any] = Sharded,
    resume: Any = None,
    ranks: int = RANKS,
    **settings: Any,
) -> dict[str, Any]:
    """Train as one of four ranks; return what the fit has left there."""
    torch.manual_seed(0)
    model = module()
    trainer = quiet_trainer(strategy, devices=ranks, use_distributed_sampler=False, **settings)
    trainer.fit(model, batches(rank, steps), ckpt_path=resume)
    return left_by(trainer, model)


def left_by(trainer: Any, model: Any) -> dict[str, Any]:
    """Return whole parameters, and this rank's part of what a memory keeps, as arrays."""
    strategy = trainer.strategy
    engine = getattr(strategy, "engine", None)
    return {
        "whole": {n: whole(p).cpu().numpy() for n, p in model.named_parameters()},
        "memory": {} if engine is None else as_arrays(engine),
        "losses": model.losses,
        "steps": trainer.global_step,
        "rounds": None if engine is None else engine.step,
        "levels": strategy.levels() if engine is not None else None,
    }


class Resumed(pl.Callback):
    """Notes this rank's memory and parts when training begins, and saves when it ends."""

    def __init__(self, path: str = "") -> None:
        self.path = path
        self.memory: dict[str, Any] = {}
        self.parts: dict[str, Any] = {}
        self.step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        engine = trainer.strategy.engine
        self.step = engine.step
        self.memory = as_arrays(engine)
        self.parts = trainer.strategy.shard_parts

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.path:
            trainer.save_checkpoint(self.path)


def as_arrays(engine: Any) -> dict[str, Any]:
    memory = engine.state_dict()["memory"]
    return {
        f"{n} {b}": t.cpu().numpy().copy() for n, kept in memory.items() for b, t in kept.items()
    }


def whole(param: Tensor) -> Tensor:
    """Return all of a sharded parameter, in float32 or wider."""
    full: Tensor = param.full_tensor() if hasattr(param, "full_tensor") else param  # type: ignore[operator]
    return full.detach().to(torch.promote_types(full.dtype, torch.float32)).clone()
