"""Workers whose arithmetic or models differ are refused at the start, on all of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import AtomoSVD, Elastic, LocalSteps, PowerSGD, RandomK, TopK, attach
from lightning_gc.compressors import Compressor
from lightning_gc.core import message
from lightning_gc.elastic.rendezvous import Rendezvous
from lightning_gc.elastic.roll import differing
from lightning_gc.exchange import Compression, Synchronizer, Workers, kernel_compilation
from lightning_gc.kernels import dispatch
from lightning_gc.lightning.fabric_for_pytorch_lightning import CompressedFabricStrategy
from lightning_gc.lightning.for_pytorch_lightning import CompressedDDPStrategy
from lightning_gc.transports import distributed
from lightning_gc.transports.base import lengths_of
from tests.support.fitting import fit
from tests.support.kernel_device import switched
from tests.support.local_steps import Learner, local
from tests.support.models import own_batches
from tests.support.processes import run_in_processes
from tests.support.processes import said as raised

pytestmark = pytest.mark.processes
CPU = torch.device("cpu")
CASES: tuple[tuple[Compressor, str], ...] = (
    (TopK(0.1), "torch"),
    (TopK(0.1), "lightning_gc"),
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
        if worker == 1 and differs == "lightning_gc":
            patch.setattr(kernel_compilation, "own_release", lambda: "0.1.0")
        if worker == 1 and differs == "build":  # for one GPU or another, which nobody uses
            patch.setattr(torch, "__version__", torch.__version__.partition("+")[0] + "+cu126")
        if worker == 1 and differs == "vectors":
            patch.setattr(kernel_compilation, "_vectors", lambda: "NEON")
        if worker == 1 and differs == "kernels":
            patch.setattr(dispatch, "in_words", lambda used, device: "Triton 3.2.0")
        if worker == 1 and differs == "format":
            patch.setattr(distributed, "FORMAT", 5)
        if worker == 1 and differs == "former format":  # without a number, and with other padding
            patch.setattr(distributed, "_announcement", lengths_of)
            patch.setattr(distributed, "_lengths_in", lambda announced, sender: announced)
            patch.setattr(message, "ALIGNMENT", 8)
        if worker == 1 and differs == "device":
            patch.setattr(kernel_compilation, "device_in_words", lambda device: "a T4 with 40")
        workers = Workers(Compression(compressor).configured("test"))
        workers.name(nn.Linear(40, 40))
        with switched("torch" if worker == 1 and differs == "numba" else "auto"):
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
    torches, own, kernels, topk, randomk, powersgd, atomo, build, vectors, *numba = both[0]
    assert "Worker 1 has torch=2.6.0, but worker 0 has torch=" in torches
    assert "install the same version" in torches
    assert "Worker 1 has lightning_gc=0.1.0, but worker 0 has lightning_gc=" in own
    assert "Worker 1 has kernels=Triton 3.2.0, but worker 0 has kernels=torch." in kernels
    assert (topk, randomk, build) == ("", "", "")
    assert "Worker 1 has vector instructions=NEON, but worker 0 has vector" in vectors
    assert numba[0] == ""
    assert "Worker 1 has numba=not used, but worker 0 has numba=low_rank" in numba[1]
    assert "Install numba on all workers, or on none" in numba[1]
    assert f"{dispatch.SWITCH}=torch on all" in numba[1]
    assert f"{dispatch.SWITCH}=torch on all" in kernels
    for low_rank in (powersgd, atomo):
        assert "Worker 1 has device=a T4 with 40, but worker 0 has device=cpu with" in low_rank
        assert "such as TopK or QSGD" in low_rank


def test_workers_of_another_wire_format_name_each_other() -> None:
    """Before a message, whose size they would not agree on; the former version too."""
    first, second = run_in_processes(meet, 2)
    ours = "Worker 1 sends messages of another wire format than 4. Install the same version"
    assert all(ours in text for text in first)
    assert "Worker 0 sends messages of another wire format than 5" in second[0]
    assert "Worker 0 announces" in second[1]
    assert "elements where at most" in second[1]


def tie(model: Any) -> None:
    model.tied.weight = model.head.weight


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dtype": (lambda m: m.head.to(torch.bfloat16), "head.weight=bfloat16 (4, 40) (parameter,"),
    "not trained": (lambda m: m.head.requires_grad_(False), "(parameter, not trained)"),
    "tied": (tie, "tied.weight=float32 (4, 40) (parameter, trained, tied to head.weight)"),
    "shape": (lambda m: setattr(m, "head", nn.Linear(40, 3)), "head.weight=float32 (3, 40)"),
    "dtype of a buffer": (lambda m: m.norm.double(), "norm.running_mean=float64 (40,) (buffer)"),
    "one more buffer": (lambda m: m.register_buffer("more", torch.ones(2)), "more=float32 (2,)"),
    "shape of a buffer": (
        lambda m: m.norm.register_buffer("running_mean", torch.ones(1)),
        "norm.running_mean=float32 (1,) (buffer)",
    ),
}
"""What is changed on worker 1, and how its model is described then."""


class Model(Learner):
    """Has all that can differ."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.tied = nn.Linear(40, 4)
        self.norm = nn.BatchNorm1d(40, affine=False)
        if change:
            CHANGES[change][0](self)


