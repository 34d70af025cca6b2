"""Check the files of torch's distributed checkpoints; read ``.metadata`` without running its code.

Lightning and torch write these files without checksums, so a flipped bit would silently change a
weight: ``record_files`` and ``check_files``. torch unpickles ``.metadata``, so a malicious one runs
code: ``read_metadata`` goes through its opcodes. It imports no class and calls no function, and it
refuses all that torch's writer does not write.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_gc.checkpoint import side_files
from lightning_gc.core import COUNT, TEXT, WHOLE, Each, Leaf, Record
from lightning_gc.core.saved_state import CHECKSUM, check_checksum, with_checksum

LAST = "meta.pt"
"""The file that Lightning writes last, when all others are complete."""

METADATA = ".metadata"
_RECORD = "files.json"
_STRUCTURE = Record({"format": COUNT, "files": Each(TEXT), CHECKSUM: TEXT})
_OF_RANK = re.compile(r"__(\d+)_.*")
_BLOCK = 1 << 20


def record_files(host: side_files.AnyHost, target: Path, folder: Path) -> None:
    """Write the checksums of a complete distributed checkpoint's files to ``folder``.

    Each rank reads back the files that it has written.

    Raises:
        RuntimeError: on all ranks, if one cannot read or write.
    """
    names = []
    if host.global_rank == 0:
        found_here = sorted(path.name for path in target.iterdir())
        names = [n for n in found_here if n in (LAST, METADATA) or n.endswith(".distcp")]
    names = json.loads(side_files.told_by_rank_0(host, json.dumps(names)))
    found: dict[str, str] = {}

    def read() -> str:
        return json.dumps({name: _sum_of(target / name) for name in _share(names, host)})

    problem = f"could not read back the files of {target}"
    for text in side_files.on_all_ranks(host, problem, read).values():
        found |= json.loads(text)

    def write() -> None:
        if host.global_rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f"{_RECORD}.part"
            part.write_text(json.dumps(with_checksum({"format": 1, "files": found})))
            os.replace(part, folder / _RECORD)

    problem = f"could not write {folder / _RECORD}"
    side_files.on_all_ranks(host, problem, write)


def check_files(host: side_files.AnyHost, target: Path, *, recorded: bool, safely: bool) -> bool:
    """Check a distributed checkpoint before it is loaded; each rank reads some of its files.

    Args:
        host: the strategy.
        target: path of the checkpoint. A checkpoint that is not a folder is not checked.
        recorded: compare the files with the recorded checksums.
        safely: refuse files that could run code in torch's reader.

    Returns:
        Whether this library saved the checkpoint without a record.

    Raises:
        ValueError: a file is missing, is not the one that was saved, or could run code.
    """
    if not target.is_dir():
        return False
    unrecorded = False
    if recorded:
        records, without = _records(target)
        last = _sum_of(target / LAST) if records and (target / LAST).is_file() else None
        # The record of the last save has the current checksum of the file that is written last.
        record = next((files for _, files in records if last and files.get(LAST) == last), None)
        if record is None and records and not without:
            raise ValueError(
                f"{target / LAST} is missing or is not the file that was saved with "
                f"{records[0][0]}; remove that record to load the checkpoint unchecked"
            )
        for name in _share(record or {}, host):
            if not (target / name).is_file():
                raise ValueError(f"{target / name} is missing")
            if _sum_of(target / name) != (record or {})[name]:
                raise ValueError(f"{target / name} is not the file that was saved")
        unrecorded = record is None and without
    if safely and (target / METADATA).exists():
        try:
            check_objects(target)
        except ValueError as error:
            raise ValueError(
                f"{error}. If you trust this file, give Trainer.fit(..., weights_only=False)"
            ) from error
    return unrecorded


def _records(target: Path) -> tuple[list[tuple[Path, dict[str, str]]], bool]:
    """Return a checkpoint's records with their paths, and whether some error state lacks one."""
    found, without = [], False
    for folder in sorted((target / side_files.FOLDER).glob("*/")):
        path = folder / _RECORD
        if not path.is_file():
            without = True
            continue
        try:
            record: Any = json.loads(path.read_text())
            _STRUCTURE.check(record)
            check_checksum(record)
        except ValueError as error:
            raise ValueError(
                f"{path} is damaged ({error}); remove it to load the checkpoint unchecked"
            ) from error
        found.append((path, record["files"]))
    return found, without


def _share(names: Iterable[str], host: side_files.AnyHost) -> list[str]:
    """Return the files that this rank reads: where possible, the ones that it has written."""

    def reader(name: str) -> int:
        match = _OF_RANK.fullmatch(name)
        return int(match[1]) % host.world_size if match else 0

    return [name for name in names if reader(name) == host.global_rank]


def _sum_of(path: Path) -> str:
    digest = hashlib.sha256()
    with side_files.reading(path), path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


# ---------------------------------------------------------------------- the metadata

