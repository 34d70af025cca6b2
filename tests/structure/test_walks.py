"""Deep modules: short walks, no import circle, no module for one importer.

A gradient, a checkpoint and a decision each enter few files. Each walk begins at the user's
entrance, and is traced in all threads.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import grimp
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import lightning_gc
from lightning_gc import QSGD, Identity, SimulatedDDPStrategy, TopK, attach
from lightning_gc.compressors import Compressor
from lightning_gc.control.control_loop import ControlLoop
from lightning_gc.controllers import Accordion
from lightning_gc.kernels import dispatch
from tests.support.fitting import quiet_trainer, unwarned
from tests.support.models import Plain, common_batches

HOME = Path(lightning_gc.__file__).parent


class Walk:
    """Notes the files of the library whose functions are called while it is watched."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.calls = 0
        self._watched = False
        threading.setprofile(self._note)  # of threads that begin from now on
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and self._watched:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(HOME):
                self.files.add(str(path.relative_to(HOME)))
                self.calls += 1

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the body."""
        self._watched = True
        try:
            yield
        finally:
            self._watched = False

    def through(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is watched from its call to its end."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.watched():
                return function(*args, **kwargs)

        return call

    def end(self) -> None:
        """Let nothing be traced any more."""
        threading.setprofile(None)
        sys.setprofile(None)


@pytest.fixture
def walk() -> Iterator[Walk]:
    made = Walk()
    yield made
    made.end()


@pytest.mark.parametrize(
    ("compressor", "kernels", "files", "calls"),
    [
        pytest.param(TopK(0.01), True, 24, 241, id="compiled"),
        pytest.param(TopK(0.01), False, 26, 304, id="torch's operations"),
        pytest.param(QSGD(4), True, 25, 271, id="quantised"),
        pytest.param(Identity(), True, 16, 87, id="uncompressed"),
    ],
)
def test_a_gradient_enters_few_files(
    walk: Walk,
    monkeypatch: pytest.MonkeyPatch,
    compressor: Compressor,
    kernels: bool,
    files: int,
    calls: int,
) -> None:
    """Hook and engine, in the fourth backward pass.

    Torch's operations take the place of kernels that are not compiled yet. They choose and code
    parameter by parameter, so they enter two files more.
    """
    families = ("segments", "sparse", "levels")
    if kernels:
        ready = all(dispatch.compiled(torch.ones(1), family) for family in families)
        assert ready, "still being compiled: make kernels waits for them"
    else:
        monkeypatch.setattr(dispatch.host, "_works", dict.fromkeys(families, False))
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    with unwarned():
        attach(ddp, compressor)
    for _ in range(3):
        ddp(torch.randn(8, 64)).square().mean().backward()
    loss = ddp(torch.randn(8, 64)).square().mean()
    with walk.watched():
        loss.backward()
    walk.end()
    dist.destroy_process_group()
    assert len(walk.files) <= files, sorted(walk.files)
    assert walk.calls <= calls


def trainer(epochs: int) -> Any:
    controller = Accordion(low=0.1, high=0.01)
    strategy = SimulatedDDPStrategy(TopK(0.01), workers=2, controller=controller)
    return quiet_trainer(strategy, max_epochs=epochs)


def test_a_decision_enters_few_files(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of an epoch: observed, decided and applied."""
    monkeypatch.setattr(ControlLoop, "decide", walk.through(ControlLoop.decide))
    with unwarned():
        trainer(2).fit(Plain(), common_batches())
    assert len(walk.files) <= 18, sorted(walk.files)
    assert walk.calls <= 1530


def test_a_restored_checkpoint_enters_few_files(
    walk: Walk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pytorch_lightning.trainer.connectors.checkpoint_connector import _CheckpointConnector

    path = str(tmp_path / "a.ckpt")
    first = trainer(1)
    with unwarned():
        first.fit(Plain(), common_batches())
        first.save_checkpoint(path)
    for name in ("resume_start", "restore_training_state"):
        before = getattr(_CheckpointConnector, name)
        monkeypatch.setattr(_CheckpointConnector, name, walk.through(before))
    with unwarned():
        trainer(2).fit(Plain(), common_batches(), ckpt_path=path)
    assert len(walk.files) <= 19, sorted(walk.files)
    assert walk.calls <= 2170


def imports_of() -> dict[str, set[str]]:
    """Return what each module imports of the library, for type checking too."""
    graph = grimp.build_graph("lightning_gc", exclude_type_checking_imports=False)
    return {
        module: graph.find_modules_directly_imported_by(module) - {"lightning_gc"}
        for module in graph.modules - {"lightning_gc"}
    }


def test_no_import_circle() -> None:
    """Between modules; the package itself is lazy."""
    imports = imports_of()
    while leaves := {m for m, found in imports.items() if not found & imports.keys()}:
        imports = {m: found for m, found in imports.items() if m not in leaves}
    assert not imports, sorted(imports)


CATALOGUE = ("compressors", "memories", "schemes", "controllers")
"""Rooms with a file for each method."""
BOUNDARIES = {
    *("lightning.for_lightning", "lightning.for_pytorch_lightning", "lightning.for_ray"),
    *("lightning.fabric_for_lightning", "lightning.fabric_for_pytorch_lightning"),
}
"""Modules that alone import an optional package, or one of the two Lightning packages."""


def test_a_short_module_with_one_importer_belongs_to_it() -> None:
    imports = imports_of()
    users = {m: [u for u, found in imports.items() if m in found] for m in imports}
    alone = {}
    for module, found in users.items():
        name = module.removeprefix("lightning_gc.")
        path = HOME / f"{name.replace('.', '/')}.py"
        if len(found) != 1 or not path.is_file() or name.startswith(CATALOGUE):
            continue
        lines = len(path.read_text().splitlines())
        if lines < 80 and name not in BOUNDARIES:
            alone[name] = (lines, found[0])
    assert not alone
