"""Large point-to-point messages arrive complete, and a vanished peer ends the exchange."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_gc.core.flow import Exchange, Gather
from lightning_gc.transports import Distributed
from lightning_gc.transports.p2p import PIECE
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes
LENGTHS = (PIECE // 4 + 3, PIECE - 1, 5, 0)  # of float32: pieces, and ones that are not full


def values(sender: int, receiver: int, length: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * sender + receiver)
    return torch.rand(length, generator=draw)


def swapped(worker: int, workers: int) -> None:
    dist.init_process_group("gloo", rank=worker, world_size=workers, timeout=timedelta(seconds=30))
    transport = Distributed(dist.new_group(list(range(workers))))
    for length in LENGTHS:
        for sender, (own,) in enumerate(transport.fulfil(Gather((values(worker, 0, length),)))):
            assert torch.equal(own, values(sender, 0, length))
        toward = tuple((values(worker, i, length),) for i in range(workers))
        for sender, (own,) in enumerate(transport.fulfil(Exchange(toward))):
            assert torch.equal(own, values(sender, worker, length))
    before = transport.sent_bytes
    ragged = tuple((values(worker, i, LENGTHS[(worker + i) % 4]),) for i in range(workers))
    for sender, (own,) in enumerate(transport.fulfil(Exchange(ragged, (PIECE,)))):
        assert torch.equal(own, values(sender, worker, LENGTHS[(worker + sender) % 4]))
    others = [LENGTHS[(worker + i) % 4] for i in range(workers) if i != worker]
    assert transport.sent_bytes - before == sum(-(-(4 * n + 8) // 16) * 16 + 8 for n in others)
    dist.destroy_process_group()


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_messages_of_many_pieces_arrive_whole(workers: int) -> None:
    run_in_processes(swapped, workers, workers)


def deserted(worker: int, end: str) -> tuple[str, float]:
    dist.init_process_group("gloo", rank=worker, world_size=2, timeout=timedelta(seconds=3))
    transport = Distributed()
    payload = (torch.ones(8 * PIECE),)
    transport.fulfil(Exchange((payload, payload)))
    if worker:
        if end == "dies":
            os._exit(1)
        time.sleep(60)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"all-to-all with worker 1 failed") as caught:
        transport.fulfil(Exchange((payload, payload)))
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("end", ["dies", "sleeps"])
def test_a_peer_that_is_gone_ends_the_exchange(end: str) -> None:
    message, seconds = run_in_processes(deserted, 2, end, timeout=40, wait_for=1)[0]
    assert "imed out" in message or "onnection" in message
    assert seconds < 20
