"""A setting under which two NCCL communicators can wait for each other is warned of."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from lightning_gc.exchange.validation import warn_of_one_queue

PLAIN, SYNCED = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.SyncBatchNorm(2))


def starts(
    module: nn.Module, unused: bool, queues: str | None, backend: str, patch: pytest.MonkeyPatch
) -> None:
    # A group that was made without naming a backend has no other name.
    patch.setattr(dist, "get_backend", lambda group: "undefined")
    patch.setattr(dist, "get_backend_config", lambda group: backend)
    patch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if queues is not None:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    ddp: Any = SimpleNamespace(module=module, find_unused_parameters=unused, process_group=None)
    warn_of_one_queue(ddp)


@pytest.mark.parametrize(
    ("module", "unused", "named"),
    [(SYNCED, False, "SyncBatchNorm"), (PLAIN, True, "find_unused_parameters=True")],
)
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_one_queue(module, unused, named, backend, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=rf"collectives of {named}\. .*Unset CUDA_DEVICE_MAX"):
        starts(module, unused, "1", backend, monkeypatch)


@pytest.mark.parametrize(
    ("module", "unused", "queues", "backend"),
    [
        (PLAIN, False, "1", "nccl"),
        (SYNCED, True, None, "nccl"),
        (SYNCED, True, "8", "nccl"),
        (SYNCED, True, "1", "gloo"),
    ],
)
def test_all_else_is_not_warned_of(
    module, unused, queues, backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        starts(module, unused, queues, backend, monkeypatch)
