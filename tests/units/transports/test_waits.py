"""A message makes the host wait for an accelerator once if its lengths vary, and never else."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gc.core.flow import Exchange, Gather, Mean, Request
from lightning_gc.transports import distributed
from lightning_gc.transports.distributed import Distributed
from tests.support.counted_waits import Accelerator, on_device

WORKERS = 2


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Distributed:
    """One of two workers, whose peer sends what it sends itself."""

    def repeat(out: Tensor, own: Tensor, **_: Any) -> None:
        out.copy_(own.repeat(WORKERS))

    def summed(flat: Tensor, group: Any, async_op: bool) -> None:
        flat.mul_(WORKERS)

    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: WORKERS)
    monkeypatch.setattr(dist, "all_reduce", summed)
    monkeypatch.setattr(dist, "all_to_all_single", lambda out, own, **_: out.copy_(own))
    monkeypatch.setattr(distributed, "_all_gather", repeat)
    return Distributed()


def asked(kind: str) -> Request:
    values, codes = torch.arange(3.0), torch.arange(5).byte()
    payload = (on_device(values), on_device(codes))
    if kind == "mean":
        return Mean((on_device(values), on_device(values)))
    limits = (4, None) if "ragged" in kind else None
    return Exchange((payload,) * WORKERS, limits) if "exchange" in kind else Gather(payload, limits)


@pytest.mark.parametrize(
    ("kind", "waits"),
    [
        *(("mean", 0), ("gather", 0), ("exchange", 0)),
        *(("ragged gather", 1), ("ragged exchange", 1)),
    ],
)
def test_how_often(transport: Distributed, kind: str, waits: int) -> None:
    with Accelerator() as counting:
        reply = transport.fulfil(asked(kind))
        assert len(counting.waits) == waits, counting.waits
    arrived = reply if kind == "mean" else reply[1]
    assert arrived[0].held.tolist() == [0.0, 1.0, 2.0]


def test_lengths_are_sent_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which only a machine with a GPU can do, so it is enough to have asked for it."""
    made: list[dict[str, Any]] = []

    class Pinned:
        def to(self, device: torch.device, *, non_blocking: bool) -> str:
            return f"{device} {non_blocking}"

    def tensor(numbers: Any, **options: Any) -> Pinned:
        made.append(options)
        return Pinned()

    class Own:
        device = torch.device("cuda")

    monkeypatch.setattr(torch, "tensor", tensor)
    assert distributed._as_tensor([1, 2], (Own(),)) == "cuda True"  # type: ignore[arg-type,comparison-overlap]
    assert made[0]["pin_memory"] is True