_CLASSES = "torch.distributed.checkpoint.metadata."
_STORED = "torch.distributed.checkpoint.filesystem._StorageInfo"
_RECORDS = {
    _STORED,
    *(
        _CLASSES + name
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
            *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        )
    ),
}
_SIZE = "torch.Size"
_CALLED = {
    _SIZE,
    "torch.serialization._get_layout",
    _CLASSES + "_MEM_FORMAT_ENCODING",
    *(
        f"pathlib.{local}{system}Path"
        for local in ("", "_local.")
        for system in ("Posix", "Windows")
    ),
}


class Unread(ValueError):
    """A metadata file is missing, damaged, or has content that torch does not write."""


class Slice(NamedTuple):
    """The bytes of an entry: file in the folder, first byte, number of bytes."""

    file: str
    start: int
    length: int


@dataclass(eq=False)
class _Named:
    """A class or function that a file names; with ``made``, an object of that class."""

    name: str
    made: bool = False
    fields: Any = None


def read_metadata(folder: Path) -> list[Slice]:
    """Return the slices of objects in ``folder`` that torch unpickles, by its ``.metadata``.

    Objects are all entries that are not tensors, such as a learning rate.

    Raises:
        ValueError: the file is missing or damaged, names a class that torch does not write there,
            or refers to a file outside the folder.
    """
    path = folder / METADATA
    if not path.is_file():
        raise Unread(f"{path} is missing")
    data = path.read_bytes()
    try:
        return _objects(_plain(data), folder)
    except Unread as error:
        raise Unread(f"{path} {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise Unread(
            f"{path} is not a distributed checkpoint's metadata ({type(error).__name__}: {error})"
        ) from error


def check_objects(folder: Path) -> None:
    """Raise ValueError if torch's distributed reader could run code from ``folder``.

    That reader unpickles the metadata and every saved object that is not a tensor.
    """
    for where in read_metadata(folder):
        try:
            with (folder / where.file).open("rb") as file:
                file.seek(where.start)
                data = file.read(where.length)
            if data[:2] == b"PK":  # torch does not check the sums in its zip format
                with zipfile.ZipFile(io.BytesIO(data)) as archive:
                    damaged = archive.testzip()
                if damaged is not None:
                    raise ValueError(f"its record {damaged} is damaged")
            torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            raise Unread(
                f"{folder / where.file} has an object at byte {where.start} that cannot be read "
                f"with weights_only=True ({side_files.in_short(error)})"
            ) from error


