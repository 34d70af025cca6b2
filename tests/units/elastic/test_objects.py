"""Objects in folders and buckets: who writes first, and what is not believed."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from lightning_gc.elastic import objects as module
from lightning_gc.elastic.objects import Bucket, Disk, Objects, Store


def bucket(path: Path) -> Store:
    return Bucket(MemoryFileSystem(), f"/{path.name}-{os.getpid()}")


def disk(path: Path) -> Store:
    return Disk(str(path))


STORES: dict[str, Callable[[Path], Store]] = {
    "disk": lambda path: Disk(str(path)),
    "bucket": bucket,
}


def entered(url: str, secret: str | None, store: Store | None = None) -> Objects:
    objects = Objects(url, secret, store)
    objects.enter()
    return objects


class Wrapped:
    """A store that does something else in one of its calls."""

    def __init__(self, inner: Store, **instead: Any) -> None:
        self.inner, self.instead = inner, instead

    def __getattr__(self, name: str) -> Any:
        return self.instead.get(name) or getattr(self.inner, name)


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return STORES[request.param](tmp_path)


@pytest.mark.parametrize("racers", [2, 16])
def test_of_all_who_create_a_name_one_succeeds(tmp_path: Path, racers: int) -> None:
    """Law 1, for separate connections to one folder."""
    each = [entered(str(tmp_path), "secret") for _ in range(racers)]
    with ThreadPoolExecutor(racers) as pool:
        for name in ("log/0", "log/1", "log/2"):
            won = list(pool.map(lambda o, n=name: o.create(n, str(id(o)).encode()), each))
            assert sum(won) == 1
            assert each[0].get(name) == str(id(each[won.index(True)])).encode()


def test_what_is_written_is_read_listed_replaced_and_removed(store: Store) -> None:
    objects = entered("url", "secret", store)
    objects.put("a/one", b"1")
    before = objects.names("a")
    objects.put("a/one", b"22")
    after = objects.names("a")
    assert list(before) == list(after) == ["one"]
    assert before != after
    assert objects.get_all(["a/one", "a/two"]) == [b"22", None]
    objects.remove(["a/one", "a/two"])
    assert objects.names("a") == objects.names("nowhere") == {}
    assert objects.names("probe") == {}  # of the test at the start


def test_another_secret_is_refused(store: Store) -> None:
    """Law 2."""
    entered("url", "secret", store)
    for other in ("another", None):
        with pytest.raises(ValueError, match="the folder has another secret"):
            entered("url", other, store)


def _cut(data: bytes) -> bytes:
    return data[:-1]


def _flipped(data: bytes) -> bytes:
    return data[:40] + bytes([data[40] ^ 1]) + data[41:]


@pytest.mark.parametrize("damage", [_cut, _flipped, lambda data: b"", lambda data: data + data])
def test_a_damaged_object_counts_as_missing_and_is_named_once(
    store: Store, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """Law 2."""
    objects = entered("url", "secret", store)
    objects.put("log/0", b"an entry of the log")
    store.put("log/0", damage(store.get("log/0")))
    assert objects.get("log/0") is objects.get("log/0") is None
    assert [each.message for each in caplog.records if "log/0" in each.message] == [
        "The object log/0 in url is damaged, or of another run or secret: it is ignored."
    ]


def test_an_object_of_another_name_or_folder_is_not_believed(tmp_path: Path) -> None:
    """Law 2: an old round played again, and one of another run with the same secret."""
    here, there = Disk(str(tmp_path / "here")), Disk(str(tmp_path / "there"))
    ours, theirs = entered("here", "secret", here), entered("there", "secret", there)
    ours.put("log/0", b"ours")
    theirs.put("log/1", b"theirs")
    here.put("log/1", there.get("log/1"))
    here.put("log/2", here.get("log/0"))
    assert ours.get_all(["log/0", "log/1", "log/2"]) == [b"ours", None, None]


def test_a_store_that_writes_a_name_twice_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="asked twice, and has written twice"):
        entered("url", None, Wrapped(store, create=store.put))


def test_a_store_that_loses_a_race_is_refused(store: Store) -> None:
    """It looks before it writes, so that two who look at once both write."""

    def create(name: str, data: bytes) -> None:
        if "raced" not in name:
            store.create(name, data)
        else:
            store.put(name, data)

    with pytest.raises(ValueError, match="8 of 8 who raced have won"):
        entered("url", None, Wrapped(store, create=create))


def test_a_system_that_only_looks_before_it_writes_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Looks(AbstractFileSystem):  # type: ignore[misc]
        pass

    monkeypatch.setattr(module, "url_to_fs", lambda url, **_: (Looks(), "run"))
    with pytest.raises(ValueError, match="Looks of fsspec only looks before it writes"):
        entered("looks://run", None)


@pytest.mark.parametrize("url", ["nope://bucket/run", "s3nope://bucket"])
def test_a_url_that_nobody_knows_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"Protocol not known.*Give a path, or the URL"):
        entered(url, None)


def _fails(*_: Any) -> Any:
    raise RuntimeError("the network is away")  # packages have classes of their own


@pytest.mark.parametrize("what", ["put", "create", "get", "names", "remove"])
def test_what_a_package_raises_is_an_error_of_the_folder(store: Store, what: str) -> None:
    objects = entered("url", "secret", store)
    objects._store = Wrapped(store, **{what: _fails})
    calls: dict[str, Any] = {
        "put": lambda: objects.put("a", b""),
        "create": lambda: objects.create("a", b""),
        "get": lambda: objects.get("a"),
        "names": lambda: objects.names("a"),
        "remove": lambda: objects.remove(["a"]),
    }
    with pytest.raises(OSError, match=r"url has failed: RuntimeError\('the network is away'\)"):
        calls[what]()


def test_a_folder_that_nobody_may_write_to_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match=r"the folder cannot be used.*must be able to write"):
        entered("url", None, Wrapped(store, create=_fails))


def test_a_file_gets_its_name_when_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or a process that is killed, leaves no half object."""
    disk = Disk(str(tmp_path))
    disk.put("a", b"whole")

    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    for write in (disk.put, disk.create):
        with pytest.raises(OSError, match="No space left"):
            write("a" if write == disk.put else "b", b"another one")
    assert os.listdir(tmp_path) == ["a"]
    assert disk.get("a") == b"whole"


def test_a_listing_that_lags_only_costs_time(store: Store) -> None:
    shown: list[int] = []

    def late(folder: str) -> dict[str, str]:
        shown.append(1)
        return {} if len(shown) < 3 else store.names(folder)

    objects = entered("url", "secret", Wrapped(store, names=late))
    assert len(shown) == 3
    assert objects.probe().lag < 60.0
