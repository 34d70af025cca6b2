"""After a resume nothing that training uses is left in the host's memory, shown without a GPU.

A checkpoint is read into the host's memory. Pretended CUDA tensors, of which torch knows all but
the values, raise where they are mixed with those of the host.
"""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_gc import PowerSGD, StepAhead, TopK
from lightning_gc.checkpoint import memory_store
from lightning_gc.checkpoint.worker_state import CheckpointParts, WorkerState
from lightning_gc.control.control_loop import ControlLoop
from lightning_gc.control.probes import gradient_moments
from lightning_gc.controllers import AdaQS
from lightning_gc.core.bucket import Bucket
from lightning_gc.engine import error_buffers
from lightning_gc.engine.error_buffers import ErrorBuffers
from lightning_gc.exchange import Workers
from lightning_gc.exchange.compression import Compression
from lightning_gc.exchange.peers import Peers
from lightning_gc.lightning.base import Lookahead
from lightning_gc.transports.simulated import Ledger

CUDA = torch.device("cuda", 0)
SHAPE = (40, 30)


class Reached(Exception):
    """A collective has got its tensor."""


class Resumed:
    """A worker, and what a checkpoint holds of it, in the host's memory."""

    def __init__(self, compressor: Any, memory: Any = None) -> None:
        self.workers = Workers(Compression(compressor, memory).configured("test"))
        self.workers.names = {torch.nn.Parameter(torch.zeros(SHAPE, device=CUDA)): "w"}
        self.workers.start(Ledger(1).pages, revocable=False)
        self.controller = AdaQS()
        self.control = ControlLoop(self.controller, self.workers)
        self.control.attach()
        self.parts = CheckpointParts(self.workers, self.control)
        self.epoch = self.control.statistics[0].epoch
        statistics = self.control.statistics[0].own_state()
        statistics["observer"] |= {"sums": {"w": torch.ones(SHAPE)}, "squares": 2.0, "first": 0}
        self.engine_state = {
            "memory": {"w": {"error": torch.ones(SHAPE)}}
            if self.workers.first.memory.buffers
            else {},
            "compressor": {"w": {"q": torch.ones(30, 1)}},
            "learning_rates": {},
            "step": 3,
        }
        self.own = {"memory": self.engine_state["memory"], "controller": statistics}

    def by_strategy(self) -> None:
        shared = self.parts.shared_state() | {"step": 3, "layout": [["w"]]}
        own = ({"compressor": self.engine_state["compressor"]},)
        self.parts.apply([WorkerState(shared, self.own, own)], CUDA)

    def by_attach(self) -> None:
        loop = self.control.state_dict({})
        named = self.parts.configuration["controller"]
        control = {"controller": named, "loop": loop, "worker": self.own["controller"]}
        saved = {"engine": self.engine_state, "levels": None, "layout": [["w"]], "control": control}
        self.parts.apply([memory_store.of_worker(saved, self.parts)], CUDA)


WAYS = pytest.mark.parametrize("way", [Resumed.by_strategy, Resumed.by_attach])


def see(resumed: Resumed) -> None:
    """One step's gradient. To lay buffers out anew, alone of all, needs real CUDA."""
    bucket = Bucket(torch.ones(1200, device=CUDA), {"w": SHAPE}, step=4)
    with pytest.MonkeyPatch.context() as patch:
        old = {"sum": resumed.epoch._store.named["w"]["sum"].view(-1)}
        patch.setattr(ErrorBuffers, "flat", lambda self, bucket: old)
        resumed.epoch.see_gradient(bucket)


@WAYS
def test_errors_and_state_of_compressors(way: Any) -> None:
    with FakeTensorMode():
        resumed = Resumed(PowerSGD(1))
        way(resumed)
        engine = resumed.workers.first
        assert engine.errors()["w"].device == CUDA
        assert engine.compressor_state["w"]["q"].device == CUDA


@WAYS
def test_weights_move_ahead_in_the_first_step(way: Any) -> None:
    with FakeTensorMode():
        resumed = Resumed(TopK(0.1), StepAhead())
        way(resumed)
        Lookahead(1.0, resumed.workers.names).move(resumed.workers.first.errors(), {"w": 0.1})


@WAYS
@pytest.mark.parametrize("steps", [0, 1], ids=["at an epoch's end", "within an epoch"])
def test_the_first_decision(way: Any, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL has no all-reduce for the host's tensors."""
    monkeypatch.setattr(torch.Tensor, "__float__", lambda tensor: 1.0)  # there are no values
    devices: list[torch.device] = []

    def mean(tensor: torch.Tensor) -> torch.Tensor:
        devices.append(tensor.device)
        raise Reached

    with FakeTensorMode():
        resumed = Resumed(TopK(0.1))
        way(resumed)
        for _ in range(steps):
            see(resumed)
            assert isinstance(resumed.epoch._squares, torch.Tensor)
            assert resumed.epoch._squares.device == CUDA
        with pytest.raises(Reached):
            gradient_moments([resumed.epoch], 3, 1, Peers(True, CUDA, mean))
    assert devices == [CUDA]


def test_restored_errors_are_kept_until_the_stream_that_lays_them_out_has_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They belong to the training thread's stream, which would get their memory back at once."""
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(error_buffers, "used_here", kept.append)
    buffers = ErrorBuffers(("error",))
    buffers.load({"w": {"error": torch.ones(SHAPE)}})
    restored = buffers.named["w"]["error"]
    buffers.flat(Bucket(torch.zeros(SHAPE).view(-1), {"w": SHAPE}))
    assert any(each is restored for each in kept)
