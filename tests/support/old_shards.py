"""Checkpoints of models in shards as formats 1 and 2 wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_gc.checkpoint.shard_store import (
    SHARDED,
    ShardedSaving,
    file_of,
    folder_of,
    taken_out,
)
from lightning_gc.core.checksum import with_checksum
from lightning_gc.core.pytree import each_tensor
from lightning_gc.sharded.sharded_workers import dim_of
from lightning_gc.transports.distributed import Distributed, gather_text


class Format2(ShardedSaving):
    """Writes the controller's state under its name of then."""

    number = 2

    def _averaged(self) -> Any:
        averaged = super()._averaged()
        return {"turn" if name == "controller" else name: v for name, v in averaged.items()}

    def _write(self, main: Any, target: Path) -> list[str]:
        main[SHARDED], main["turn"] = self.number, main.pop("controller")
        return self._write_files(main, target)

    def _write_files(self, main: Any, target: Path) -> list[str]:
        return super()._write(main, target)


class Format1(Format2):
    """Writes tensors in a distributed checkpoint; a record of the files is to be removed."""

    number = 1

    def _write_files(self, main: Any, target: Path) -> list[str]:
        host: Any = self.host
        if host.distributed_form:
            target.mkdir(parents=True, exist_ok=True)
            host.barrier()
        folder = folder_of(target, main["stem"])
        tensors, rest = taken_out(self._averaged(), host.local_workers.shapes)
        common = self.mode == "mean"
        if common:
            tensors = {
                path: host.reduce(t.float().clone(), group=host.replicate_group, reduce_op="mean")
                for path, t in tensors.items()
            }
        small = {p: t.to(self.dtype) if p[0] == "memory" else t for p, t in tensors.items()}
        state = {json.dumps(path): self._whole(path, t, common) for path, t in small.items()}
        save(state, checkpoint_id=folder)
        own = {
            "averaged": each_tensor(rest, torch.Tensor.cpu),
            "compressor": each_tensor(
                host.local_workers.first.state_dict()["compressor"], lambda t: t.detach().cpu()
            ),
            "rank": host.global_rank,
            **{name: main[name] for name in (SHARDED, "run", "stem")},
        }
        own = with_checksum(own)
        torch.save(own, file_of(folder, host.global_rank, host.world_size))
        return gather_text(str(own["sha256"]), Distributed(), host.root_device)

    def _whole(self, path: tuple[str, ...], local: Tensor, common: bool) -> DTensor:
        host: Any = self.host
        param = next(p for p, name in host.names.items() if name in path)
        mesh = host._device_mesh["replicate", "data_parallel"]
        shape = torch.Size((1 if common else mesh.size(0), *param.shape))
        rows = Replicate() if common else Shard(0)
        return DTensor.from_local(
            local.unsqueeze(0),
            mesh,
            (rows, Shard(dim_of(param) + 1)),
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
