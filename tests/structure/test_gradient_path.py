"""How a gradient travels: the files that it visits, the engine's parts, and no import circles."""

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
from lightning_gc.engine import Engine
from lightning_gc.engine.compatibility import by_default
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
    """Of ``TopK`` by default, in a step after the first, over Gloo: 25 before the second storey."""
    engine, recording = Engine(by_default(TopK(0.01))), Recording(Distributed())
    visited(engine, recording)
    files = visited(engine, recording)
    assert len(files) <= 22, sorted(files)


def test_the_engine_has_few_attributes() -> None:
    assert len(vars(Engine(TopK(0.01)))) <= 12


def test_no_import_circle() -> None:
    """Between modules, imports for type checking included; the package itself is lazy."""
    graph = grimp.build_graph("lightning_gc", exclude_type_checking_imports=False)
    imports = {
        module: graph.find_modules_directly_imported_by(module) - {"lightning_gc"}
        for module in graph.modules - {"lightning_gc"}
    }
    while leaves := {m for m, found in imports.items() if not found & imports.keys()}:
        imports = {m: found for m, found in imports.items() if m not in leaves}
    assert not imports, sorted(imports)
