"""Counts of epochs and steps are whole numbers; what no comparison refuses is refused with them."""

import re
from typing import Any

import pytest

from lightning_gc import CSER, ErrorReset, StepAhead
from lightning_gc.controllers import (
    Accordion,
    BandwidthAware,
    BytesBudget,
    Chain,
    CongestionAIMD,
    DynamicBitWidth,
    Fixed,
    LayerBudget,
)

inf, nan = float("inf"), float("nan")


def chain(at_epoch: Any) -> Chain:
    return Chain(Fixed(0.1), Fixed(0.01), at_epoch)


def dynamic(*bounds: Any) -> DynamicBitWidth:
    return DynamicBitWidth(tuple((bound, 4 * 2**i) for i, bound in enumerate(bounds)))


@pytest.mark.parametrize(
    ("attempt", "sentence"),
    [
        (lambda: chain(1.5), "Chain(at_epoch=1.5): at_epoch is a whole number; use 2."),
        (lambda: chain(nan), "Chain(at_epoch=nan): at_epoch is a whole number; use 1."),
        (lambda: DynamicBitWidth(patience=1.5), "patience is a whole number; use 2."),  # type: ignore[arg-type]
        (lambda: DynamicBitWidth(release_epochs=1.5), "is a whole number; use 2."),  # type: ignore[arg-type]
        (lambda: LayerBudget(interval=1.5), "(interval=1.5): interval is a whole number"),  # type: ignore[arg-type]
        (lambda: BytesBudget(9, interval=1.5), "(interval=1.5): interval is a whole number"),  # type: ignore[arg-type]
        (lambda: BandwidthAware((0.1, 0.01), 1.0, every=2.5), "every is a whole number; use 3."),  # type: ignore[arg-type]
        (lambda: CongestionAIMD(0.1, every=nan), "every is a whole number; use 8."),  # type: ignore[arg-type]
        (lambda: CSER(every=inf), "CSER(every=inf): every is a whole number; use 128."),  # type: ignore[arg-type]
        (lambda: ErrorReset(every=inf), "every is a whole number; use 128."),  # type: ignore[arg-type]
        (lambda: StepAhead(average_every=inf), "average_every is a whole number; use 0."),  # type: ignore[arg-type]
        (lambda: Accordion(0.1, 0.01, interval=inf), "interval is a whole number; use 10."),  # type: ignore[arg-type]
        (lambda: DynamicBitWidth(loss_delta=nan), "(loss_delta=nan): a change of the loss"),
        (lambda: DynamicBitWidth(loss_delta=-1), "(loss_delta=-1): a change of the loss"),
        (lambda: dynamic(0, nan), "a bound is a number, but one is nan"),
        (lambda: dynamic(0, "0.6"), "a bound is a number, but one is '0.6'"),
        (lambda: dynamic(0, None), "a bound is a number, but one is None"),
        (lambda: LayerBudget(levels=(4.0, None)), "LayerBudget(levels=(4.0, None)): give numbers"),  # type: ignore[arg-type]
        (
            lambda: BytesBudget(9, levels=(4.0, None)),  # type: ignore[arg-type]
            "BytesBudget(levels=(4.0, None)): give numbers",
        ),
    ],
)
def test_each_is_refused_when_it_is_written(attempt: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        attempt()


def test_whole_numbers_may_be_written_with_a_point() -> None:
    assert chain(2.0) == chain(2)
    assert CSER(every=4.0) == CSER(every=4)  # type: ignore[arg-type]
