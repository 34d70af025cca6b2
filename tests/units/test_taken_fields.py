"""Fields that each way in takes: declared once, and seen by type checkers, ``help`` and docs."""

import dataclasses
import inspect
import typing
from typing import Any

import pytest
from lightning_fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from pytorch_lightning.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from torch.nn.parallel import DistributedDataParallel

import lightning_gc
from lightning_gc.checkpoint.side_file_store import Kept, KeptFields
from lightning_gc.core.settings import parted
from lightning_gc.exchange.compression import Compression, CompressionFields
from lightning_gc.local_steps import RoundFields, RoundPlan

DECLARED: list[tuple[Any, Any]] = [
    (Compression, CompressionFields),
    (Kept, KeptFields),
    (RoundPlan, RoundFields),
]
HOOKS = {"ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"}
OF_DDP = HOOKS | {"mixed_precision", "process_group", "module"}  # refused, or made by the strategy
OF_DDP |= {"check_reduction", "device_ids", "dim", "output_device"}  # Lightning's, or old
WAYS: dict[str, tuple[set[Any], list[Any]]] = {
    "CompressedDDPStrategy": ({Compression, Kept}, [DDPStrategy, DistributedDataParallel]),
    "CompressedHSDPStrategy": ({Compression, Kept}, [ModelParallelStrategy]),
    "CompressedFSDPStrategy": ({Compression}, [ModelParallelStrategy]),
    "CompressedFabricStrategy": ({Compression}, [FabricDDPStrategy, DistributedDataParallel]),
    "LocalStepsStrategy": ({Compression, Kept, RoundPlan}, [DDPStrategy, DistributedDataParallel]),
    "SimulatedDDPStrategy": ({Compression, Kept}, [SingleDeviceStrategy]),
    "SimulatedLocalStepsStrategy": ({Compression, Kept, RoundPlan}, [SingleDeviceStrategy]),
    "LocalSteps": ({Compression, RoundPlan}, []),
    "attach": ({Compression}, []),
}
IN_ORDER = ["compressor", "memory", "scheme", "controller"]


def fields_of(cls: Any) -> dict[str, Any]:
    types = typing.get_type_hints(cls)
    return {f.name: types[f.name] for f in dataclasses.fields(cls) if f.repr}


def by_name(way: Any) -> Any:
    """The ``TypedDict`` of the keywords that a type checker reads in the source."""
    function: Any = getattr(way, "__init__") if isinstance(way, type) else way  # noqa: B009
    (keywords,) = (
        each
        for each in typing.get_type_hints(function).values()
        if typing.get_origin(each) is typing.Unpack
    )
    return typing.get_args(keywords)[0]


@pytest.mark.parametrize(("cls", "typed"), DECLARED, ids=lambda cls: cls.__name__)
def test_type_checkers_know_the_fields(cls: Any, typed: Any) -> None:
    declared = {name: each for name, each in fields_of(cls).items() if name not in IN_ORDER}
    assert typing.get_type_hints(typed) == declared
    assert not typed.__required_keys__


@pytest.mark.parametrize("name", WAYS)
def test_every_way_in_takes_them(name: str) -> None:
    """By its signature, its docstring, and the ``TypedDict`` of its keywords."""
    way: Any = getattr(lightning_gc, name)
    settings, above = WAYS[name]
    takes = inspect.signature(way).parameters
    typed = typing.get_type_hints(by_name(way))
    described = (inspect.getdoc(way) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    if name != "CompressedFSDPStrategy":
        (first,) = {list(takes).index("compressor")} & {0, 1, 2}
        assert list(takes)[first : first + 4] == IN_ORDER
    for cls in settings:
        for field in dataclasses.fields(cls):
            if field.repr and (name, field.name) not in OWN:
                default = takes[field.name].default
                assert default == field.default or field.name == "compressor"
                assert field.name in (IN_ORDER if field.name not in typed else typed)
                assert f"\n    {field.name}: " in f"\n{described}"
    own = {n for n, each in takes.items() if each.kind is each.KEYWORD_ONLY}
    assert {"seed", "verify", "min_numel"} <= set(typed) & own
    for cls in above:
        given = {*inspect.signature(cls.__init__).parameters} - OF_DDP - {"self", "kwargs"}
        assert given - set(takes) - {"data_parallel_size"} <= set(typed), cls


OWN = {("CompressedFSDPStrategy", "compressor"), ("CompressedFSDPStrategy", "scheme")}


def test_hidden_fields_are_no_arguments() -> None:
    given = {"every": 4, "owner": "mine"}
    assert parted(given, RoundPlan) == [{"every": 4}, {"owner": "mine"}]
    with pytest.raises(ValueError, match=r"owner=\.\.\.\): unknown argument"):
        lightning_gc.SimulatedLocalStepsStrategy("qsgd", workers=2, owner="mine")  # type: ignore[call-arg]


def test_a_description_of_the_class_replaces_that_of_the_field() -> None:
    said = inspect.getdoc(lightning_gc.LocalStepsStrategy) or ""
    assert said.count("\n    state: ") == 1
    assert "the common\n        weights only" in said
    assert "\n    owner: " not in said
