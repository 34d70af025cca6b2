"""Every Python block in README and documentation runs.

Titled blocks are files, the other blocks of a page make one file, one after the other.
"""

import json
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_gc import COMPRESSORS, CompressedDDPStrategy, CompressionMonitor, cli
from tests.support.processes import run_in_processes, without_others

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "docs" / "tutorials").glob("*.md"))
CONFIG = re.compile(r'^```yaml title="(train.yaml)"\n(.*?)^```', re.S | re.M)
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```", re.S | re.M)


def scripts(page: Path) -> dict[str, str]:
    """File name -> code. Helpers that a later file imports come first, as on the page."""
    found: dict[str, str] = {}
    for info, code in BLOCK.findall(page.read_text()):
        title = re.search(r'title="([^"]+)"', info)
        name = title.group(1) if title else "train.py" if "__main__" in code else "page.py"
        found[name] = found.get(name, "") + code
    return found


def run_script(worker: int, folder: str, name: str, workers: int) -> None:
    """Be a process in which a user runs a file, or one of those that Lightning would start."""
    if workers == 1:
        without_others()
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = [name]
    if name.startswith("test_"):
        assert pytest.main(["-q", "-p", "no:cacheprovider", name]) == pytest.ExitCode.OK
    else:
        runpy.run_path(name, run_name="__main__")


def written(page: Path, folder: Path) -> dict[str, str]:
    found = scripts(page)
    for name, code in found.items():
        (folder / name).write_text(code)
    return found


WITH_CODE = [p for p in PAGES if scripts(p)]
LONG = (
    "write-a-compressor.md",  # all contracts; test_new_compressor.py has such a method by day
    "kinds-of-training.md",  # torch.compile; unused and frozen parameters are in tests/processes
    "own-study.md",  # studies; tests/tuning has studies by day
)
each_page = pytest.mark.parametrize("page", WITH_CODE, ids=lambda p: p.name)


@pytest.mark.processes
@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=pytest.mark.nightly if p.name in LONG else ()) for p in WITH_CODE],
    ids=lambda p: p.name,
)
def test_code_on_pages_runs(page: Path, tmp_path: Path) -> None:
    """In processes that have imported torch before; those of two workers are started together."""
    for name, code in written(page, tmp_path).items():
        workers = 2 if "__main__" in code and "devices=2" in code else 1
        run_in_processes(run_script, workers, str(tmp_path), name, workers)


@pytest.mark.nightly
@pytest.mark.processes
@each_page
def test_code_on_pages_runs_as_a_user_starts_it(page: Path, tmp_path: Path) -> None:
    for name in written(page, tmp_path):
        start(name, tmp_path)


def start(name: str, folder: Path) -> None:
    tool = ["-m", "pytest", "-q", "-p", "no:cacheprovider"] if name.startswith("test_") else []
    done = subprocess.run(
        [sys.executable, *tool, name],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, f"{name}\n{done.stdout}\n{done.stderr}"


@pytest.mark.nightly
@pytest.mark.processes
def test_a_study_of_the_other_flavour(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    for name, code in scripts(ROOT / "docs" / "own-study.md").items():
        (tmp_path / name).write_text(
            code.replace("from pytorch_lightning", "from lightning.pytorch")
        )
    for name in ("study.py", "workers.py"):
        start(name, tmp_path)


def fit_from_yaml(worker: int, folder: str) -> None:
    os.chdir(folder)
    sys.path.insert(0, folder)
    assert cli.main(["fit", "train.yaml"]) == cli.OK


def yaml_page(folder: Path) -> dict[str, Any]:
    page = ROOT / "docs" / "kinds-of-training.md"
    (found,) = CONFIG.findall(page.read_text())
    (folder / found[0]).write_text(found[1])
    written(page, folder)
    loaded: dict[str, Any] = yaml.safe_load(found[1])
    return loaded


@pytest.mark.processes
def test_the_file_of_the_page_from_yaml_trains(tmp_path: Path) -> None:
    yaml_page(tmp_path)
    run_in_processes(fit_from_yaml, 2, str(tmp_path))
    (log,) = tmp_path.rglob("events.*")
    events = EventAccumulator(str(log)).Reload()
    first, *_, last = (event.value for event in events.Scalars("~compression/ratio"))
    assert 1 < first < 10 < last  # the controller's first level and its last


def instantiate(part: Any) -> Any:
    """Return what Hydra makes of a part of a file: each ``_target_`` with its arguments."""
    if not isinstance(part, dict):
        return part
    made = {name: instantiate(value) for name, value in part.items() if name != "_target_"}
    return pkgutil.resolve_name(part["_target_"])(**made) if "_target_" in part else made


def test_the_files_for_hydra_name_classes_with_their_arguments() -> None:
    text = (ROOT / "docs" / "by-name.md").read_text()
    blocks = dict(re.findall(r'^```yaml title="([^"]+)"\n(.*?)^```', text, re.S | re.M))
    trainer, callbacks = (instantiate(yaml.safe_load(block)) for block in blocks.values())
    assert isinstance(trainer["strategy"], CompressedDDPStrategy)
    assert "QSGD(4)" in str(trainer["strategy"].compressor)
    assert isinstance(callbacks["compression_monitor"], CompressionMonitor)


def class_paths(part: Any) -> Iterator[tuple[str, set[str]]]:
    """Yield each class of a file with the names of its arguments."""
    if isinstance(part, dict):
        if "class_path" in part:
            yield part["class_path"], set(part.get("init_args", ()))
        for value in part.values():
            yield from class_paths(value)


def schemas(part: Any) -> Iterator[tuple[str, set[str]]]:
    """Yield each class of a schema with the names of the arguments that it takes."""
    if isinstance(part, dict):
        named = part.get("properties", {})
        if "const" in named.get("class_path", {}):
            yield named["class_path"]["const"], set(named["init_args"].get("properties", ()))
        for value in part.values():
            yield from schemas(value)
    if isinstance(part, list):
        for value in part:
            yield from schemas(value)


@pytest.mark.slow
def test_the_schema_for_editors_knows_the_file_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = yaml_page(tmp_path)["trainer"]["strategy"]
    assert cli.main(["schema"]) == cli.OK
    known = dict(schemas(json.loads(capsys.readouterr().out)))
    for path, arguments in class_paths(strategy):
        unknown = arguments - known[path]
        assert unknown <= {"find_unused_parameters"}, path  # DDP's
    classes = {f"lightning_gc.{cls.__name__}" for cls in COMPRESSORS.values()}
    classes |= {"lightning_gc.CompressedFSDPStrategy", "lightning_gc.CompressedHSDPStrategy"}
    strategies = {"lightning_gc.LocalStepsStrategy", "lightning_gc.SimulatedDDPStrategy"}
    assert strategies | classes <= set(known)
    assert {"replicas", "bucket_cap_mb"} <= known["lightning_gc.CompressedHSDPStrategy"]
    assert {"every", "outer"} <= known["lightning_gc.LocalStepsStrategy"]
