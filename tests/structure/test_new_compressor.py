"""A new compressor needs one file and one import line; registries, tests and docs find it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PLUGIN = '''
"""Send the sign of each element and one scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import Codec, Contraction, Traits
from lightning_gc.core import Bucket, Field, Payload, Wire
from lightning_gc.core.bit_packing import pack, packed_bytes, unpack


@dataclass(frozen=True)
class ScaledSign(Codec):
    """Send ``mean|x| * sign(x)``: a plug-in made by a test.

    Example:
        >>> from lightning_gc import ScaledSign
        >>> ScaledSign()
        ScaledSign()
    """

    traits = Traits("quantiser")

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take the scaled signs."""
        scale = buffer.abs().mean().reshape(1)
        negative = buffer < 0
        buffer.sub_(scale.where(~negative, -scale))
        return pack(negative.int(), 1), scale

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        """Add the scaled signs."""
        packed, size = payload
        out.add_((1 - 2 * unpack(packed, 1, out.numel())) * size, alpha=scale)

    def bound(self, numel: int) -> Contraction:
        """Return 1 / numel, reached by one large element."""
        return Contraction(1 / max(numel, 1))

    def wire(self, numel: int) -> Wire:
        """Return a bit an element, and the scale."""
        bits = Field("signs", torch.uint8, packed_bytes(numel, 1), note="a bit each")
        return bits, Field("scale", torch.float32, 1)
'''

NAMES = """
import lightning_gc
from pytorch_lightning.strategies import StrategyRegistry


def test_names_of_ScaledSign() -> None:
    assert lightning_gc.__file__.startswith({root!r})
    assert "ScaledSign" in lightning_gc.__all__
    assert lightning_gc.COMPRESSORS["scaled_sign"] is lightning_gc.ScaledSign
    strategy = StrategyRegistry.get("compressed_ddp_scaled_sign")
    assert repr(strategy.compressor).startswith("PerParameter(inner=SizeSwitch(inner=ScaledSign()")
    assert repr(strategy.memory) == "ErrorFeedback(decay=1.0, lr_aware=False, gain=1.0)"
    assert repr(strategy.scheme) == "AllGatherOrTwoShot()"
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the plug-in: one file, one line."""
    root = tmp_path_factory.mktemp("project")
    results = "benchmarks/results/papers"  # the site has a page of them
    for folder in ("lightning_gc", "controllers", "tests", "docs", "configs", "examples", results):
        shutil.copytree(ROOT / folder, root / folder, symlinks=True)
    for file in ("pyproject.toml", "mkdocs.yml", "CHANGELOG.md", "README.md", "SECURITY.md"):
        shutil.copy(ROOT / file, root / file)
    package = root / "lightning_gc" / "compressors"
    (package / "scaled_sign.py").write_text(PLUGIN.lstrip())
    init = package / "__init__.py"
    line = "from lightning_gc.compressors.scaled_sign import ScaledSign as ScaledSign\n"
    before, after = init.read_text().split("from lightning_gc.compressors.wrappers.size_switch")
    init.write_text(before + line + "from lightning_gc.compressors.wrappers.size_switch" + after)
    return root


def run(tree: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_names_and_contracts_cover_it(tree: Path) -> None:
    (tree / "tests" / "contracts" / "test_names.py").write_text(NAMES.format(root=str(tree)))
    printed = run(
        tree, "-m", "pytest", "-v", "tests/contracts", "-k", "ScaledSign", "-p", "no:cacheprovider"
    )
    passed = [line for line in printed.splitlines() if " PASSED" in line]
    for file in ("test_names", "test_laws", "test_error_bounds", "test_combinations", "test_state"):
        assert any(f"{file}.py" in line for line in passed), file
    assert len(passed) > 30


@pytest.mark.nightly
def test_docs_show_it(tree: Path) -> None:
    run(tree, "-m", "mkdocs", "build", "--strict", "--quiet")
    pages = [p for p in (tree / "site").rglob("*.html") if "ScaledSign" in p.read_text()]
    assert any("compressors" in str(page) for page in pages)
