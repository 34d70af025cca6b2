"""A new compressor needs one file and one import line; registries, tests and docs find it."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pytorch_lightning.strategies import StrategyRegistry

import lightning_gc
from lightning_gc import COMPRESSORS, CompressedDDPStrategy, compressors
from lightning_gc.lightning import names
from lightning_gc.testing.contracts import CompressorContract
from tests.contracts import test_combinations, test_error_bounds, test_state
from tests.support import instances, scaled_sign
from tests.support.scaled_sign import ScaledSign

ROOT = Path(__file__).parents[2]
PACKAGE = "lightning_gc/compressors/__init__.py"
LINE = "from lightning_gc.compressors.scaled_sign import ScaledSign as ScaledSign\n"


def with_the_line() -> str:
    """Return the text of the package of compressors with one import line more."""
    after = "from lightning_gc.compressors.wrappers.size_switch"
    text = (ROOT / PACKAGE).read_text()
    assert text.count(after) == 1
    return text.replace(after, LINE + after)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is as the line makes it, with the file where the line looks for it."""
    monkeypatch.setitem(sys.modules, "lightning_gc.compressors.scaled_sign", scaled_sign)
    made = {"__name__": compressors.__name__}
    exec(with_the_line(), made)
    for name in ("__all__", "ScaledSign"):
        monkeypatch.setattr(compressors, name, made[name], raising=False)
    monkeypatch.setitem(COMPRESSORS, "scaled_sign", made["COMPRESSORS"]["scaled_sign"])  # type: ignore[index]


@pytest.mark.usefixtures("registered")
def test_it_has_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert COMPRESSORS["scaled_sign"] is ScaledSign
    monkeypatch.setattr(lightning_gc, "__all__", [])
    monkeypatch.setattr(lightning_gc, "ScaledSign", None, raising=False)
    lightning_gc._import_all()
    assert "ScaledSign" in lightning_gc.__all__
    assert lightning_gc.ScaledSign is ScaledSign  # type: ignore[attr-defined]


@pytest.mark.usefixtures("registered")
def test_lightning_has_a_strategy_of_its_name() -> None:
    registry = type(StrategyRegistry).__mro__[2]()  # Lightning's own class, before our names
    names.register(registry, ddp=CompressedDDPStrategy)
    strategy = registry.get("compressed_ddp_scaled_sign")
    assert repr(strategy.compressor).startswith("PerParameter(inner=SizeSwitch(inner=ScaledSign()")
    assert repr(strategy.memory) == "ErrorFeedback(decay=1.0, lr_aware=False, gain=1.0)"
    assert repr(strategy.scheme) == "AllGatherOrTwoShot()"


@pytest.mark.usefixtures("registered")
def test_tests_of_all_compressors_take_it() -> None:
    taken = runpy.run_path(instances.__file__)
    assert all(ScaledSign() in taken[name] for name in ("ALL", "FIRST", "ONE_EACH"))


class TestScaledSign(CompressorContract):
    instances = (ScaledSign(),)
    examples = 15


def test_it_passes_what_all_compressors_pass() -> None:
    test_error_bounds.test_random_tensors(ScaledSign(), 0.25)
    test_error_bounds.test_adversarial_tensors(ScaledSign(), 0.5)
    test_combinations.test_all_that_go_together(ScaledSign())
    test_state.test_a_compressor_goes_on_from_its_state(ScaledSign())


@pytest.mark.nightly
def test_docs_show_it(tmp_path: Path) -> None:
    results = "benchmarks/results/papers"  # the site has a page of them
    for folder in ("lightning_gc", "controllers", "docs", "configs", "examples", results):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True)
    for file in ("pyproject.toml", "mkdocs.yml", "CHANGELOG.md", "README.md", "SECURITY.md"):
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / PACKAGE).write_text(with_the_line())
    shutil.copy(scaled_sign.__file__, (tmp_path / PACKAGE).with_name("scaled_sign.py"))
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [p for p in (tmp_path / "site").rglob("*.html") if "ScaledSign" in p.read_text()]
    assert any("compressors" in str(page) for page in pages)
