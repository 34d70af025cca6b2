"""What is imported when: nothing heavy for --help, no extra for list, names in either Lightning."""

import importlib
import importlib.util
import re
import subprocess
import sys

import pytest

import lightning_gc

BLOCK = """
import importlib.abc, sys
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}")
sys.meta_path.insert(0, Blocked())
"""


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_help_needs_the_standard_library_only(word: str) -> None:
    heavy = ("torch", "numpy", "pytorch_lightning", "lightning", "optuna", "rich")
    said = run(
        BLOCK.format(names=heavy)
        + f"import runpy; sys.argv = ['lightning-gc', {word!r}]\n"
        + "runpy.run_module('lightning_gc', run_name='__main__')"
    )
    assert "lightning-gc" in said


def test_controllers_need_the_standard_library_only() -> None:
    run(BLOCK.format(names=("torch", "numpy")) + "import lightning_gc.controllers")


EXTRAS = (
    *("optuna", "jsonargparse", "rich", "matplotlib", "numba", "llvmlite", "sklearn", "scipy"),
    *("accelerate", "transformers", "pytest", "hypothesis", "psycopg", "triton", "lightning"),
)
"""The modules of all extras that users install; the base install has none of them."""


@pytest.mark.slow
def test_without_extras_all_names_are_imported() -> None:
    """Advice and measurements need no Optuna; what needs an extra names it."""
    code = f"""
import importlib, importlib.machinery as machinery, importlib.metadata as metadata, inspect
found, installed = machinery.PathFinder.find_spec, metadata.Distribution.from_name
machinery.PathFinder.find_spec = lambda name, *rest, **more: (
    None if name.partition(".")[0] in {EXTRAS!r} else found(name, *rest, **more)
)
metadata.Distribution.from_name = lambda name: installed(
    "none" if name.partition("[")[0] in {EXTRAS!r} else name  # torchmetrics asks for metadata
)
for name in {EXTRAS!r}:
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    raise AssertionError(f"{{name}} is not hidden")
from lightning_gc import *
import lightning_gc, lightning_gc.bench.benchmark
assert dict(inspect.getmembers(lightning_gc))["TopK"] is TopK
assert advise.__module__ == "lightning_gc.advice.advising"
from lightning_gc.methods.yaml_config import methods_in
for use in (lambda: methods_in({{"tune": {{"methods": ["topk"]}}}}), lambda: lightning_gc.tuning):
    try:
        use()
    except ImportError as error:
        print(error)
"""
    said = run(code)
    assert "Reading a YAML file needs jsonargparse" in said
    assert "lightning_gc.tuning needs optuna, jsonargparse, rich, matplotlib" in said
    assert said.count("pip install 'lightning-gc[tune]'") == 2


@pytest.mark.slow
def test_without_extras_the_catalogue_is_listed_and_contracts_name_theirs() -> None:
    extras = ("optuna", "jsonargparse", "rich", "matplotlib", "hypothesis", "pytest")
    code = """
from lightning_gc import cli
assert cli.main(["list", "wire", "schemes", "controllers"]) == 0
assert not {"lightning", "pytorch_lightning"} & sys.modules.keys()
try:
    import lightning_gc.testing.contracts
except ImportError as error:
    print(error)
"""
    said = run(BLOCK.format(names=extras) + code)
    assert "TwoShot" in said
    assert "contracts needs pytest and hypothesis" in said
    assert "pip install 'lightning-gc[testing]'" in said


@pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="needs both flavours")
@pytest.mark.nightly
def test_names_are_registered_in_a_lightning_that_is_imported_later() -> None:
    code = """
import sys, lightning_gc
assert not {"torch", "lightning", "pytorch_lightning"} & sys.modules.keys()
import lightning.pytorch as pl
assert issubclass(lightning_gc.CompressedDDPStrategy, pl.strategies.DDPStrategy)
trainer = pl.Trainer(strategy="compressed_ddp_topk", accelerator="cpu", devices=2, logger=False)
print(type(trainer.strategy).__module__, trainer.strategy.compressor)
import pytorch_lightning
assert "compressed_ddp" in pytorch_lightning.strategies.StrategyRegistry
"""
    said = run(code)
    assert "strategies.for_lightning" in said
    assert "TopK(density=0.01" in said


def test_the_namespace_is_whole() -> None:
    names: dict[str, object] = {}
    exec("from lightning_gc import *", names)
    assert sorted(names.keys() - {"__builtins__"}) == lightning_gc.__all__
    assert set(lightning_gc.__all__) <= set(dir(lightning_gc))
    assert lightning_gc.compressors.TopK is lightning_gc.TopK
    assert not hasattr(lightning_gc, "TopKK")


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("CompressedGradients", "lightning_gc.huggingface"),
        ("CompressedRayStrategy", "lightning_gc.lightning.for_ray"),
    ],
)
def test_names_that_need_other_packages_are_found(name: str, home: str) -> None:
    with pytest.raises(ImportError, match=f"did you mean `from {home} import {name}`"):
        exec(f"from lightning_gc import {name}", {})


def test_names_for_authors_are_not_at_the_top_and_the_error_says_where() -> None:
    for room in (lightning_gc.compressors, lightning_gc.memories, lightning_gc.schemes):
        for name in set(room.__all__) - set(lightning_gc.__all__):
            said = re.escape(f"did you mean `from {room.__name__} import {name}`?")
            with pytest.raises(ImportError, match=said):
                exec(f"from lightning_gc import {name}", {})
