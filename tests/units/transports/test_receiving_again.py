"""A reply is received into the memory of an earlier one, with the same contents and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gc.core import Exchange, Gather
from lightning_gc.core.flow import Arrived
from lightning_gc.core.message import Packed, reserve, reserve_all
from lightning_gc.transports import distributed
from tests.support.counted_waits import DEVICE, Accelerator, on_device

FIELDS = [(torch.float32, 3), (torch.uint8, 5)]
WORKERS = 3


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> distributed.Distributed:
    """Worker 1 of three; worker w sends what worker 1 sends, and adds w to each byte."""

    def arrive(out: Tensor, own: Tensor) -> None:
        rows = out.view(WORKERS, -1)
        for worker, row in enumerate(rows):
            row.copy_(own.view(-1)[: row.numel()] + worker)

    def to_all(out: Tensor, own: Tensor, *, group: Any = None, **splits: Any) -> None:
        arrive(out, own)

    def gather(out: Tensor, own: Tensor, group: Any = None) -> None:
        arrive(out, own)

    monkeypatch.setattr(distributed, "_all_gather", gather)
    monkeypatch.setattr(dist, "all_to_all_single", to_all)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: WORKERS)
    return distributed.Distributed()


def message(kind: str) -> tuple[Gather | Exchange, list[Packed]]:
    if kind == "gather":
        payload = reserve(FIELDS, DEVICE)
        return Gather(payload), [payload]
    payloads = reserve_all(FIELDS, DEVICE, WORKERS)
    return Exchange(tuple(payloads)), payloads


def fill(payloads: list[Packed], number: int) -> None:
    for payload in payloads:
        for tensor in payload:
            tensor.fill_(number)
        payload.padding.zero_()


@pytest.mark.parametrize("kind", ["gather", "exchange"])
def test_same_contents_and_bytes(kind: str, transport: distributed.Distributed) -> None:
    with Accelerator():
        request, payloads = message(kind)
        fill(payloads, 1)
        first = transport.fulfil(request)
        assert isinstance(first, Arrived)
        sent = transport.sent_bytes
        place = first.moved(on_device(torch.zeros(first.memory.numel(), dtype=torch.uint8)))
        assert _numbers(place) == _numbers(first)
        fill(payloads, 2)
        again = transport.fulfil(request._replace(into=place))
        assert again is place
        assert transport.sent_bytes == 2 * sent
        assert _numbers(again) == _numbers(transport.fulfil(request)) != _numbers(first)


def _numbers(reply: Any) -> list[list[list[float]]]:
    return [[tensor.tolist() for tensor in payload] for payload in reply]


def test_tensors_elsewhere_are_not_received_again(transport: distributed.Distributed) -> None:
    """A payload that is copied to a message would leave the copy stale."""
    with Accelerator():
        reply = transport.fulfil(Gather((on_device(torch.ones(3)), on_device(torch.ones(2)))))
    assert not isinstance(reply, Arrived)
