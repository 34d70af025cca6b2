"""A journal loses no whole line to a cut, a flipped bit or another process."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, TrialState

from lightning_gc.tuning import StorageError, open_storage
from lightning_gc.tuning.journal import BEGINNING, Journal, _decode, _encode


def opened_by_optuna(path: Path) -> BaseStorage:
    return JournalStorage(JournalFileBackend(str(path)))


def add_trial(storage: BaseStorage, x: float = 0.5) -> None:
    study = optuna.create_study(study_name="s", storage=storage, load_if_exists=True)
    trial = study.ask()
    trial.suggest_float("x", x, x)
    study.tell(trial, x)


def trials(storage: BaseStorage) -> list[FrozenTrial]:
    return optuna.load_study(study_name="s", storage=storage).trials


def values(storage: BaseStorage) -> list[Any]:
    return [trial.value for trial in trials(storage)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal with two finished trials."""
    path = tmp_path / "study.journal"
    storage = open_storage(path)
    add_trial(storage, 0.25)
    add_trial(storage, 0.75)
    return path


@pytest.mark.parametrize("kept", [1, 9, 10, 11, 40, -1])
def test_a_last_line_that_was_cut_short_is_cut_off_before_the_next(path: Path, kept: int) -> None:
    *whole, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole) + last[: kept - 1])
    before = open_storage(path)
    assert [trial.state for trial in trials(before)] == [TrialState.COMPLETE, TrialState.RUNNING]
    add_trial(before, 0.5)
    for storage in (before, open_storage(path), opened_by_optuna(path)):
        assert values(storage) == [0.25, None, 0.5]
    assert path.read_bytes().startswith(b"".join(whole) + BEGINNING)


def test_a_last_line_that_lacks_nothing_but_its_end_is_kept(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    add_trial(open_storage(path), 0.5)
    assert values(open_storage(path)) == [0.25, 0.75, 0.5]


def test_the_first_line_of_all_may_be_cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:30])
    add_trial(open_storage(path))
    assert values(open_storage(path)) == [0.5]


@pytest.mark.skipif(os.name == "nt", reason="Windows limits no sizes of files")
def test_operations_that_do_not_fit_leave_no_byte(path: Path) -> None:
    """Wherever the disk ends: within a line, before its end, or between two lines."""
    import resource

    before = path.read_bytes()
    logs = [{"op_code": 0, "worker_id": name, "study_name": name} for name in "ab"]
    first, size = len(_encode(logs[0])), sum(len(_encode(log)) for log in logs)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (0, 1, first - 1, first, first + 1, size - 2, size - 1):
        journal = Journal(path)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, hard))
            with pytest.raises(StorageError, match="cannot be written: File too large"):
                journal.append_logs(logs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes() == before
    journal.append_logs(logs)
    assert len(path.read_bytes()) == len(before) + size


def test_reading_cuts_nothing_off(path: Path) -> None:
    """As another process may be in the middle of writing it."""
    cut = path.read_bytes()[:-5]
    path.write_bytes(cut)
    trials(open_storage(path))
    assert path.read_bytes() == cut


def test_a_line_that_a_living_process_is_writing_is_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = path.read_bytes()
    storage = open_storage(path)
    lock = JournalFileSymlinkLock(str(path))
    lock.acquire()
    path.write_bytes(text[:-20])  # the other one has written as much by now
    waiting, acquire = threading.Event(), JournalFileSymlinkLock.acquire

    def told(self: JournalFileSymlinkLock) -> bool:
        waiting.set()
        return acquire(self)

    monkeypatch.setattr(JournalFileSymlinkLock, "acquire", told)
    thread = threading.Thread(target=add_trial, args=(storage,))
    thread.start()
    waiting.wait()
    assert path.read_bytes() == text[:-20]
    path.write_bytes(text)
    lock.release()
    thread.join()
    assert values(open_storage(path)) == [0.25, 0.75, 0.5]


def test_optuna_reads_our_journals_and_we_read_its(path: Path, tmp_path: Path) -> None:
    add_trial(opened_by_optuna(path), 0.5)
    assert values(open_storage(path)) == values(opened_by_optuna(path)) == [0.25, 0.75, 0.5]
    add_trial(opened_by_optuna(tmp_path / "theirs"), 0.5)
    add_trial(open_storage(tmp_path / "theirs"), 0.25)
    assert values(opened_by_optuna(tmp_path / "theirs")) == [0.5, 0.25]


def first_digit(line: bytes) -> bytes:
    """As if the value of a result were another one: JSON all the same."""
    at = line.index(b"0.25")
    return line[: at + 2] + b"9" + line[at + 3 :]


DAMAGE = [
    lambda line: line[:20] + b"\x00" + line[21:],
    lambda line: line[:20] + b"\n" + line[20:],
    lambda line: line[:-2] + b"\n",
    lambda line: b"[" * 100_000 + b"\n",
    lambda line: b"17\n",
    lambda line: b"\n",
    first_digit,
]


@pytest.mark.parametrize(
    ("damage", "last"),
    [
        *((damage, last) for damage in DAMAGE for last in (False, True)),
        (lambda line: line[:-1] + b"\xff", False),  # two lines become one
    ],
)
def test_damage_is_named_by_file_and_line_and_nothing_is_changed(
    path: Path, damage: Callable[[bytes], bytes], last: bool
) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if b'"values":[0.25]' in line)
    before, after = b"".join(lines[:number]), b"" if last else b"".join(lines[number + 1 :])
    damaged = before + damage(lines[number]) + after
    path.write_bytes(damaged)
    with pytest.raises(StorageError, match=rf"study\.journal, line {number + 1}, is damaged"):
        open_storage(path)
    assert path.read_bytes() == damaged
    path.write_bytes(before)  # as the message says
    add_trial(open_storage(path), 0.5)
    assert values(open_storage(path)) == [None, 0.5]


