"""Where studies are kept: a journal file, a database, or any storage of Optuna's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy.exc
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage

from lightning_gc.tuning.journal import Journal, StorageError

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
        return _database(str(where)) if url else _journal(Path(where))
    except StorageError:
        raise
    except ModuleNotFoundError as error:
        raise StorageError(f"{address} needs a driver: {error}. Install it.") from error
    except Exception as error:  # each driver has errors of its own
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


def _journal(path: Path) -> JournalStorage:
    path.parent.mkdir(parents=True, exist_ok=True)
    journal = Journal(path)
    try:
        return JournalStorage(journal)
    except (StorageError, OSError):
        raise
    except Exception as error:  # whatever Optuna raises when it replays an impossible operation
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
            f"The storage has failed: {reason}. What is finished is kept: once it can be used "
            f"again, the same command goes on."
        ) from error
