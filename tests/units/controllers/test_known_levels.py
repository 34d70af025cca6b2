"""Levels that are known beforehand lie in the range of the compressor's knob, or are refused."""

import pytest

from lightning_gc import QSGD, CompressedDDPStrategy, HardThreshold, PowerSGD, TopK
from lightning_gc.compressors import Compressor
from lightning_gc.controllers import (
    Accordion,
    BandwidthAware,
    BytesBudget,
    Chain,
    CongestionAIMD,
    Controller,
    DynamicBitWidth,
    Fixed,
    GainSearch,
    LayerBudget,
    Plan,
    RoundSchedule,
    Schedule,
)


@pytest.mark.parametrize(
    ("compressor", "controller", "said"),
    [
        (PowerSGD(), Accordion(low=0.1, high=0.01), "0.1 is outside .* rank, 1 to 256; .* as 4"),
        (PowerSGD(), Schedule((4, None, 0.5)), "level 0.5 is outside"),
        (QSGD(), Schedule.dgc_warmup(), "level 0.25 is outside .* bits, 2 to 16"),
        (TopK(), Fixed(4), "level 4 is outside .* density, 1e-05 to 1; .* as 0.01"),
        (TopK(), Plan({"body.*": 0.1}, default=8), "level 8 is outside"),
        (TopK(), Plan({"body.*": 2}), "level 2 is outside"),
        (TopK(), DynamicBitWidth(), "level 4 is outside"),
        (PowerSGD(), BandwidthAware((2, 1, 0.5), 0.1), "level 0.5 is outside"),
        (PowerSGD(), CongestionAIMD(0.1), "level 0.01 is outside"),
        (TopK(), CongestionAIMD(0.1, most=2), "level 2 is outside"),
        (QSGD(), GainSearch(), "level 0.1 is outside"),
        (TopK(), LayerBudget(), r"level 4\.0 is outside"),
        (TopK(), BytesBudget(1e6), r"level 4\.0 is outside"),
        (PowerSGD(), Chain(Fixed(4), Fixed(0.1), 2), "level 0.1 is outside"),
    ],
    ids=repr,
)
def test_outside(compressor: Compressor, controller: Controller, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CompressedDDPStrategy(compressor, controller=controller)


def test_outside_in_a_schedule_of_rounds() -> None:
    with pytest.raises(ValueError, match=r"level 0\.1 is outside"):
        RoundSchedule((1, 8), levels=Fixed(0.1)).check(PowerSGD().knob)


@pytest.mark.parametrize(
    ("compressor", "controller"),
    [
        (PowerSGD(), Accordion(low=4, high=1)),
        (TopK(), Schedule.dgc_warmup()),
        (TopK(), Schedule((1.0, None, 1e-5))),
        (HardThreshold(), Fixed(0.001)),
        (QSGD(), DynamicBitWidth()),
        (TopK(), CongestionAIMD(0.1)),
        (TopK(), GainSearch()),
        # A level to choose from may be clamped: 1 bit is 2, and their points on a curve coincide.
        (QSGD(), LayerBudget()),
        (QSGD(), BytesBudget(1e6)),
    ],
    ids=repr,
)
def test_inside(compressor: Compressor, controller: Controller) -> None:
    assert CompressedDDPStrategy(compressor, controller=controller).controller == controller
