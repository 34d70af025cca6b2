"""TotalError's rule matches calculations by hand, and what it no longer does is named."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lightning_gc import CompressedDDPStrategy, HardThreshold, TopK
from lightning_gc.controllers import (
    Controller,
    Observation,
    TotalError,
    TotalErrorBudget,
)
from tests.support.fitting import unwarned
from tests.support.replay import levels, replay

RESNET18, GOOGLENET, SENET18 = 11_173_962, 6_166_250, 11_260_354


@pytest.mark.parametrize(
    ("elements", "printed", "exact"),
    [
        (RESNET18, 4.73e-3, 0.004730057383),
        (GOOGLENET, 6.37e-3, 0.006367360517),
        (SENET18, 4.71e-3, 0.004711877405),
    ],
)
def test_the_papers_rule(elements: int, printed: float, exact: float) -> None:
    """1/(2√(0.001 d)), worked out with 30 decimals; printed are the authors' own."""
    seen = [Observation(e, num_elements=elements, max_epochs=9) for e in (-1, 0, 1)]
    got = levels(TotalError(k_min=0.001), seen)
    assert got == [pytest.approx(exact, rel=1e-9)] * 3
    assert got[0] == pytest.approx(printed, rel=2e-3)
    assert f"{elements:,}" in replay(TotalError(k_min=0.001), seen)[0].reason


ALL = [TotalError(k_min=0.1), TotalErrorBudget(0.1)]


@pytest.mark.parametrize("controller", ALL, ids=repr)
def test_total_errors_are_logged_and_asked_for(controller: Controller) -> None:
    first = Observation(-1, num_elements=9, num_compressed=9, progress=0.0)
    first = replace(first, total_error=2.5, total_error_update=0.5)
    figures = replay(controller, [first])[0].figures
    assert (figures["total_error"], figures["total_error_update"]) == (2.5, 0.5)
    assert controller.needs.errors


@pytest.mark.parametrize("controller", ALL, ids=repr)
def test_only_a_threshold_can_be_driven(controller: Controller) -> None:
    controller.check(HardThreshold().knob)
    for knob, what in ((TopK().knob, "a density"), (None, "no level")):
        with pytest.raises(ValueError, match=f"this compressor has {what}; use HardThreshold"):
            controller.check(knob)


@pytest.mark.parametrize(
    ("sent", "silent"), [(0, True), (1, False), (50, False)], ids=["nothing", "one", "some"]
)
def test_a_threshold_that_nothing_reaches_is_warned_of_once(sent: int, silent: bool) -> None:
    """Of 100 elements 10 are always sent whole; the epoch has 5 steps."""
    first = Observation(-1, num_elements=100, num_compressed=90)
    seen = [replace(first, epoch=e, steps=5, sent_elements=50 + sent) for e in range(6)]
    warned = [bool(d.warning) for d in replay(TotalError(k_min=0.1), [first, *seen])]
    assert warned == [silent and e == 0 for e in range(-1, 6)]


def test_the_warning_says_what_to_do() -> None:
    first = Observation(-1, num_elements=100, num_compressed=90)
    seen = [first, replace(first, epoch=0, steps=5, sent_elements=50)]
    simple = replay(TotalError(k_min=0.25), seen)[1].warning
    assert "TotalError(k_min=0.25): no element has reached the threshold 0.1 in the" in simple
    assert "Use TotalErrorBudget" in simple


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TotalError(k_min=0.0), ["k_min=0.0", "(0, 1]"]),
        (lambda: TotalError(k_min=math.nan), ["k_min=nan", "(0, 1]"]),
        (lambda: TotalError(budget=0.1), ["use TotalErrorBudget(budget=0.1, initial=None)"]),
        (lambda: TotalError(budget=0.1, initial=2.0), ["use TotalErrorBudget(budget=0.1, initial"]),
        (
            lambda: TotalError(k_min=0.2, estimate_epochs=2),
            ["is gone", "use TotalErrorBudget(0.2)"],
        ),
        (lambda: TotalErrorBudget(1.5), ["budget=1.5", "(0, 1]"]),
        (lambda: TotalErrorBudget(0.1, initial=0.0), ["initial=0.0", "(0, 1e30)"]),
        (lambda: TotalErrorBudget(0.1, initial=math.inf), ["initial=inf", "(0, 1e30)"]),
    ],
)
def test_bad_settings_are_named(make: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match="TotalError") as caught:
        make()
    assert all(word in str(caught.value) for word in words)


def test_settings_of_old_that_asked_for_nothing_else_still_work() -> None:
    old = TotalError(k_min=0.1, estimate_epochs=0, budget=None, initial=None)
    assert old == TotalError(0.1)
    assert repr(old) == "TotalError(k_min=0.1)"


def test_yaml_of_old_is_told_the_same() -> None:
    """What a LightningCLI file says is parsed from the same arguments."""
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(CompressedDDPStrategy, "strategy")
    old = {"class_path": "lightning_gc.controllers.TotalError", "init_args": {"budget": 0.02}}
    given = {"compressor": {"class_path": "lightning_gc.HardThreshold"}, "controller": old}
    with unwarned(), pytest.raises(ValueError, match=r"use TotalErrorBudget\(budget=0\.02"):
        parser.instantiate(parser.parse_object({"strategy": given}))