class _Unpickled:
    """The values of a pickle, with ``_Named`` for objects; imports and calls nothing."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def taken(self, count: int) -> list[Any]:
        return [self.stack.pop() for _ in range(count)][::-1]

    def since_mark(self) -> list[Any]:
        return self.taken(len(self.stack) - self.marks.pop())

    def extend(self, items: list[Any]) -> None:
        _is(self.stack[-1], list).extend(items)

    def update(self, items: list[Any]) -> None:
        _is(self.stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))

    def name(self, words: list[str]) -> None:
        self.stack.append(_known(".".join(words)))

    def make(self) -> None:
        arguments, named = self.stack.pop(), _is(self.stack.pop(), _Named)
        if arguments != () or named.made or named.name not in _RECORDS:
            raise Unread(f"makes {named.name} with arguments, which torch does not write")
        self.stack.append(_Named(named.name, made=True))

    def call(self) -> None:
        arguments, named = _is(self.stack.pop(), tuple), _is(self.stack.pop(), _Named)
        if named.made or named.name not in _CALLED:
            raise Unread(f"calls {named.name}, which torch does not write")
        made = _Named(named.name, made=True, fields=arguments)
        self.stack.append(_is(arguments[0], tuple) if named.name == _SIZE else made)

    def fill(self) -> None:
        fields, target = self.stack.pop(), _is(self.stack[-1], _Named)
        if not target.made or target.fields is not None:
            raise Unread(f"changes {target.name}, which torch does not write")
        target.fields = _is(fields, tuple if target.name.endswith("TensorProperties") else dict)


_ACTS: dict[str, Callable[[_Unpickled, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda found, value: None),
    **dict.fromkeys(
        ("SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        lambda found, value: found.stack.append(value),
    ),
    "NONE": lambda found, value: found.stack.append(None),
    "NEWTRUE": lambda found, value: found.stack.append(True),
    "NEWFALSE": lambda found, value: found.stack.append(False),
    "EMPTY_DICT": lambda found, value: found.stack.append({}),
    "EMPTY_LIST": lambda found, value: found.stack.append([]),
    "EMPTY_TUPLE": lambda found, value: found.stack.append(()),
    "TUPLE1": lambda found, value: found.stack.append(tuple(found.taken(1))),
    "TUPLE2": lambda found, value: found.stack.append(tuple(found.taken(2))),
    "TUPLE3": lambda found, value: found.stack.append(tuple(found.taken(3))),
    "TUPLE": lambda found, value: found.stack.append(tuple(found.since_mark())),
    "MARK": lambda found, value: found.marks.append(len(found.stack)),
    "MEMOIZE": lambda found, value: found.memo.update({len(found.memo): found.stack[-1]}),
    **dict.fromkeys(
        ("BINPUT", "LONG_BINPUT"),
        lambda found, value: found.memo.update({int(value): found.stack[-1]}),
    ),
    **dict.fromkeys(
        ("BINGET", "LONG_BINGET"), lambda found, value: found.stack.append(found.memo[int(value)])
    ),
    "APPEND": lambda found, value: found.extend(found.taken(1)),
    "APPENDS": lambda found, value: found.extend(found.since_mark()),
    "SETITEM": lambda found, value: found.update(found.taken(2)),
    "SETITEMS": lambda found, value: found.update(found.since_mark()),
    "GLOBAL": lambda found, value: found.name(_is(value, str).split(" ", 1)),
    "STACK_GLOBAL": lambda found, value: found.name(found.taken(2)),
    "NEWOBJ": lambda found, value: found.make(),
    "REDUCE": lambda found, value: found.call(),
    "BUILD": lambda found, value: found.fill(),
}
"""The act of each opcode of torch's writer, on the stack and with the opcode's value."""


def _plain(data: bytes) -> Any:
    """Return what a pickle says, as plain values and ``_Named``."""
    found = _Unpickled()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "STOP":
            break
        if opcode.name not in _ACTS:
            raise Unread(f"has the pickle opcode {opcode.name}, which torch does not write")
        _ACTS[opcode.name](found, argument)
    (value,) = found.stack
    return value


def _known(name: str) -> _Named:
    is_dtype = name.startswith("torch.") and isinstance(
        getattr(torch, name.removeprefix("torch."), None), torch.dtype
    )
    if name not in _RECORDS | _CALLED and not is_dtype:
        raise Unread(
            f"names {name}, which is not a class of a distributed checkpoint's metadata; torch "
            f"could run code when it loads it"
        )
    return _Named(name)


def _is(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise Unread(f"has a {type(value).__name__} where torch writes a {kind.__name__}")
    return value


def _fields(value: Any, name: str) -> Any:
    """Return the fields of an object of class ``name``; refuse any other value."""
    named = _is(value, _Named)
    if not named.made or named.name.rpartition(".")[2] != name:
        raise Unread(f"has {named.name} where torch writes {name}")
    return {} if named.fields is None else named.fields


_SHAPE = Leaf(
    "a tuple of whole numbers",
    lambda v: isinstance(v, tuple) and all(type(n) is int and n >= 0 for n in v),
)
_FILE = Leaf(
    "the name of a file in the folder",
    lambda v: isinstance(v, str) and v not in ("", ".", "..") and not set(v) & set("/\\:\0"),
)
_WHERE = Record({"relative_path": _FILE, "offset": WHOLE, "length": WHOLE})


def _objects(described: Any, folder: Path) -> list[Slice]:
    """Return the objects that parsed metadata describe, after checking the metadata."""
    about = _fields(described, "Metadata")
    stored: dict[str, dict[Any, Slice]] = {}
    for index, place in _is(about["storage_data"], dict).items():
        key, where = _fields(index, "MetadataIndex"), _fields(place, "_StorageInfo")
        TEXT.check(key["fqn"], "fqn")
        _WHERE.check(where, key["fqn"])
        found = Slice(where["relative_path"], where["offset"], where["length"])
        path = folder / found.file
        if not path.is_file():
            raise Unread(f"needs {path}, which is missing")
        if found.start + found.length > path.stat().st_size:
            raise Unread(
                f"needs {found.start + found.length} bytes of {found.file}, which has fewer"
            )
        stored.setdefault(key["fqn"], {})[key.get("offset")] = found
    tensors: set[str] = set()
    objects: list[Slice] = []
    for name, entry in _is(about["state_dict_metadata"], dict).items():
        TEXT.check(name, "a name")
        if _is(entry, _Named).name.endswith("BytesStorageMetadata"):
            objects += stored.get(name, {}).values()
        else:
            _check_tensor(_fields(entry, "TensorStorageMetadata"), stored.get(name, {}))
            tensors.add(name)
    # Include objects that no entry names, because torch could read them: a name may occur twice.
    objects += [w for name, at in stored.items() if name not in tensors for w in at.values()]
    return list(dict.fromkeys(objects))


def _check_tensor(about: dict[str, Any], stored: Mapping[Any, Slice]) -> None:
    """Raise an error unless a tensor's parts have places, and lie within it and fill it."""
    size, filled = about["size"], 0
    _SHAPE.check(size, "size")
    _fields(about["properties"], "TensorProperties")
    for chunk in _is(about["chunks"], list):
        fields = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = fields["offsets"], fields["sizes"]
        _SHAPE.check(offsets, "offsets")
        _SHAPE.check(sizes, "sizes")
        ends = [o + s for o, s in zip(offsets, sizes, strict=True)]
        if any(end > most for end, most in zip(ends, size, strict=True)):
            raise Unread(f"has a part {offsets} to {tuple(ends)} of a tensor of size {size}")
        if offsets not in stored:
            raise Unread(f"has no place of the part {offsets} of a tensor of size {size}")
        filled += math.prod(sizes)
    if filled != math.prod(size):
        raise Unread(f"does not have all parts of a tensor of size {size}")
