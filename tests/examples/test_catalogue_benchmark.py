"""Every compressor trains the demo's model, and the catalogue benchmark reports divergence."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_gc import COMPRESSORS

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "catalogue.py"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_no_compressor_diverges_at_both_rates(tmp_path: Path) -> None:
    small = ("--epochs", "1", "--steps", "40", "--hidden", "64")
    done = subprocess.run(
        [sys.executable, BENCHMARK, *small, "--runs", tmp_path / "runs", "--out", tmp_path],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    (found,) = tmp_path.glob("catalogue_*.json")
    rows = json.loads(found.read_text())["rows"]
    assert rows[0]["name"] == "identity"
    assert {row["name"] for row in rows} == set(COMPRESSORS)
    assert len(rows) == 2 * len(COMPRESSORS)
    assert not [row["failed"] for row in rows if "failed" in row]
    lost = {row["name"] for row in rows if row["diverged"]}
    both = {name for name in lost if all(r["diverged"] for r in rows if r["name"] == name)}
    assert not both
    assert done.returncode == 0, done.stderr
    assert len(found.with_suffix(".md").read_text().split("\n| `")) == 1 + len(COMPRESSORS)
    assert found.with_suffix(".svg").is_file()
