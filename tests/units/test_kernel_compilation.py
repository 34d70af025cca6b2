"""Kernels are compiled when a synchronizer is made, whatever the method makes of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import TopK, attach
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Payload
from lightning_gc.engine.compatibility import combine
from lightning_gc.exchange import synchronizer
from lightning_gc.exchange.compression import Configuration
from lightning_gc.exchange.kernel_compilation import compile_kernels
from lightning_gc.kernels import dispatch
from lightning_gc.memories import Memory
from tests.support.instances import ALL_MEMORIES

HOST = torch.device("cpu")


@dataclass(frozen=True)
class OwnModelOnly(TopK):
    """A plug-in that knows the parameters of a certain model."""

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        asked.append(bucket.names)
        try:
            return {"weight": super().encode}[bucket.names[0]](buffer, bucket)
        except KeyError as error:
            error.add_note("As a kernel says what to do.")
            raise


asked: list[tuple[str, ...]] = []


def configured(compressor: TopK, memory: Memory | None = None) -> Configuration:
    return Configuration(*combine(compressor, memory), 0)


@pytest.fixture
def group() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:One worker:UserWarning")
@pytest.mark.usefixtures("group")
def test_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def see(*given: Any) -> dict[str, str]:
        seen.append(given)
        return {}

    monkeypatch.setattr(synchronizer, "compile_kernels", see)
    handle = attach(DistributedDataParallel(torch.nn.Linear(40, 40)), TopK(0.1))
    ((configuration, device),) = seen
    assert configuration.compressor.method == TopK(0.1)
    assert device == HOST
    handle.close()


def test_a_method_that_knows_its_own_parameters_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "may_compile", lambda device: True)
    compile_kernels(configured(OwnModelOnly(0.1)), HOST)
    assert asked
    assert "OwnModelOnly(0.1)" in caplog.text
    assert "compiled in the first step" in caplog.text
    assert "KeyError: 'even' As a kernel says what to do." in caplog.text
    asked.clear()
    monkeypatch.setattr(dispatch, "may_compile", lambda device: False)
    compile_kernels(configured(OwnModelOnly(0.1)), HOST)
    assert not asked


def test_with_every_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which may ask for weights; if one failed, nothing would be compiled."""
    monkeypatch.setattr(dispatch, "may_compile", lambda device: True)
    for memory in ALL_MEMORIES:
        compile_kernels(configured(TopK(0.1), memory), HOST)
    assert not caplog.records
