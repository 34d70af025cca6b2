"""Whatever happens to a journal, no finished trial that is whole in it is lost.

Each journal is that of a real study, damaged at random; then the study is resumed.
"""

import random
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial

from lightning_gc.tuning import StorageError
from lightning_gc.tuning.failure_detector import counts
from tests.support.processes import run_in_processes
from tests.support.tuning import compare, hasten

TRIALS = 3


def made(worker: int, path: Path) -> None:
    """In a process that is dead when the study is resumed."""
    compare(path, "topk", trials=TRIALS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("damaged") / "study.journal"
    run_in_processes(made, 1, path)
    return path.read_bytes()


def cut_anywhere(text: bytes, draw: random.Random) -> bytes:
    return text[: draw.randrange(1, len(text))]


def last_line(text: bytes) -> int:
    return text.rstrip(b"\n").rfind(b"\n") + 1


def cut_in_the_last_line(text: bytes, draw: random.Random) -> bytes:
    return text[: draw.randrange(last_line(text), len(text))]


def flip(text: bytes, place: int, draw: random.Random) -> bytes:
    return text[:place] + bytes([text[place] ^ 1 << draw.randrange(8)]) + text[place + 1 :]


def flip_in_the_last_line(text: bytes, draw: random.Random) -> bytes:
    return flip(text, draw.randrange(last_line(text), len(text)), draw)


def flip_anywhere(text: bytes, draw: random.Random) -> bytes:
    return flip(text, draw.randrange(len(text)), draw)


def garbage_after_the_end(text: bytes, draw: random.Random) -> bytes:
    garbage = draw.randbytes(draw.randrange(1, 2000)).replace(b"\n", b"")
    return text + draw.choice([garbage, garbage + b"\n", bytes(len(garbage)), b"\n"])


def zeros_anywhere(text: bytes, draw: random.Random) -> bytes:
    """As a page that was never written."""
    place = draw.randrange(len(text))
    return text[:place] + bytes(len(text[place : place + 500])) + text[place + 500 :]


KINDS = [
    *(cut_anywhere, cut_in_the_last_line, flip_in_the_last_line),
    *(flip_anywhere, garbage_after_the_end, zeros_anywhere),
]


def finished(storage: BaseStorage) -> dict[tuple[str, int], FrozenTrial]:
    return {
        (name, trial.number): trial
        for name in optuna.get_all_study_names(storage=storage)
        for trial in optuna.load_study(study_name=name, storage=storage).trials
        if trial.state.is_finished() and counts(trial)
    }


def lines_before(damaged: bytes, whole: bytes) -> list[bytes]:
    """Return the lines up to the first one that is not as it was."""
    kept = []
    for ours, line in zip(damaged.splitlines(True), whole.splitlines(True), strict=False):
        if ours != line:
            break
        kept.append(line)
    return kept


def check(
    whole: bytes, kind: Callable[[bytes, random.Random], bytes], seed: int, path: Path
) -> str:
    """Damage, resume, compare; return how it ended."""
    draw = random.Random(f"{kind.__name__} {seed}")
    if draw.random() < 0.5:  # the study was not complete
        lines = whole.splitlines(True)
        whole = b"".join(lines[: draw.randrange(20, len(lines))])
    damaged = kind(whole, draw)
    path.write_bytes(damaged)
    before = lines_before(damaged, whole)
    kept = path.with_name(f"{path.name} kept")
    kept.write_bytes(b"".join(before))
    # Read by Optuna alone, from the lines before the damage.
    known = finished(JournalStorage(JournalFileBackend(str(kept))))
    refusal = None
    try:
        studies = compare(path, "topk", trials=TRIALS)
    except StorageError as error:
        refusal = str(error)
    if refusal is not None:
        assert path.read_bytes() == damaged
        if before:
            assert refusal.startswith(f"{path}, line {len(before) + 1}, is damaged")
            assert f"keep only the {len(before)} undamaged lines before" in refusal
        path = kept
        studies = compare(path, "topk", trials=TRIALS)
    resumed = {(s.study_name, t.number): t for s in studies.values() for t in s.trials}
    assert {key: resumed[key] for key in known} == known
    assert [sum(map(counts, study.trials)) for study in studies.values()] == [TRIALS, TRIALS]
    # Optuna's own tools can read it as well.
    assert finished(JournalStorage(JournalFileBackend(str(path)))).keys() >= known.keys()
    return "resumed" if refusal is None else "refused"


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_journal_loses_no_trial_that_is_whole(
    whole: bytes,
    kind: Callable[[bytes, random.Random], bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hasten(monkeypatch)
    check(whole, kind, 0, tmp_path / "j")


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_many_damaged_journals_lose_no_trial_that_is_whole(
    whole: bytes,
    kind: Callable[[bytes, random.Random], bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hasten(monkeypatch)
    ended = [check(whole, kind, seed, tmp_path / f"j{seed}") for seed in range(1, 11)]
    if kind in (cut_anywhere, cut_in_the_last_line):
        assert ended == ["resumed"] * len(ended)
