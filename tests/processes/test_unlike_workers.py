"""Workers whose arithmetic differs are refused at the start, where it would part their weights."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from lightning_gc import AtomoSVD, PowerSGD, RandomK, TopK
from lightning_gc.compressors import Compressor
from lightning_gc.core import message
from lightning_gc.exchange import Synchronizer, Workers, configure, kernel_compilation
from lightning_gc.kernels import dispatch
from lightning_gc.transports import distributed
from lightning_gc.transports.base import lengths_of
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes
CPU = torch.device("cpu")
CASES: tuple[tuple[Compressor, str], ...] = (
    (TopK(0.1), "torch"),
    (TopK(0.1), "kernels"),
    (TopK(0.1), "device"),
    (RandomK(0.1), "device"),
    (PowerSGD(1), "device"),
    (AtomoSVD(1), "device"),
    (TopK(0.1), "build"),
    (TopK(0.1), "vectors"),
    (TopK(0.1), "numba"),
    (PowerSGD(1), "numba"),
)


def start(worker: int) -> list[str]:
    """Return what each start says, of workers of which the second has something else."""
    dist.init_process_group("gloo")
    found = [said(compressor, differs, worker) for compressor, differs in CASES]
    assert len(distributed_c10d._world.pg_map) == 1  # whoever was refused has left its own group
    return found


def meet(worker: int) -> list[str]:
    """Return what workers say of which the second has another wire format."""
    dist.init_process_group("gloo")
    return [said(TopK(0.1), differs, worker) for differs in ("format", "former format")]


def said(compressor: Compressor, differs: str, worker: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if worker == 1 and differs == "torch":
            patch.setattr(torch, "__version__", "2.6.0")
        if worker == 1 and differs == "build":  # for one GPU or another, which nobody uses
            patch.setattr(torch, "__version__", torch.__version__.partition("+")[0] + "+cu126")
        if worker == 1 and differs == "vectors":
            patch.setattr(kernel_compilation, "_vectors", lambda: "NEON")
        if worker == 1 and differs == "numba":
            patch.setattr(dispatch, "numba_in_words", lambda: "missing")
        if worker == 1 and differs == "kernels":
            patch.setattr(dispatch, "in_words", lambda device: "Triton 3.2.0")
        if worker == 1 and differs == "format":
            patch.setattr(distributed, "FORMAT", 3)
        if worker == 1 and differs == "former format":  # without a number, and with other padding
            patch.setattr(distributed, "_announcement", lengths_of)
            patch.setattr(distributed, "_lengths_in", lambda announced, sender: announced)
            patch.setattr(message, "ALIGNMENT", 8)
        if worker == 1 and differs == "device":
            patch.setattr(kernel_compilation, "device_in_words", lambda device: "a T4 with 40")
        workers = Workers(configure("test", compressor, None, None, 0))
        workers.name(nn.Linear(40, 40))
        try:
            synchronizer: Any = Synchronizer(workers, CPU)
        except ValueError as error:
            return str(error)
        synchronizer.close()
        return ""


def test_a_difference_is_harmless_or_refused() -> None:
    """On all workers alike, with what to do; who treats elements one by one may differ."""
    both = run_in_processes(start, 2)
    assert both[0] == both[1]
    torches, kernels, topk, randomk, powersgd, atomo, build, vectors, *numba = both[0]
    assert "Worker 1 has torch=2.6.0, but worker 0 has torch=" in torches
    assert "install the same version" in torches
    assert "Worker 1 has kernels=Triton 3.2.0, but worker 0 has kernels=torch." in kernels
    assert (topk, randomk, build) == ("", "", "")
    assert "Worker 1 has vector instructions=NEON, but worker 0 has vector" in vectors
    assert numba[0] == ""
    assert "Worker 1 has numba=missing, but worker 0 has numba=" in numba[1]
    assert "Install numba on all workers, or on none" in numba[1]
    for low_rank in (powersgd, atomo):
        assert "Worker 1 has device=a T4 with 40, but worker 0 has device=cpu with" in low_rank
        assert "such as TopK or QSGD" in low_rank


def test_workers_of_another_wire_format_name_each_other() -> None:
    """Before a message, whose size they would not agree on; the former version too."""
    first, second = run_in_processes(meet, 2)
    ours = "Worker 1 sends messages of another wire format than 2. Install the same version"
    assert all(ours in text for text in first)
    assert "Worker 0 sends messages of another wire format than 3" in second[0]
    assert "Worker 0 announces" in second[1]
    assert "elements where at most" in second[1]
