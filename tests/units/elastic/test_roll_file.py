"""The laws of a roll's file, with real files, locks and full disks."""

import errno
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_gc.elastic.rendezvous import Rendezvous, serve
from lightning_gc.elastic.roll import Ended, Entrance, Roll, Round, line_of
from lightning_gc.elastic.roll_file import BusyError, RollFile
from lightning_gc.elastic.sockets import Sockets
from lightning_gc.local_steps import Elastic
from tests.support.processes import preloaded


def round_of(run: str, number: int, begins: bool = False) -> Round:
    entered = {member: Entrance(number) for member in (0, 1)} if begins else {}
    return Round(number, (0, 1), entered=entered, digest=f"{run}{number}", run=run)


def run_of(name: str, first: int, end: int) -> list[Round]:
    return [round_of(name, number, number == first) for number in range(first, end)]


def lines(records: list[Round]) -> str:
    return "".join(map(line_of, records))


A, B = run_of("a", 0, 6), run_of("b", 0, 3)

NOT_ROLLS = {
    "a secret": b"one line, and no end",
    "notes": b"first line\nsecond line\nand a third",
    "half a round alone": b'{"round": 0, "mem',
    "bytes": bytes(range(256)) * 16,
    "bytes without a line": bytes([0x80, 0xFF]) * 50,
    "a form feed": b"a\x0cpage\n",
    "one carriage return": b"a\rb\n",
    "rounds and notes": lines(A).encode() + b"and a note",
    "rounds and zeros": lines(A).encode() + bytes(40),
    "an empty line": b"\n",
    "JSON": b'{"round": 3}\n',
}


@pytest.mark.parametrize("content", NOT_ROLLS.values(), ids=NOT_ROLLS)
@pytest.mark.parametrize(
    "use",
    [
        RollFile,
        lambda path: Rendezvous(0, roll=path),
        lambda path: Sockets(Elastic("127.0.0.1:1", roll=path)),
        lambda path: serve(0, None, path, until=lambda: True),
        lambda path: Roll(A).save(path),
    ],
    ids=["RollFile", "Rendezvous", "Sockets", "serve", "save"],
)
def test_a_file_that_is_not_a_roll_stays_as_it_is(
    tmp_path: Path, content: bytes, use: Callable[[Path], None]
) -> None:
    """Law 1."""
    path = tmp_path / "secret.txt"
    path.write_bytes(content)
    before = path.stat().st_mtime_ns
    with pytest.raises(ValueError, match=r"secret.txt.*The file was not changed"):
        use(path)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (content, before)
    assert os.listdir(tmp_path) == ["secret.txt"]


@pytest.mark.parametrize("end", range(1, len(line_of(A[5]))))
def test_half_a_line_behind_rounds_is_cut_and_a_complete_one_is_ended(
    tmp_path: Path, end: int
) -> None:
    """Law 1. A complete line has lost its newline only."""
    path = tmp_path / "roll"
    path.write_text(lines(A[:5]) + line_of(A[5])[:end])
    opened = RollFile(path)
    complete = end == len(line_of(A[5])) - 1
    assert opened.found == A[: 5 + complete]
    opened.append(A[5])
    opened.close()
    assert path.read_text() == lines(A)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    for name in ("pipe", ".", "file/roll"):
        with pytest.raises(ValueError, match=r"The roll .* (is not a file|cannot be written)"):
            RollFile(tmp_path / name)


def _hold(path: Path, pipe: Any) -> None:
    opened = RollFile(path)
    opened.append(A[0])
    pipe.send("written")
    threading.Event().wait()


def test_a_file_has_one_writer_until_its_process_ends(tmp_path: Path) -> None:
    """Law 2: SIGKILL unlocks it."""
    path, (here, there) = tmp_path / "roll", preloaded().Pipe()
    holder = preloaded().Process(target=_hold, args=(path, there))
    with here, there:
        holder.start()
        assert here.recv() == "written"
    before = path.read_bytes()
    served = partial(serve, 0, None, until=lambda: True)
    for use in (RollFile, partial(Rendezvous, 0, None), served):
        with pytest.raises(BusyError, match=r"is written by another rendezvous.*another file"):
            use(path)
    assert path.read_bytes() == before
    holder.kill()
    holder.join()
    opened = RollFile(path)
    opened.append(A[1])
    opened.close()
    assert list(Roll.read(path)) == A[:2]


def test_a_reader_does_not_unlock_the_file(tmp_path: Path) -> None:
    """Law 2: a POSIX lock would be lost here."""
    opened = RollFile(tmp_path / "roll")
    Roll.read(tmp_path / "roll")
    with pytest.raises(BusyError):
        RollFile(tmp_path / "roll")
    opened.close()


