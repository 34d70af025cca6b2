"""Store Optuna's journal so that a kill, a full disk or a flipped bit damages one line only.

One operation is one line of JSON, as Optuna writes it, so that its own tools read the file too.
"""

import contextlib
import json
import os
import re
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy
import sqlalchemy.exc
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import (
    BaseJournalBackend,
    JournalFileOpenLock,
    JournalFileSymlinkLock,
)

from lightning_gc.core.notices import waiting

BEGINNING = b'{"op_code":'
"""The beginning of every line, by Optuna or by us."""

_SUMMED = re.compile(rb'(.*),"crc32":"([0-9a-f]{8})"}\n', re.DOTALL)


class StorageError(RuntimeError):
    """The storage cannot be used."""


class NoJournalError(StorageError, ValueError):
    """The file that is named is not a journal."""


class Journal(BaseJournalBackend):
    """A journal in one file, to which processes append complete lines in turn.

    A killed process or a full disk leaves a last line without its end. Readers skip it, because
    another process may still be writing it. The next writer cuts it off, under the writers' lock.
    Any other damage is refused, and the file is not changed.

    Args:
        path: the file; created if missing.

    Attributes:
        line: number of the last line that was read, from 1.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.line = path, 0
        self._starts = [0]  # of every line that has been read, and of the one after
        lock = JournalFileOpenLock if os.name == "nt" else JournalFileSymlinkLock
        self._lock = lock(str(path))  # Windows has no symlinks
        if not path.exists():
            path.touch()

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Yield the operations from this number on.

        Raises:
            StorageError: a line is damaged.
        """
        logs, damaged = self._read(log_number_from)
        if damaged:
            # Perhaps another process was just writing it: look again under the lock. A folder that
            # cannot hold a lock has no writers.
            with contextlib.suppress(OSError), self._locked():
                logs, damaged = self._read(log_number_from)
        if damaged:
            raise self.damaged(log_number_from + len(logs) + 1)
        for number, log in enumerate(logs, start=log_number_from + 1):
            self.line = number
            yield log

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append operations: all lines completely, or none.

        Raises:
            StorageError: the disk is full, or the file cannot be written for another reason.
        """
        lines = b"".join(_encode(log) for log in logs)
        try:
            with self._locked(), self.path.open("a+b", buffering=0) as file:
                self._end_last_line(file)
                end = file.seek(0, os.SEEK_END)
                try:
                    _write_all(file, lines)
                except OSError:
                    file.truncate(end)
                    raise
        except OSError as error:
            raise StorageError(
                f"{self.path} cannot be written: {error.strerror}. Finished trials are kept. "
                f"Make the file writable, then repeat the command."
            ) from error

    def damaged(self, line: int, why: str = "") -> StorageError:
        """Return the error for a line that is not an operation; it says what to do."""
        if line == 1:
            return NoJournalError(
                f"{self.path} cannot be used: its first line is not of an Optuna journal{why}. "
                f"Name a journal that lightning-gc tune has made. It makes one if the file is new."
            )
        return StorageError(
            f"{self.path}, line {line}, is damaged{why}. The file was not changed. Restore a "
            f"copy, or keep only the {line - 1} undamaged lines before it. Later work is then "
            f"repeated."
        )

    def _read(self, start: int) -> tuple[list[dict[str, Any]], bool]:
        """Return the operations from a number on, and whether the line after them is damaged."""
        found: list[dict[str, Any]] = []
        with self.path.open("rb") as file:
            file.seek(self._starts[start])
            for line in file:
                number = start + len(found)
                if not line.endswith(b"\n"):
                    # A file without a single line is a journal only if it begins like one.
                    return found, not number and BEGINNING[: len(line)] != line[: len(BEGINNING)]
                log = _decode(line)
                if log is None:
                    return found, True
                found.append(log)
                if number + 1 == len(self._starts):
                    self._starts.append(self._starts[number] + len(line))
        return found, False

    def _end_last_line(self, file: Any) -> None:
        """Cut off a last line without its end, or end it if nothing else is missing."""
        known = self._starts[-1]
        if file.seek(0, os.SEEK_END) < known:
            raise StorageError(
                f"{self.path} has become shorter: another program has changed it, or removed it. "
                f"Restore it, and repeat the command."
            )
        file.seek(known)
        read = file.read()
        unfinished = read[read.rfind(b"\n") + 1 :]
        if unfinished and _decode(unfinished + b"\n"):
            _write_all(file, b"\n")
        elif unfinished:
            file.truncate(known + len(read) - len(unfinished))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with waiting(f"Waiting for {self.path}, which another process has locked"):
            self._lock.acquire()
        try:
            yield
        finally:
            # Optuna takes a lock away after 30 s. What was written meanwhile are whole lines.
            with contextlib.suppress(RuntimeError):
                self._lock.release()


def _encode(log: dict[str, Any]) -> bytes:
    """Return a line with a checksum as its last field, which Optuna does not look at."""
    text = json.dumps(log, separators=(",", ":")).encode()[:-1]
    return b'%b,"crc32":"%08x"}\n' % (text, zlib.crc32(text))


def _decode(line: bytes) -> dict[str, Any] | None:
    """Return the operation, or None if the line is damaged. Optuna writes no checksums."""
    summed = _SUMMED.fullmatch(line)
    if summed and zlib.crc32(summed[1]) != int(summed[2], 16):
        return None
    try:
        log = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return log if isinstance(log, dict) and "op_code" in log else None


def _write_all(file: Any, data: bytes) -> None:
    while data:  # a write that fills the disk writes less than it is given
        data = data[file.write(data) :]
    os.fsync(file.fileno())


_TRIES = 10


def open_storage(where: str | Path | BaseStorage) -> BaseStorage:
    """Return the storage at a URL (``postgresql://...``, ``sqlite:///...``) or in a journal file.

    A journal is one file that several processes may share, over NFS too; a missing one is created.

    Raises:
        StorageError: it is down, not a storage, or of another version of Optuna.
        ValueError: not a database URL.
    """
    if isinstance(where, BaseStorage):
        return where
    url, address = "://" in str(where), without_password(where)
    try:
        if not url:
            return _journal(Path(where))
        line = f"Waiting for the database {address}"
        with waiting(line):
            database = _database(str(where))
        _announce(database.engine, line)
        return database
    except StorageError:
        raise
    except ModuleNotFoundError as error:
        raise StorageError(f"{address} needs a driver: {error}. Install it.") from error
    except Exception as error:  # each driver has its own errors
        kind = type(error).__name__
        if url and kind in ("ArgumentError", "NoSuchModuleError"):
            raise ValueError(
                f"{address} is not the URL of a database; write "
                f"postgresql://user:password@host/name, or the path of a file."
            ) from error
        reason = str(error).strip().partition("\n")[0]
        advice = "Is the server up, and are name and password right?"
        if not url:
            advice = "Is it a journal of Optuna, and may you write to it?"
        elif isinstance(error, RuntimeError):
            advice = "Use the version of Optuna that made it, or a new database."
        raise StorageError(f"{address} cannot be used: {kind}: {reason} {advice}") from error


def _database(url: str) -> RDBStorage:
    """Open a database, while other processes may create its tables."""
    for _ in range(_TRIES):
        try:
            return RDBStorage(url)
        except sqlalchemy.exc.DBAPIError as error:
            if "already exists" not in str(error):
                raise
            time.sleep(0.5)  # another process is creating them
    return RDBStorage(url)


def _announce(engine: sqlalchemy.Engine, line: str) -> None:
    """Say ``line`` if a connection or a statement takes long, as where others hold a lock."""

    def connect(dialect: Any, _: Any, args: Any, options: Any) -> Any:
        with waiting(line):
            return dialect.connect(*args, **options)

    def execute(cursor: Any, statement: str, parameters: Any, context: Any) -> bool:
        with waiting(line):
            context.dialect.do_execute(cursor, statement, parameters, context)
        return True  # it is done

    sqlalchemy.event.listen(engine, "do_connect", connect)
    sqlalchemy.event.listen(engine, "do_execute", execute)


def _journal(path: Path) -> JournalStorage:
    path.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(path)
    try:
        return JournalStorage(journal)
    except (StorageError, OSError):
        raise
    except Exception as error:  # any error of Optuna's when it replays an impossible operation
        raise journal.damaged(journal.line, f" ({type(error).__name__}: {error})") from error


def without_password(where: str | Path) -> str:
    """Return an address without its password."""
    scheme, separator, rest = str(where).partition("://")
    user, at, host = rest.rpartition("@")
    return f"{scheme}{separator}{user.partition(':')[0]}{at}{host}" if separator else scheme


@contextlib.contextmanager
def database_errors() -> Iterator[None]:
    """Raise a ``StorageError`` if a database fails, is full or goes away."""
    try:
        yield
    except StorageInternalError as error:
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise StorageError(
            f"The storage has failed: {reason}. Finished trials are kept. Repeat the command once "
            f"the storage works."
        ) from error
