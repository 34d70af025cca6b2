"""Nodes of two workers in real processes: as simulated, as DDP if uncompressed, and resumed."""

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_gc import QSGD, Hierarchical, Identity, PerParameter, TopK
from lightning_gc.exchange import Compression, Synchronizer, Workers
from tests.support.processes import run_in_processes
from tests.support.resuming import checkpoint, differences, in_processes
from tests.support.simulation import real, simulated

pytestmark = pytest.mark.processes
IN_NODES = {"scheme": Hierarchical(2)}
CASES: list[dict[str, Any]] = [
    {"compressor": PerParameter(TopK(0.05)), "options": IN_NODES},
    {"compressor": PerParameter(QSGD(4)), "options": IN_NODES},
    {"compressor": PerParameter(Identity()), "options": IN_NODES},
    {"compressor": Identity()},  # DDP, bit for bit
]
WIRE, NODE = "compression/total_wire_bytes", "compression_epoch/node_bytes"


@pytest.mark.parametrize("workers", [4, pytest.param(6, marks=pytest.mark.nightly)])
def test_as_simulated_and_as_ddp(workers: int) -> None:
    """Bit for bit what is simulated, bytes of either leg too; uncompressed it is DDP's mean."""
    runs = list(zip(*run_in_processes(real, workers, workers, CASES, timeout=200), strict=True))
    for case, them in zip(CASES[:-1], runs, strict=False):
        us, what = simulated(workers, case), repr(case["compressor"])
        assert us["metrics"] == them[0]["metrics"], what
        assert min(us["metrics"][NODE], us["metrics"][WIRE]) > 0, what
        assert us["digest"] == them[0]["digest"], what
        assert us["memory"] == [run["memory"][0] for run in them], what
    ours, dense = (each[0]["parameters"] for each in runs[-2:])
    for one, other in zip(ours, dense, strict=True):
        assert np.abs(one - other).max() <= 1e-6


def _warned(rank: int) -> list[str]:
    """Make synchronizers for nodes of three and of two; return what they warn of."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    said = []
    for near in (3, 2):
        workers = Workers(Compression(TopK(0.1), None, Hierarchical(near)).configured("test"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Synchronizer(workers, torch.device("cpu")).close()
        said.append(" ".join(str(w.message) for w in caught if "Hierarchical" in str(w.message)))
    dist.destroy_process_group()
    return said


def test_worker_0_warns_of_nodes_that_there_are_not() -> None:
    (three, two), silent = run_in_processes(_warned, 2)
    assert "2 workers are not nodes of 3" in three
    assert [two, *silent] == [""] * 3


def test_it_resumes_bit_for_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"compressor": PerParameter(TopK(0.2)), "epochs": 2} | IN_NODES
    whole = in_processes(4, folder=str(tmp_path / "whole"), **options)
    resume = checkpoint(tmp_path / "whole", 0, 5)
    resumed = in_processes(4, folder=str(tmp_path / "second"), resume=resume, **options)
    assert differences(whole, resumed) == []