def test_no_flipped_bit_changes_an_operation(path: Path) -> None:
    for line in path.read_bytes().splitlines(keepends=True)[-2:]:
        known = _decode(line)
        assert known
        del known["crc32"]
        for bit in range(8 * (len(line) - 1)):
            flipped = bytearray(line)
            flipped[bit // 8] ^= 1 << bit % 8
            found = _decode(bytes(flipped))
            assert found is None or found.items() >= known.items()


def test_damage_is_found_while_the_journal_is_in_use(path: Path) -> None:
    storage = open_storage(path)
    with path.open("ab") as file:
        file.write(b"garbage\n")
    with pytest.raises(StorageError, match=r"line \d+, is damaged"):
        trials(storage)


@pytest.mark.parametrize(
    "operation",
    [
        {"op_code": 77, "worker_id": "w"},
        {"op_code": 4, "worker_id": "w"},
        {"op_code": "4", "worker_id": "w"},
    ],
)
def test_an_operation_that_cannot_be_is_named_too(path: Path, operation: dict[str, Any]) -> None:
    number = len(path.read_bytes().splitlines()) + 1
    with path.open("a") as file:
        file.write(json.dumps(operation) + "\n")
    with pytest.raises(StorageError, match=rf"study\.journal, line {number}, is damaged \(\w+"):
        open_storage(path)


@pytest.mark.parametrize(
    "text", ["Dear all,\nno journal\n", "one line", '{"name": "other"}\n', "\n"]
)
def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "letter.txt").write_text(text)
    with pytest.raises(StorageError, match=r"letter\.txt cannot be used: its first line is not"):
        open_storage(tmp_path / "letter.txt")
    assert (tmp_path / "letter.txt").read_text() == text


def test_a_journal_that_is_taken_away_is_not_begun_anew(path: Path) -> None:
    storage = open_storage(path)
    path.unlink()
    path.touch()
    with pytest.raises(StorageError, match="has become shorter"):
        add_trial(storage)


def test_a_journal_that_may_not_be_written_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(path)

    def refused(self: JournalFileSymlinkLock) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(JournalFileSymlinkLock, "acquire", refused)
    with pytest.raises(StorageError, match=r"study\.journal cannot be written: Permission denied"):
        add_trial(storage)


def test_a_writer_whose_lock_was_taken_away_goes_on(path: Path) -> None:
    """Optuna does so after 30 s, in which a process may have been stopped."""
    journal = Journal(path)
    lock = Path(f"{path}.lock")
    write = type(journal)._end_last_line

    def slowly(self: Journal, file: Any) -> None:
        lock.unlink()
        write(self, file)

    known = len(list(journal.read_logs(0)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "_end_last_line", slowly)
        journal.append_logs([{"op_code": 10}])
    assert len(list(journal.read_logs(known))) == 1
