"""The page "Speed" shows of FSDP what the example's transformer sends, and how it trains."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl

from lightning_gc import QSGD, CompressionMonitor, Identity, NaturalCompression, PerParameter
from tests.support.fitting import quiet_trainer, unwarned
from tests.support.fsdp import fsdp, plain
from tests.support.processes import run_in_processes

pytestmark = [pytest.mark.processes, pytest.mark.nightly, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `([^`]+)` \| ([\d,]+) \| 1(?:/([\d.]+))? \| ([\d.]+) \|$", re.M)
METHODS = {
    "Identity()": Identity(),
    "QSGD(8)": QSGD(8),
    "PerParameter(QSGD(8))": PerParameter(QSGD(8)),
    "NaturalCompression()": NaturalCompression(),
    "QSGD(4)": QSGD(4),
}


def fit(strategy: Any, *callbacks: Any) -> dict[str, float]:
    example: Any = runpy.run_path(str(ROOT / "examples" / "sharded.py"))
    pl.seed_everything(0, verbose=False)
    trainer = quiet_trainer(strategy, devices=2, max_epochs=4, callbacks=list(callbacks))
    with unwarned():
        trainer.fit(example["Transformer"](), example["sentences"]())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def measured(rank: int) -> dict[str, tuple[str, str, float]]:
    """Train with each method; return bytes, ratio and loss."""
    found: dict[str, tuple[str, str, float]] = {}
    dense = 0.0
    for name, method in METHODS.items():
        metrics = fit(fsdp(method), CompressionMonitor())
        dense, sent = (metrics[f"compression_epoch/{kind}_bytes"] for kind in ("dense", "wire"))
        found[name] = (f"{sent:,.0f}", f"{dense / sent:.2f}", metrics["loss"])
    found["ModelParallelStrategy"] = (f"{dense:,.0f}", "", fit(plain(2))["loss"])
    return found


def test_the_table_is_what_was_measured() -> None:
    """Bytes to the last one; losses are one machine's."""
    expected = ROW.findall((ROOT / "docs" / "measurements.md").read_text())
    found, _ = run_in_processes(measured, 2, timeout=300)
    assert {name for name, *_ in expected} == set(found)
    for name, sent, ratio, loss in expected:
        assert found[name][:2] == (sent, ratio or "1.00"), name
        assert abs(found[name][2] - float(loss)) < 0.002, name
