"""Weights that a launcher has put into shared memory are each worker's own."""

import torch
from torch import nn

from lightning_gc.lightning.workarounds import unshare


def test_parameters_and_buffers_leave_shared_memory() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    module.share_memory()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    unshare(module)
    assert not any(tensor.is_shared() for tensor in module.state_dict().values())
    assert module[2].weight is module[0].weight, "tied weights stay tied"
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