def by_local_steps(model: Model, **options: Any) -> LocalSteps:
    trained = [each for each in model.parameters() if each.requires_grad]
    return LocalSteps(model, torch.optim.SGD(trained, lr=0.1), TopK(0.1), every=2, **options)


def by_attach(change: str) -> None:
    """The model is changed afterwards, as DDP itself cannot compare types."""
    ddp = DistributedDataParallel(Model())
    if change:
        CHANGES[change][0](ddp.module)
    attach(ddp, TopK(0.1))


def by_trainer(strategy: Any, change: str, worker: int) -> None:
    settings: dict[str, Any] = {"devices": 2, "use_distributed_sampler": False}
    fit(strategy, lambda: Model(change), own_batches(worker, 2), **settings)


def by_fabric(change: str) -> None:
    strategy = CompressedFabricStrategy(TopK(0.1))
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    fabric.setup(Model(change))


def unlike(worker: int) -> dict[tuple[str, str], str]:
    dist.init_process_group("gloo")
    found: dict[tuple[str, str], str] = {}
    for name in CHANGES:
        change = name if worker == 1 else ""
        ddp = CompressedDDPStrategy(TopK(0.1))
        found |= {
            ("LocalSteps", name): raised(by_local_steps, Model(change)),
            ("attach", name): raised(by_attach, change),
            ("strategy", name): raised(by_trainer, local(TopK(0.1), every=2), change, worker),
            ("DDP strategy", name): raised(by_trainer, ddp, change, worker),
            ("Fabric", name): raised(by_fabric, change),
        }
    return found


def test_models_that_differ_are_refused_by_name() -> None:
    """In one thing each, before anything of the model is exchanged; no process is aborted."""
    one, other = run_in_processes(unlike, 2)
    assert one == other
    for (way, name), text in one.items():
        assert text.startswith("ValueError: Worker 1 has "), (way, name, text)
        assert CHANGES[name][1] in text.partition(", but worker 0 has ")[0], (way, name, text)
        assert "make the model in the same way on all" in text


def settings_of(worker: int, folder: str) -> list[dict[str, str]]:
    """Return what a job tells the rendezvous of itself, for each model."""
    server = Rendezvous(0, "secret", Path(folder) / "roll.jsonl")
    found = []
    for change in ("", "", *CHANGES):
        elastic = Elastic(f"127.0.0.1:{server.port}", secret="secret")
        made: Any = by_local_steps(Model(change), elastic=elastic)
        found.append(made.meeting.exchange._membership.member.report.terms.settings)
        made.end(failed=True)
    server.close()
    return found


def test_elastic_workers_compare_the_same(tmp_path: Path) -> None:
    """The rendezvous refuses whoever has other settings: a model changes one of them."""
    ((one, again, *others),) = run_in_processes(settings_of, 1, str(tmp_path))
    assert one == again
    assert len({tuple(each.values()) for each in (one, *others)}) == 1 + len(CHANGES)
    said = {differing(each, one).partition(" is ")[0] for each in others}
    assert said == {"tensors of the model"}
