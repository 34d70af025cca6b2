"""Training does not wait for numba's compiler, and its bits do not depend on what is compiled."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lightning_gc import QSGD, Cast, EFSignSGD, PowerSGD, Quantised, TopK
from lightning_gc.compressors import BinMeans, ChunkedTopK, Compressor
from lightning_gc.kernels import dispatch
from lightning_gc.testing import Lockstep
from tests.support.kernel_device import INTERPRETED

pytestmark = [
    pytest.mark.skipif(find_spec("numba") is None, reason="needs the extra fast: numba"),
    pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter comes first"),
]
METHODS: list[Compressor] = [
    *(QSGD(4), TopK(0.01), Cast(), EFSignSGD(), PowerSGD(2)),
    Quantised(ChunkedTopK(0.05), BinMeans(2)),
]
SHAPES = {"weight": (64, 70), "bias": (70,), "idle": (40, 50)}


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> Iterator[dispatch.HostFamilies]:
    """A process in which nothing is compiled, and whose other process never ends."""
    families = dispatch.HostFamilies()
    monkeypatch.setattr(dispatch, "host", families)
    made, make = set[str](), dispatch._make
    monkeypatch.setattr(dispatch, "_is_compiled", made.__contains__)

    def noted(family: str) -> None:
        make(family)
        made.add(family)

    monkeypatch.setattr(dispatch, "_make", noted)
    monkeypatch.setattr(families, "_make", lambda: None)
    yield families
    families.close()


def train(
    compressor: Compressor, families: dispatch.HostFamilies, ready: int
) -> list[torch.Tensor]:
    """Return means and errors of six steps; kernels are ready before step ``ready``."""
    lockstep, draw, found = Lockstep(2, compressor), torch.Generator().manual_seed(0), []
    for step in range(6):
        named = [{n: torch.randn(s, generator=draw) for n, s in SHAPES.items()} for _ in range(2)]
        for each in named:
            each["idle"].zero_()
        if step == ready:
            families._made = {family: dispatch._compile(family) for family in families._left}
        done = lockstep.step(named)
        found += [each.clone() for part in (done.mean, *done.errors) for each in part.values()]
    return found


@pytest.mark.parametrize("compressor", METHODS, ids=lambda each: type(each).__name__)
def test_bits_do_not_depend_on_the_cache(
    compressor: Compressor, cold: dispatch.HostFamilies, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = train(compressor, cold, 3)
    assert all(cold._works.values())  # they are used in the end
    assert cold._left
    with monkeypatch.context() as patched:
        patched.setattr(dispatch, "host", dispatch.HostFamilies())
        patched.setattr(dispatch, "_is_compiled", lambda family: True)
        warm = train(compressor, dispatch.host, -1)
    assert len(changing) == len(warm)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(changing, warm, strict=True))


def test_answers_change_between_exchanges_only(cold: dispatch.HostFamilies) -> None:
    with cold.steady():
        assert not cold.works("segments")
        with cold.steady():  # another bucket
            cold._made = {"segments": True}
            assert not cold.works("segments")
        with cold.steady():
            assert not cold.works("segments")
    with cold.steady():
        assert cold.works("segments")


class Owner:
    """Takes kernels over in counted rounds only."""


def test_an_owner_that_is_never_closed_keeps_kernels_from_nobody(
    cold: dispatch.HostFamilies,
) -> None:
    owner, closed = Owner(), Owner()
    for each in (owner, closed):
        cold.rest(each)
    with cold.steady():
        assert not cold.works("segments")
        cold._made = {"segments": True}
    cold.rest(closed, ends=True)
    with cold.steady():
        assert not cold.works("segments")
    del each, owner
    with cold.steady():
        assert cold.works("segments")


def test_what_rounds_otherwise_is_compiled_before_it_is_used(cold: dispatch.HostFamilies) -> None:
    """Else the bits of a run would depend on its machine."""
    with cold.steady():
        assert cold.works("low_rank")


@pytest.mark.nightly
def test_another_process_compiles_and_says_so(tmp_path: Path) -> None:
    """In an empty folder: a line when it begins and one when it is ready; the next run has none."""
    script = (
        "import torch\n"
        "from lightning_gc import Cast\n"
        "from lightning_gc.kernels import dispatch\n"
        "from lightning_gc.testing import Lockstep\n"
        "lockstep = Lockstep(1, Cast())\n"
        "def step():\n"
        "    lockstep.step([{'weight': torch.ones(40, 40)}])\n"
        "step()\n"
        "print(dispatch.host.works('segments'))\n"
        "dispatch.host.wait()\n"
        "step()\n"
        "made = dispatch.on_disk()\n"
        "print(dispatch.host.works('segments'), *sorted(n for n in made if not made[n]))\n"
    )
    settings = {"NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            check=True,
            timeout=200,
        )
        for _ in range(2)
    ]
    first, second = runs
    assert "Compiling numba's kernels of " in first.stderr
    assert "once per machine. Training begins with torch's operations" in first.stderr
    assert " are ready, after " in first.stderr
    assert first.stdout.split("\n")[0] == "False"
    assert first.stdout.split("\n")[1].startswith("True")
    assert "segments" not in first.stdout.split("\n")[1]
    assert "Compiling" not in second.stderr
    assert second.stdout.split("\n")[0] == "True"


def test_the_page_says_what_happens() -> None:
    """With ``test_another_process_compiles_and_says_so`` and the laws above."""
    page = (Path(__file__).parents[3] / "docs" / "troubleshooting.md").read_text()
    (said,) = (line for line in page.split("\n- ") if line.startswith("**Kernels are compiled"))
    words = " ".join(said.split())
    assert "Training begins at once, with torch's operations and the same bits." in words
    rounded = [type(each).__name__ for each in METHODS if asks(each) & dispatch.ROUNDED]
    assert f"With {', '.join(f'`{name}`' for name in rounded)} workers wait" in words


def asks(compressor: Compressor) -> set[str]:
    """Return the families of kernels that a step asks for."""
    with dispatch.watched() as asked:
        Lockstep(1, compressor).step([{n: torch.ones(s) for n, s in SHAPES.items()}])
    return asked


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
    "empty": lambda data: b"",
}


@pytest.mark.parametrize(
    "damage", ["lost", *(pytest.param(each, marks=pytest.mark.nightly) for each in DAMAGES)]
)
def test_damaged_files_are_compiled_again_beside_training(damage: str, tmp_path: Path) -> None:
    """The exchange compiles nothing, one line says why, and the next process finds all in order."""
    script = (
        "from lightning_gc.kernels import dispatch\n"
        "made = []\n"
        "dispatch._make = lambda family, make=dispatch._make: made.append(family) or make(family)\n"
        "with dispatch.host.steady():\n"
        "    print(dispatch.host.works('segments'), made)\n"
        "dispatch.host.wait()\n"
        "with dispatch.host.steady():\n"
        "    print(dispatch.host.works('segments'))\n"
    )

    def run(code: str) -> subprocess.CompletedProcess[str]:
        settings = {"NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            check=True,
            timeout=200,
        )

    run("from lightning_gc.kernels import dispatch; dispatch.compile_families(['segments'])")
    for file in [*tmp_path.rglob("*.nb?")]:
        if damage == "lost":
            file.unlink()
        else:
            file.write_bytes(DAMAGES[damage](file.read_bytes()))
    healed, after = run(script), run(script)
    assert healed.stdout.split("\n")[:2] == ["False []", "True"]
    assert healed.stderr.count("are damaged") == 1
    assert healed.stderr.count(dispatch.WITHOUT) == 1
    assert str(tmp_path) in healed.stderr
    assert after.stdout.split("\n")[:2] == ["True []", "True"]
    assert not after.stderr


def test_a_full_disk_costs_one_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Without room nothing is compiled, in the background or at the end of the run."""

    def full(*args: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dispatch, "_folder", lambda: tmp_path)
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    monkeypatch.setattr(dispatch, "_child", lambda families: pytest.fail("compiles"))
    monkeypatch.setattr(dispatch, "_test", lambda family: pytest.fail("compiles"))
    monkeypatch.setattr(dispatch, "_told", set())
    families = dispatch.HostFamilies()
    with families.steady():
        assert not families.works("segments")
        assert not families.works("signs")
    families.wait()
    with families.steady():
        assert not families.works("segments")
    families.close()
    (record,) = caplog.records
    said = record.getMessage()
    assert f"No space left on device in {tmp_path}" in said
    assert "set NUMBA_CACHE_DIR" in said
    assert said.endswith(dispatch.WITHOUT)
    dispatch._mark("blocks").write_text("ArithmeticError: other bits")
    trouble = dispatch.trouble()
    assert trouble.pop("ArithmeticError: other bits") == ["blocks"]
    ((cause, unkept),) = trouble.items()
    assert cause in said
    assert {"blocks", *unkept} == set(dispatch.on_disk())
