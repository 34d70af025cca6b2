"""A full disk ends tuning with a sentence, and costs nothing: the same command goes on."""

import contextlib
import io
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import FrozenTrial

from lightning_gc import cli
from lightning_gc.tuning import open_storage
from lightning_gc.tuning.failure_detector import counts
from tests.support.fitting import unwarned
from tests.support.processes import run_in_processes
from tests.support.tuning import hasten
from tests.tuning.test_command_line import CONFIG

WORDS = ["tune", "toy.yaml", "--compressor", "cast", "--storage"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "toy.yaml").write_text(CONFIG)
    return tmp_path


def tune(
    worker: int, folder: Path, journal: str, limits: list[int | None]
) -> list[tuple[int, str]]:
    """Tune once for each limit of a file's size; return exit codes and what was said."""
    import resource

    os.chdir(folder)
    most, ends = resource.getrlimit(resource.RLIMIT_FSIZE)[1], []
    with pytest.MonkeyPatch.context() as patch:
        hasten(patch)
        for limit in limits:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most if limit is None else limit, most))
            said = io.StringIO()
            quiet = contextlib.redirect_stdout(io.StringIO())
            with quiet, contextlib.redirect_stderr(said), unwarned():
                ends.append((cli.main([*WORDS, journal]), said.getvalue()))
    return ends


def finished(journal: Path) -> dict[tuple[str, int], FrozenTrial]:
    storage = open_storage(journal)
    return {
        (name, trial.number): trial
        for name in optuna.get_all_study_names(storage=storage)
        for trial in optuna.load_study(study_name=name, storage=storage).trials
        if trial.state.is_finished() and counts(trial)
    }


def check_sentence(end: tuple[int, str], journal: str) -> None:
    code, said = end
    assert code == cli.FAILED
    assert said.count("\n") == 1
    assert said.startswith(f"lightning-gc: {journal} cannot be written: ")
    assert said.endswith("then repeat the command.\n")


def check_complete(journal: Path, before: dict[tuple[str, int], FrozenTrial]) -> None:
    after = finished(journal)
    assert {key: after[key] for key in before} == before
    assert sorted(name for name, _ in after) == ["toy/cast"] * 2 + ["toy/dense"] * 2


def check_limits(folder: Path, limits: list[int], times: int) -> None:
    """Tune some times under each limit, and without one at last."""
    journal = folder / "j"
    known: dict[tuple[str, int], FrozenTrial] = {}
    for limit in limits:
        for end in run_in_processes(tune, 1, folder, "j", [limit] * times)[0]:
            check_sentence(end, "j")
        text = journal.read_bytes()
        assert limit - 2000 < len(text) <= limit
        assert text[-1:] in (b"", b"\n")
        before, known = known, finished(journal)
        assert before.items() <= known.items()
    assert run_in_processes(tune, 1, folder, "j", [None])[0][0][0] == cli.OK
    check_complete(journal, known)


@pytest.mark.processes
def test_a_limit_of_the_files_size_leaves_a_journal_that_goes_on(folder: Path) -> None:
    check_limits(folder, [5000, 11000], times=1)


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_limits_all_over_the_journal_leave_one_that_goes_on(folder: Path) -> None:
    check_limits(folder, list(range(100, 17000, 1111)), times=2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    try:
        subprocess.run(mount, check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs mount, and root")
    yield place
    subprocess.run(["umount", str(place)], check=True, timeout=10)


def fill(disk: Path, left: int) -> None:
    """Fill a file system but for some of its pages of 4 KiB."""
    with (disk / "filling").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(disk / "filling", (disk / "filling").stat().st_size - 4096 * left)


@pytest.mark.processes
def test_a_full_disk_leaves_a_journal_that_goes_on(folder: Path, small_disk: Path) -> None:
    journal = small_disk / "j"
    known: dict[tuple[str, int], FrozenTrial] = {}
    for left in (0, 1, 2):
        fill(small_disk, left)
        for end in run_in_processes(tune, 1, folder, str(journal), [None, None])[0]:
            check_sentence(end, str(journal))
        before, known = known, finished(journal)
        assert before.items() <= known.items()
    (small_disk / "filling").unlink()
    assert run_in_processes(tune, 1, folder, str(journal), [None])[0][0][0] == cli.OK
    check_complete(journal, known)
    assert known