def test_rounds_that_a_full_disk_refused_are_written_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Law 3, with writes that end in the middle of a line."""
    path, write, room = tmp_path / "roll", os.pwrite, [10**6]

    def limited(file: int, data: bytes, offset: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(file, data[: room[0]], offset)
        room[0] -= done
        return done

    monkeypatch.setattr("os.pwrite", limited)
    opened = RollFile(path)
    opened.append(A[0])
    room[0] = 20
    for record in A[1:4]:
        opened.append(record)
        assert path.read_text() == line_of(A[0])
    assert "so 3 rounds, to round 3, are not in the roll yet" in caplog.text
    room[0] = 10**6
    opened.append(A[4])
    assert list(Roll.read(path)) == A[:5]
    assert "All missing rounds are in" in caplog.text
    room[0] = 0
    opened.append(A[5])
    room[0] = 10**6
    opened.close()
    assert list(Roll.read(path)) == A


@pytest.mark.parametrize("how", ["removed", "replaced", "emptied"])
def test_a_file_that_another_program_changes_gets_no_line(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Law 3: nothing is written into a file that was not judged."""
    path, opened = tmp_path / "roll", RollFile(tmp_path / "roll")
    opened.append(A[0])
    if how == "emptied":
        path.write_text("")
    else:
        path.unlink()
    if how == "replaced":
        path.write_text("mine")
    opened.append(A[1])
    opened.close()
    assert not path.exists() if how == "removed" else path.read_text() in ("", "mine")
    assert "cannot write" in caplog.text


def test_another_run_gets_a_file_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Law 4. The former rounds keep their bytes; a restart continues the new ones."""
    path = tmp_path / "roll.jsonl"
    path.write_text(lines(A))
    (tmp_path / "roll-1.jsonl").write_text("of the user")
    opened = RollFile(path)
    opened.append(Ended("a", 6))  # run a may be served elsewhere
    assert path.read_text() == lines(A)
    for record in B[:2]:
        opened.append(record)
    with pytest.raises(BusyError):
        RollFile(path)
    opened.close()
    assert "Another run has begun" in caplog.text
    again = RollFile(path)
    again.append(B[2])
    again.append(Ended("b", 3))
    again.close()
    assert path.read_text() == lines(B) + line_of(Ended("b", 3))
    texts = {each.name: each.read_text() for each in tmp_path.iterdir()}
    assert texts.pop("roll.jsonl") == lines(B) + line_of(Ended("b", 3))
    assert texts == {"roll-1.jsonl": "of the user", "roll-2.jsonl": lines(A)}


@pytest.mark.parametrize(
    ("run", "own"),
    [
        (run_of("b", 4, 6), False),  # resumed from a checkpoint of a
        (run_of("b", 6, 8), False),  # from its last one
        (run_of("b", 7, 8), True),  # after a gap
        (run_of("b", 0, 2), True),  # from the beginning
        ([round_of("b", 3)], True),  # a run that began elsewhere
    ],
)
def test_a_run_that_resumes_the_last_one_continues_its_file(
    tmp_path: Path, run: list[Round], own: bool
) -> None:
    """Law 4."""
    path = tmp_path / "roll"
    path.write_text(lines(A))
    opened = RollFile(path)
    for record in run:
        opened.append(record)
    opened.close()
    assert path.read_text() == lines(run) if own else lines(A) + lines(run)
    assert list(Roll.read(path))[-1] == run[-1]
    assert (tmp_path / "roll-1").exists() == own


def test_rounds_of_another_rendezvous_are_written_if_a_member_knows_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Law 5."""
    path, asked = tmp_path / "roll", []

    def known() -> list[Round]:
        asked.append(1)
        return [*B, *A[1:4]]

    opened = RollFile(path)
    opened.append(A[0], known)
    assert not asked
    opened.append(A[4], known)
    opened.append(A[5], known)
    opened.close()
    assert (list(Roll.read(path)), len(asked), caplog.text) == (A, 1, "")


def test_a_gap_that_no_member_can_fill_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Law 5."""
    opened = RollFile(tmp_path / "roll")
    opened.append(A[0])
    opened.append(A[5], lambda: A[3:5])
    opened.close()
    assert "No member knows rounds 1 to 2" in caplog.text
    assert (tmp_path / "roll").read_text() == lines([A[0], *A[3:]])


def test_a_last_round_that_is_said_again_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "roll"
    path.write_text(lines(A))
    opened = RollFile(path)
    opened.append(A[5])
    opened.close()
    assert path.read_text() == lines(A)
