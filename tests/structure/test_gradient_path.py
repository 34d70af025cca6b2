"""Deep modules: few files on a gradient's path, no import circle, no module for one importer."""

import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import grimp
import pytest
import torch
import torch.distributed as dist

import lightning_gc
from lightning_gc import TopK
from lightning_gc.compressors.wrappers.per_parameter import by_default
from lightning_gc.engine import Engine
from lightning_gc.transports import Distributed, Recording
from tests.support.processes import hold_port

HOME = Path(lightning_gc.__file__).parent


@pytest.fixture
def group() -> Iterator[None]:
    held = hold_port()
    address = f"tcp://127.0.0.1:{held.getsockname()[1]}"
    timeout = timedelta(seconds=30)
    dist.init_process_group("gloo", address, rank=0, world_size=1, timeout=timeout)
    yield
    dist.destroy_process_group()
    held.close()


def visited(engine: Engine, recording: Recording) -> set[str]:
    """Return the files of the library that take part in one step with two parameters."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(HOME):
            files.add(str(path.relative_to(HOME)))

    flat, shapes = torch.randn(64 * 64 + 64), {"weight": (64, 64), "bias": (64,)}
    sys.setprofile(note)
    try:
        flow = engine.flow(flat, shapes)
        engine.advance()
        recording.run(flow, flat.device)
    finally:
        sys.setprofile(None)
    return files


@pytest.mark.usefixtures("group")
def test_a_gradient_visits_few_files() -> None:
    """Of ``TopK`` by default, in a step after the first, over Gloo.

    25 before the second storey, and again since kernels work on whole buckets.
    """
    engine, recording = Engine(by_default(TopK(0.01))), Recording(Distributed())
    visited(engine, recording)
    files = visited(engine, recording)
    assert len(files) <= 25, sorted(files)


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
