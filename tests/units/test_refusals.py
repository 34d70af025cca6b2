"""Bad input is refused early, in a sentence that names the value and the fix."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_lightning.demos.boring_classes import BoringModel
from torch import nn

from lightning_gc import (
    QSGD,
    Cast,
    CompressedDDPStrategy,
    CompressionMonitor,
    ErrorFeedback,
    HardThreshold,
    Identity,
    PerParameter,
    Quantised,
    RandomK,
    SimulatedDDPStrategy,
    SizeSwitch,
    TopK,
    TwoShot,
    VarianceCriterion,
)
from lightning_gc.core.bit_packing import pack, unpack
from lightning_gc.core.elias_fano import encode
from lightning_gc.exchange import Compression, Synchronizer, Workers
from lightning_gc.exchange.validation import refuse_sparse_gradients
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from lightning_gc.transports import Simulated
from tests.support.fitting import quiet_trainer

nan, inf = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("attempt", "value", "fix"),
    [
        (lambda: TopK(0.0), "density=0.0", "use 0.01"),
        (lambda: TopK(1.5), "density=1.5", "use 0.01"),
        (lambda: TopK(nan), "density=nan", "use 0.01"),
        (lambda: RandomK(-0.1), "density=-0.1", "use 0.01"),
        (lambda: QSGD(bits=1), "bits=1", "use 4"),
        (lambda: QSGD(bits=17), "bits=17", "use 4"),
        (lambda: QSGD(bits=2.5), "bits=2.5", "use 3"),  # type: ignore[arg-type]
        (lambda: QSGD(block_size=0), "block_size=0", "use 512"),
        (lambda: QSGD(norm="l1"), "norm='l1'", "use 'max' or 'l2'"),  # type: ignore[arg-type]
        (lambda: HardThreshold(-1.0), "threshold=-1.0", "use 0.01"),
        (lambda: HardThreshold(nan), "threshold=nan", "use 0.01"),
        (lambda: HardThreshold(inf), "threshold=inf", "use 0.01"),
        (lambda: Cast("float8"), "dtype='float8'", "use 'bfloat16'"),  # type: ignore[arg-type]
        (lambda: ErrorFeedback(decay=0.0), "decay=0.0", "NoMemory()"),
        (lambda: SizeSwitch(TopK(), min_numel=-1), "min_numel=-1", "turns a limit off"),
        (lambda: PerParameter("topk"), "'topk'", "TopK(0.01)"),  # type: ignore[arg-type]
        (lambda: Identity().at(0.5), "0.5", "no knob"),
        (lambda: TopK().at(nan), "nan", "give a number"),
        (
            lambda: Lockstep(2, Quantised(VarianceCriterion(), QSGD(4)), scheme=TwoShot()),
            "TwoShot()",
            "AllGather()",
        ),
        (lambda: Simulated(0), "workers=0", "at least one"),
        (lambda: CompressedDDPStrategy("topkk"), "'topkk'", "'topk'"),
        (lambda: CompressedDDPStrategy(TopK(), memory="full"), "'full'", "ErrorFeedback()"),
        (lambda: CompressedDDPStrategy(TopK(), scheme="ring"), "'ring'", "AllGather()"),
        (lambda: CompressedDDPStrategy(TopK(), seed="7"), "seed='7'", "whole number"),  # type: ignore[arg-type]
        (lambda: CompressedDDPStrategy(TopK(), controller=1), "controller=1", "Fixed(0.01)"),  # type: ignore[arg-type]
        (lambda: CompressedDDPStrategy(TopK(), scheme="all_reduce"), "AllReduce()", "AllGather()"),
        (lambda: pack(torch.zeros(1, dtype=torch.int64), 0), "bits=0", "1..56"),
    ],
)
def test_refused_in_a_sentence(attempt: Callable[[], Any], value: str, fix: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        attempt()
    assert value in str(caught.value)
    assert fix in str(caught.value)


@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
def test_one_strategy_object_in_two_trainers(accelerator: str) -> None:
    strategy = CompressedDDPStrategy(TopK(), start_method="spawn")
    settings: dict[str, Any] = {"accelerator": accelerator, "devices": 2}
    quiet_trainer(strategy, **settings)
    with pytest.raises(ValueError, match=r"already belongs to a Trainer.*Make a new one"):
        quiet_trainer(strategy, **settings)


def test_unknown_strategy_name() -> None:
    said = r"did you mean strategy='compressed_ddp_topk'\?.*lightning-gc list compressors"
    with pytest.raises(ValueError, match=said):
        quiet_trainer("compressed_ddp_topkk", devices=2)


def test_monitor_without_compression() -> None:

    trainer = quiet_trainer("auto", devices=1, callbacks=[CompressionMonitor()])
    with pytest.raises(ValueError, match=r"SingleDeviceStrategy.*CompressedDDPStrategy"):
        trainer.fit(BoringModel())


def test_sparse_embeddings() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(ValueError, match=r"0 is Embedding\(sparse=True\).*use sparse=False"):
        refuse_sparse_gradients(model)


def test_index_from_the_network_outside_the_bucket() -> None:
    """The position is damaged on the way: an error, and no element is touched."""
    x = torch.randn(100)
    topk = TopK(0.05)
    values, packed = topk.encode(x.clone(), cases.bucket_of(x))
    damaged = encode(torch.tensor([0, 1, 2, 3, 127]), 100)
    assert damaged.shape == packed.shape
    out = torch.zeros(100)
    with pytest.raises(ValueError, match="names position 127 of a tensor of 100"):
        topk.decode((values, damaged), out, 1.0, cases.bucket_of(x))
    assert not out.any()


def test_payload_of_the_wrong_length() -> None:
    with pytest.raises(ValueError, match="10 codes of 3 bits take 4 bytes"):
        unpack(torch.zeros(5, dtype=torch.uint8), 3, 10)


def test_workers_that_ask_for_different_things() -> None:
    """What would hang on a network is an error in the simulator."""
    lockstep = Lockstep(2, TopK(0.1))
    lockstep.engines[1].levels.set(0.2)
    with pytest.raises(ValueError, match=r"Worker 0 asks for .* but worker 1 for .*a hang"):
        lockstep.step([{"w": torch.randn(100)}, {"w": torch.randn(100)}])


def test_gradients_that_do_not_fit() -> None:
    lockstep = Lockstep(2, TopK(0.1))
    with pytest.raises(ValueError, match="2 workers, but 1"):
        lockstep.step([{"w": torch.randn(100)}])
    with pytest.raises(ValueError, match="Worker 1's gradients differ"):
        lockstep.step([{"w": torch.randn(100)}, {"w": torch.randn(99)}])


def test_changed_model_is_named() -> None:
    lockstep = Lockstep(1, TopK(0.1))
    lockstep.step([{"w": torch.randn(10, 10), "b": torch.randn(3)}])
    with pytest.raises(ValueError, match=r"stored error of w has shape \(10, 10\)"):
        lockstep.step([{"w": torch.randn(100)}])


@pytest.mark.parametrize(
    ("device", "why"), [("mps:0", "has no float64"), ("xpu:0", "has never been tried")]
)
def test_devices_that_are_neither_the_host_nor_cuda(device: str, why: str) -> None:
    """As ``accelerator="auto"`` finds them, on a Mac say, before anything is done there."""
    words = f"on '{device}', which {why}.*accelerator='cpu'"
    strategy = SimulatedDDPStrategy(TopK(0.1), workers=2, device=torch.device(device))
    with pytest.raises(ValueError, match=words):
        quiet_trainer(strategy=strategy, max_epochs=1).fit(BoringModel())
    workers = Workers(Compression(TopK(0.1)).configured("attach"))
    with pytest.raises(ValueError, match=words):
        Synchronizer(workers, torch.device(device))
