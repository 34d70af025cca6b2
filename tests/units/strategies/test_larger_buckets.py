"""On CUDA, DDP gets larger buckets if the host waits, and never over a user's size."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gc import CompressedDDPStrategy, CompressedFabricStrategy, TopK
from lightning_gc.advice.description import MODELS
from lightning_gc.lightning import ddp, fabric

WAITS = TopK(selection="sampled")
Setup = Callable[..., dict[str, Any]]
"""Sets a module up on a device, and returns the arguments that reach DDP."""


class Reached(Exception):
    """Raised in place of making a DDP wrapper."""


@pytest.fixture(params=["Trainer", "Fabric"])
def arguments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Setup:
    of_trainer = request.param == "Trainer"
    named = CompressedDDPStrategy if of_trainer else CompressedFabricStrategy
    cls: Any = type(named(TopK()))  # the class of the Lightning package that is installed
    base: Any = next(each for each in cls.__mro__ if each.__name__ == "DDPStrategy")
    room: Any = ddp if of_trainer else fabric
    reached: list[dict[str, Any]] = []

    def make(strategy: Any, module: nn.Module) -> None:
        reached.append(strategy._ddp_kwargs)
        raise Reached

    monkeypatch.setattr(base, "_setup_model" if of_trainer else "setup_module", make)
    monkeypatch.setattr(room, "check_agreement", lambda *_: None)
    monkeypatch.setattr(room, "Distributed", lambda: None)

    def call(
        module: nn.Module, device: str, method: TopK = WAITS, worker: int = 0, **options: Any
    ) -> dict[str, Any]:
        monkeypatch.setattr(cls, "root_device", torch.device(device))
        monkeypatch.setattr(cls, "global_rank", worker)
        strategy = cls(method, **options)
        with pytest.raises(Reached):
            (strategy._setup_model if of_trainer else strategy.setup_module)(module)
        assert strategy._ddp_kwargs == options  # for the next module
        return reached[-1]

    return call


def gpt2() -> nn.Module:
    shapes = MODELS["gpt2"]()
    return nn.ParameterList(torch.empty(shape, device="meta") for shape in shapes.values())


def test_larger_buckets_on_cuda(arguments: Setup, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with_unused = {"find_unused_parameters": True, "bucket_cap_mb": None}
    assert arguments(gpt2(), "cuda", **with_unused) == with_unused | {"bucket_cap_mb": 100}
    assert [record.getMessage() for record in caplog.records] == [
        "Buckets of 100 MiB, 4 in place of 13, because each takes the GPU's host time. "
        "bucket_cap_mb sets another size."
    ]
    caplog.clear()
    assert arguments(gpt2(), "cuda", worker=1)["bucket_cap_mb"] == 100
    assert not caplog.records


def test_parameters_that_are_not_trained_do_not_count(arguments: Setup) -> None:
    model = gpt2()
    for param in list(model.parameters())[:-4]:
        param.requires_grad_(False)
    assert arguments(model, "cuda") == {}


@pytest.mark.parametrize(
    ("device", "method", "options"),
    [
        ("cpu", WAITS, {}),
        ("cuda", WAITS, {"bucket_cap_mb": 25}),
        ("cuda", WAITS, {"bucket_cap_mb": 0.005, "static_graph": True}),
        ("cuda", TopK(), {"static_graph": True}),  # its exchange is recorded
    ],
)
def test_sizes_that_stay(
    arguments: Setup,
    device: str,
    method: TopK,
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    assert arguments(gpt2(), device, method, **options) == options
    assert not caplog.records
