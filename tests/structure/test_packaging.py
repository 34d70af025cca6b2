"""Wheel and source distribution hold exactly the packages in the tree; tested versions install."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build sdist and wheel of a clean export of the tree, in that order, as an installer does."""
    out, source = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        origin, copy = ROOT / name, source / name
        if name and (origin.exists() or origin.is_symlink()):
            copy.parent.mkdir(parents=True, exist_ok=True)
            if origin.is_symlink():
                copy.symlink_to(origin.readlink())
            else:
                copy.write_bytes(origin.read_bytes())
    # No isolation: the build backend is one of the tools of this environment.
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def in_tree() -> set[str]:
    inside = {
        f"lightning_gc/{path.relative_to(ROOT / 'lightning_gc')}"
        for path in (ROOT / "lightning_gc").rglob("*.py")
    }
    return inside | {
        f"lightning_gc/controllers/{p.name}" for p in (ROOT / "controllers").glob("*.py")
    }


@pytest.mark.slow
def test_wheel_holds_the_tree_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if name.endswith(".py")} == in_tree()
    assert {"lightning_gc/py.typed", "lightning_gc/advice/shipped_costs.json"} <= set(names)


def test_sdist_holds_the_tree(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {str(p.relative_to(ROOT)) for p in (ROOT / "controllers").glob("*.py")} <= names
    assert {name for name in in_tree() if "/controllers/" not in name} <= names


@pytest.mark.nightly  # by day the wheel is compared with the tree, file by file
def test_wheel_imports_without_the_tree(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys, lightning_gc, lightning_gc.controllers as c; "
        "assert 'optuna' not in sys.modules, 'an extra'; "
        "print(lightning_gc.__file__, c.__file__, lightning_gc.CompressedDDPStrategy('topk'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(str(tmp_path)) == 2


def test_constraints_leave_to_torch_what_its_builds_pin() -> None:
    """Its CUDA builds want one exact version of these; another one pinned lets no install pass."""
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().split()}
    theirs = re.compile("triton|nvidia-.*|cuda-.*")
    assert "torch" in pinned
    assert not [name for name in pinned if theirs.fullmatch(name)]
