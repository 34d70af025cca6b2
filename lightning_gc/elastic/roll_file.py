"""RollFile: the file of an elastic run's roll, with one writer and without a gap."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from lightning_gc.elastic.roll import Ended, Round, check_roll, judged, line_of

_log = logging.getLogger(__name__)


class BusyError(RuntimeError):
    """Another process uses a file or a port that only one process at a time can use."""


class RollFile:
    """Adds a line for every committed round to a file, for as long as it is open.

    Args:
        path: of the file. It is created if it is missing, with its folder.

    Attributes:
        found: the rounds, and the ends of runs, that the file had when it was opened.

    Raises:
        ValueError: the file is not a roll, or cannot be written or locked.
        BusyError: another process writes it.

    Laws, in ``tests/units/elastic/test_roll_file.py``:
        1. A file is read completely before its first change. A file that is not a roll is refused
           and stays as it is. Only half a line behind complete ones is cut.
        2. A file has one writer, by a lock that ends with its process.
        3. A line is written completely or not at all. Rounds that could not be written are written
           before the next one.
        4. A file has one training: a run, and runs that resume it. If another run begins, the
           former file gets a free name such as ``roll-1.jsonl``, and an empty file takes its place.
        5. Rounds of a run that another rendezvous has decided are written, if a member knows them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file, self.found = _opened(self.path)
        except OSError as error:
            raise ValueError(
                f"The roll {path} cannot be written: {error.strerror}. Give another file."
            ) from error
        self._size = os.fstat(self._file).st_size
        rounds = [each for each in self.found if isinstance(each, Round)]
        self._last = rounds[-1] if rounds else None  # in the file
        self._newest = self._last  # in the file, or to be written
        self._own: set[str] = set()  # runs of which this process has had a round
        self._unwritten: list[Round | Ended] = []
        self._failed = False  # at the last write

    @property
    def end(self) -> tuple[str, int]:
        """The run and the number of the last round in the file."""
        return ("", -1) if self._last is None else (self._last.run, self._last.round)

    def close(self) -> None:
        """Write what could not be written, if there is room now, and unlock the file."""
        self._write()
        os.close(self._file)

    def append(
        self, decided: Round | Ended, known: Callable[[], Iterable[Round]] = lambda: ()
    ) -> None:
        """Add a line. Members are told afterwards, so a restarted rendezvous knows what they do.

        The end of a run is added only behind a round of this process: another rendezvous may serve
        that run.

        Args:
            decided: the round, or the end of a run. A repeated last round is ignored.
            known: returns rounds that members know; called if some before ``decided`` are missing.
        """
        if isinstance(decided, Ended):
            if decided.run in self._own:
                self._unwritten.append(decided)
        elif decided != self._newest:
            self._unwritten += [*self._missing(decided, known), decided]
            self._newest = decided
            self._own.add(decided.run)
        self._write()

    def _missing(self, decided: Round, known: Callable[[], Iterable[Round]]) -> list[Round]:
        """Return the rounds just before ``decided`` that another rendezvous has decided."""
        newest = self._newest
        continued = newest is not None and newest.run == decided.run
        due = newest.round + 1 if newest is not None and continued else 0
        if decided.round <= due or _begins(decided):
            return []
        rounds = {each.round: each for each in known() if each.run == decided.run}
        first = decided.round
        while first > due and first - 1 in rounds:
            first -= 1
        if continued and first > due:
            _log.warning(
                "No member knows rounds %d to %d, so the roll in %s has a gap. It can be replayed "
                "up to round %d.",
                *(due, first - 1, self.path, due - 1),
            )
        return [rounds[number] for number in range(first, decided.round)]

    def _write(self) -> None:
        while self._unwritten:
            record = self._unwritten[0]
            try:
                if isinstance(record, Round) and self._has_another_training_than(record):
                    self._begin_file()
                self._add(line_of(record).encode())
            except OSError as error:
                _log.warning(
                    "The rendezvous cannot write to %s (%s), so %d rounds, to round %d, are not in "
                    "the roll yet. They are written as soon as there is room.",
                    *(self.path, error, len(self._unwritten), self._unwritten[-1].round),
                )
                self._failed = True
                return
            if isinstance(record, Round):
                self._last = record
            del self._unwritten[0]
        if self._failed:
            self._failed = False
            _log.warning("All missing rounds are in %s now.", self.path)

    def _has_another_training_than(self, record: Round) -> bool:
        last = self._last
        if last is None or last.run == record.run:
            return False
        return not (_begins(record) and 0 < record.round <= last.round + 1)  # resumed

    def _begin_file(self) -> None:
        """Give the file a free name; continue in an empty one."""
        stem, suffix, number = self.path.stem, self.path.suffix, 1
        while (former := self.path.with_name(f"{stem}-{number}{suffix}")).exists():
            number += 1
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        file, _ = _opened(fresh)
        try:
            self._check()
            self.path.rename(former)
            fresh.rename(self.path)
        except OSError:
            os.close(file)
            raise
        os.close(self._file)
        self._file, self._size, self._last = file, 0, None
        _log.warning(
            "Another run has begun. The rounds of the former run are in %s now, and %s has those "
            "of the new one.",
            *(former, self.path),
        )

    def _add(self, line: bytes) -> None:
        """Add a line at the end; OSError, and the file as before, if that fails."""
        self._check()
        try:
            done = 0
            while done < len(line):  # a write that fills the disk writes less
                done += os.pwrite(self._file, line[done:], self._size + done)
            os.fsync(self._file)
        except OSError:
            with contextlib.suppress(OSError):  # the next line is written over a half one
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)

    def _check(self) -> None:
        own, there = os.fstat(self._file), self.path.stat()
        if not os.path.samestat(own, there) or own.st_size < self._size:
            raise OSError(errno.ESTALE, "another program has changed it")


def _begins(record: Round) -> bool:
    """Return whether a round is the first one of its run: all its members have just come in."""
    return set(record.entered) == set(record.members)


def _opened(path: Path) -> tuple[int, list[Round | Ended]]:
    """Return a locked file and its records; half a last line is cut, or ended if it is complete."""
    try:
        import fcntl
    except ImportError:
        raise ValueError(
            f"The roll {path} cannot be kept on {sys.platform}, which has no fcntl to lock files. "
            f"Start the rendezvous on Linux, or leave the roll out."
        ) from None
    check_roll(path)  # before it is opened: a pipe would wait
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = os.path.samestat(os.fstat(file), path.stat())
        except BlockingIOError:
            alone = False
        if not alone:
            raise BusyError(
                f"The roll {path} is written by another rendezvous, or by a worker with "
                f"Elastic(roll=...). Give this one another file."
            )
        content = path.read_bytes()
        found, tail = judged(content, path)
        if isinstance(tail, Round | Ended):
            os.pwrite(file, b"\n", len(content))
            found.append(tail)
        elif tail:
            os.ftruncate(file, len(content) - len(tail))
    except BaseException:
        os.close(file)
        raise
    return file, found
