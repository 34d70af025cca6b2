"""The word "auto": what it stands for in every way in, and where it is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from pytorch_lightning import Trainer
from pytorch_lightning.strategies import StrategyRegistry
from torch import nn

import lightning_gc
from lightning_gc import (
    QSGD,
    Cast,
    CompressedDDPStrategy,
    CompressedFabricStrategy,
    CompressedFSDPStrategy,
    CompressedHSDPStrategy,
    ErrorFeedback,
    LocalSteps,
    LocalStepsStrategy,
    Menu,
    NoMemory,
    SimulatedDDPStrategy,
    SimulatedLocalStepsStrategy,
    attach,
)
from lightning_gc.controllers import Auto
from lightning_gc.exchange.automatic import menu_of
from lightning_gc.huggingface import CompressedGradients
from lightning_gc.memories import Memory

OWN = Menu({"four": QSGD(4), "cast": Cast()})


def parts(strategy: Any) -> tuple[Menu, Memory, Auto]:
    if hasattr(strategy, "configuration"):  # Fabric's
        found = strategy.configuration
        return found.compressor, found.memory, strategy.controller
    return strategy.compressor, strategy.memory, strategy.controller


@pytest.mark.parametrize(
    "strategy",
    [
        CompressedDDPStrategy("auto"),
        CompressedHSDPStrategy("auto"),
        CompressedFabricStrategy("auto"),
        SimulatedDDPStrategy("auto", workers=2),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_by_default_gradients_are_rounded_and_nothing_is_kept(strategy: Any) -> None:
    menu, memory, controller = parts(strategy)
    assert menu.names == ("QSGD(4)", "QSGD(6)", "QSGD(8)", "Cast()")
    assert (memory, controller) == (NoMemory(), Auto())


def test_with_feedback_errors_are_kept() -> None:
    menu, memory, _ = parts(CompressedDDPStrategy("auto", controller=Auto("feedback")))
    assert set(menu_of("rounding")[0].names) < set(menu.names)
    assert {"PowerSGD(2)", "TopK(0.01)", "ChunkedTopK and BinMeans"} < set(menu.names)
    assert memory == ErrorFeedback()


@pytest.mark.parametrize("word", ["rounding", "feedback"])
def test_what_is_permitted_can_be_part_of_the_word(word: str) -> None:
    registry: Any = StrategyRegistry
    asked = parts(CompressedDDPStrategy("auto", controller=Auto(word)))
    for strategy in (
        CompressedDDPStrategy(f"auto_{word}"),
        CompressedFabricStrategy(f"auto_{word}"),
        SimulatedDDPStrategy(f"auto_{word}", workers=2),
        registry.get(f"compressed_ddp_auto_{word}"),
        registry.get(f"compressed_hsdp_auto_{word}"),
        registry.get(f"compressed_ddp_auto_{word}_find_unused_parameters_true"),
    ):
        assert parts(strategy) == asked
    told = parts(CompressedDDPStrategy(f"auto_{word}", controller=Auto(every=8)))
    assert told[2] == Auto(word, every=8)


@pytest.mark.parametrize(
    "make",
    [
        CompressedDDPStrategy,
        CompressedHSDPStrategy,
        CompressedFabricStrategy,
        partial(SimulatedDDPStrategy, workers=2),
        partial(CompressedGradients, None),
        partial(attach, None),  # type: ignore[arg-type]
    ],
)
def test_allow_is_refused_with_what_to_write(make: Any) -> None:
    with pytest.raises(ValueError, match=r'give compressor="auto_feedback", or controller=Auto\('):
        make("auto", allow="feedback")


def test_a_menu_of_ones_own_in_either_place() -> None:
    for strategy in (
        CompressedDDPStrategy("auto", controller=Auto(OWN)),
        CompressedDDPStrategy(OWN, controller=Auto()),
        CompressedDDPStrategy(OWN, controller="auto"),
    ):
        menu, memory, controller = parts(strategy)
        assert menu.names == ("four", "cast")
        assert memory == ErrorFeedback()
        assert controller == Auto(OWN)


def test_a_memory_that_is_given_stays() -> None:
    assert parts(CompressedDDPStrategy("auto", memory="error_feedback"))[1] == ErrorFeedback()


@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_by_name(kind: str) -> None:
    registry: Any = StrategyRegistry
    strategy = registry.get(f"compressed_{kind}_auto")
    assert isinstance(strategy.controller, Auto)
    assert f"compressed_{kind}_auto" in registry.available_strategies()
    assert "compressed_fsdp_auto" not in registry


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: LocalStepsStrategy(OWN, controller=Auto()), "local steps save time by H"),
        (lambda: SimulatedLocalStepsStrategy("auto", workers=2), "local steps save time by H"),
        (
            lambda: LocalSteps(nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)], 0.1), "auto"),
            "local steps save time by H",
        ),
        (
            lambda: CompressedFSDPStrategy("qsgd", controller=Auto()),
            "nothing can be weighed; name a method",
        ),
        (lambda: CompressedDDPStrategy(OWN, controller=Auto("feedback")), "leave allow out"),
        (lambda: CompressedDDPStrategy("auto_rounding", controller=Auto(OWN)), "leave allow out"),
        (lambda: CompressedDDPStrategy("auto_feedbak"), "did you mean 'auto_feedback'"),
        (lambda: CompressedDDPStrategy("feedback"), "did you mean 'auto_feedback'"),
        (lambda: LocalStepsStrategy("auto_feedback"), "local steps save time by H"),
        (
            lambda: CompressedDDPStrategy(Auto("feedback")),  # type: ignore[arg-type]
            r"a controller; write CompressedDDPStrategy\('auto', controller=Auto\(allow='feedback'",
        ),
        (lambda: Auto("rouding"), "give 'rounding', 'feedback', or a Menu"),
        (lambda: CompressedDDPStrategy("auto", controller=Auto(7)), "or a Menu"),
        (lambda: Auto(["rounding"]), r"Auto\(allow=\['rounding'\]\): give 'rounding'"),
        (lambda: Auto(QSGD(4)), "or a Menu of your own, such as Menu"),
        (lambda: Auto(every=2), "steps must be 4 or more"),
        (lambda: CompressedDDPStrategy("auto", scheme="all_reduce"), "AllReduce"),
    ],
)
def test_refusals(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize("word", ["auto_feedback", "auto_rounding", "qsgd"])
def test_a_word_alone_is_no_strategy_and_the_error_says_the_name(word: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean strategy='compressed_ddp_{word}'"):
        Trainer(strategy=word, accelerator="cpu", logger=False)


def test_a_misspelt_word_is_answered() -> None:
    with pytest.raises(ValueError, match=r"'autto' is not a compressor \(did you mean 'auto'\?\)"):
        CompressedDDPStrategy("autto")
    assert "Auto" in vars(lightning_gc.controllers)["__all__"]
