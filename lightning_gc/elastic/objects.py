"""Objects: signed objects under the URL of a folder or a bucket, and who has written one first."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_gc.elastic.channel import VERSION, Seal

_log = logging.getLogger(__name__)
_SIGN = 32
_RACERS = 8
_AT_ONCE = 16


class Store(Protocol):
    """Holds objects by name. Errors of any class mean that it could not be done now."""

    def put(self, name: str, data: bytes) -> None:
        """Write an object, completely or not at all; replace the one of this name."""

    def create(self, name: str, data: bytes) -> None:
        """Write an object, completely or not at all; FileExistsError if the name is taken."""

    def get(self, name: str) -> bytes:
        """Return an object; FileNotFoundError if it is missing."""

    def names(self, folder: str) -> dict[str, str]:
        """Return names in a folder, and texts that differ when their objects have changed."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, except missing ones."""


class Disk:
    """A folder of a file system. An object gets its name when it is complete, by a hard link."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def put(self, name: str, data: bytes) -> None:
        with self._written(name, data) as made:
            made.replace(self._root / name)

    def create(self, name: str, data: bytes) -> None:
        with self._written(name, data) as made:
            os.link(made, self._root / name)

    @contextlib.contextmanager
    def _written(self, name: str, data: bytes) -> Iterator[Path]:
        """Yield a complete file of another name in the same folder."""
        folder = (self._root / name).parent
        made = folder / f".{secrets.token_hex(8)}"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            made.write_bytes(data)
            yield made
        finally:
            made.unlink(missing_ok=True)

    def get(self, name: str) -> bytes:
        return (self._root / name).read_bytes()

    def names(self, folder: str) -> dict[str, str]:
        found = {}
        with os.scandir(self._root / folder) as entries:
            for each in entries:
                with contextlib.suppress(FileNotFoundError):  # removed since
                    now = each.stat()
                    found[each.name] = f"{now.st_mtime_ns} {now.st_ino} {now.st_size}"
        return {name: text for name, text in found.items() if not name.startswith(".")}

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            (self._root / name).unlink(missing_ok=True)


class Bucket:
    """A store of fsspec with a conditional put: it refuses to create an object twice."""

    def __init__(self, system: AbstractFileSystem, root: str) -> None:
        self._system, self._root = system, root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def put(self, name: str, data: bytes) -> None:
        self._system.pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> None:
        self._system.pipe_file(self._path(name), data, mode="create")

    def get(self, name: str) -> bytes:
        data: bytes = self._system.cat_file(self._path(name))
        return data

    def names(self, folder: str) -> dict[str, str]:
        self._system.invalidate_cache()
        found = self._system.ls(self._path(folder), detail=True)
        return {each["name"].rpartition("/")[2]: repr(sorted(each.items())) for each in found}

    def remove(self, names: Sequence[str]) -> None:
        paths = [self._path(name) for name in names]
        try:
            self._system.rm(paths)  # in one request, where the store can
        except FileNotFoundError:
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._system.rm_file(path)


def store_at(url: str) -> Store:
    """Return the store at a URL of fsspec, or a path.

    Raises:
        ValueError: no package of this machine knows the URL, or it has no conditional put.
    """
    try:
        system, root = url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"Elastic({url!r}): fsspec cannot open it ({error}). Give a path, or the URL of a "
            f"store whose package is installed, such as s3fs for s3://."
        ) from error
    if isinstance(system, LocalFileSystem):
        return Disk(root)
    base = AsyncFileSystem._pipe_file if isinstance(system, AsyncFileSystem) else None
    own = getattr(type(system), "pipe_file" if base is None else "_pipe_file")
    if own in (base, AbstractFileSystem.pipe_file):
        raise _no_create(url, f"{type(system).__name__} of fsspec only looks before it writes")
    return Bucket(system, root)


def _no_create(url: str, why: str) -> ValueError:
    return ValueError(
        f"Elastic({url!r}): this store has no conditional put, which refuses a second object of a "
        f"name ({why}). So two workers could commit different rounds. Use a local or NFS folder, "
        f"S3, GCS or Azure, with a recent version of fsspec and of the store's package."
    )


@dataclass(frozen=True)
class Probe:
    """Measurements of a store.

    Attributes:
        seconds: of a small request, median.
        rate: bytes per second of a large object, there and back; 0: not measured.
        lag: seconds until a listing showed a new object.
    """

    seconds: float
    rate: float
    lag: float


class Objects:
    """Signed objects in a store. It counts what they cost.

    Args:
        url: of the folder.
        secret: that all share.
        store: that holds them; None: the one at the URL.

    Attributes:
        requests, sent, received: numbers of requests and bytes.
        refused: names of objects that were not to be believed.

    Raises:
        ValueError: also from ``enter``: the store is not suitable, or has another secret.

    Laws, in ``tests/units/elastic/test_objects.py``:
        1. Of all who create a name, one succeeds.
        2. What is read was written by one who has the secret, in this folder, under this name.
           Anything else is named once, and counts as missing.
    """

    def __init__(self, url: str, secret: str | None, store: Store | None = None) -> None:
        self.url, self._seal, self._place = url, Seal(secret), b""
        self._store = store_at(url) if store is None else store
        self._lock, self.refused = threading.Lock(), set[str]()
        self.requests = self.sent = self.received = 0
        self._pool = ThreadPoolExecutor(_AT_ONCE, "folder")

    def enter(self) -> float:
        """Make sure that the store is suitable, and this folder's; return seconds of a request."""
        try:
            seconds = self.probe().seconds
            while (site := self.get("site")) is None:  # whoever comes first names the folder
                if "site" in self.refused:
                    raise ValueError(
                        f"Elastic({self.url!r}): the folder has another secret or version, or is "
                        f"damaged. Give all workers the same ones, or use a new folder."
                    )
                self.create("site", secrets.token_hex(16).encode())
        except OSError as error:
            raise ValueError(
                f"Elastic({self.url!r}): the folder cannot be used: {error}. Every worker must be "
                f"able to write, hard-link, read, list and remove there."
            ) from error
        self._place = site
        self.requests = self.sent = self.received = 0
        return seconds

    def put(self, name: str, body: bytes) -> None:
        """Write an object; replace one of this name."""
        self._do(self._store.put, name, self._signed(name, body))

    def create(self, name: str, body: bytes) -> bool:
        """Write an object unless the name is taken; return whether it was written."""
        try:
            self._do(self._store.create, name, self._signed(name, body))
        except FileExistsError:
            return False
        return True

    def get(self, name: str) -> bytes | None:
        """Return an object; None if it is missing or not to be believed."""
        try:
            data: bytes = self._do(self._store.get, name)
        except FileNotFoundError:
            return None
        self._add(received=len(data))
        if hmac.compare_digest(data, self._signed(name, data[_SIGN:])):
            return data[_SIGN:]
        if name not in self.refused:
            self.refused.add(name)
            _log.warning(
                "The object %s in %s is damaged, or of another run or secret: it is ignored.",
                *(name, self.url),
            )
        return None

    def get_all(self, names: Iterable[str]) -> list[bytes | None]:
        """Return objects as ``get``, several at once."""
        return list(self._pool.map(self.get, names))

    def names(self, folder: str) -> dict[str, str]:
        """Return names in a folder, and texts that differ when their objects have changed."""
        try:
            found: dict[str, str] = self._do(self._store.names, folder)
        except FileNotFoundError:
            return {}
        return found

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects."""
        if names:
            self._do(self._store.remove, names)

    def close(self) -> None:
        """End threads."""
        self._pool.shutdown()

    def probe(self, nbytes: int = 0) -> Probe:
        """Find out whether the store can carry a run; leave nothing there.

        Args:
            nbytes: of a large object, by which the rate is measured.

        Raises:
            ValueError: it creates a name twice.
            OSError: it cannot be used.
        """
        token, seconds = secrets.token_hex(8), list[float]()
        first, raced, large = (f"probe/{token}-{kind}" for kind in ("first", "raced", "large"))

        def timed(act: Callable[[], Any]) -> Any:
            began = time.monotonic()
            found = act()
            seconds.append(time.monotonic() - began)
            return found

        try:
            if not timed(lambda: self.create(first, b"1")) or self.create(first, b"2"):
                raise _no_create(self.url, "it was asked twice, and has written twice")
            began = time.monotonic()
            while first.rpartition("/")[2] not in timed(lambda: self.names("probe")):
                if time.monotonic() > began + 60.0:
                    raise OSError("a new object was not listed within 60 s")
                time.sleep(0.1)
            lag = time.monotonic() - began
            if timed(lambda: self.get(first)) != b"1":
                raise _no_create(self.url, "the second object has replaced the first")
            bodies = [f"{number}".encode() for number in range(_RACERS)]
            won = list(self._pool.map(lambda body: self.create(raced, body), bodies))
            if sum(won) != 1 or self.get(raced) != bodies[won.index(True)]:
                raise _no_create(self.url, f"{sum(won)} of {_RACERS} who raced have won")
            began = time.monotonic()
            if nbytes:
                self.put(large, secrets.token_bytes(nbytes))
                self.get(large)
            rate = 2 * nbytes / (time.monotonic() - began) if nbytes else 0.0
        finally:
            with contextlib.suppress(OSError):
                self.remove([first, raced, *([large] if nbytes else [])])
        return Probe(statistics.median(seconds), rate, lag)

    def _signed(self, name: str, body: bytes) -> bytes:
        return self._seal.sign(b"%d" % VERSION, self._place, name.encode(), body) + body

    def _do(self, act: Callable[..., Any], *arguments: Any) -> Any:
        self._add(requests=1, sent=len(arguments[1]) if len(arguments) > 1 else 0)
        try:
            return act(*arguments)
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:  # of a package that is not known here
            raise OSError(f"{self.url} has failed: {error!r}") from error

    def _add(self, **numbers: int) -> None:
        with self._lock:
            for name, number in numbers.items():
                setattr(self, name, getattr(self, name) + number)
