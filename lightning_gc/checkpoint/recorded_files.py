"""Record checksums of a distributed checkpoint's files; compare them before a load.

Lightning and torch write these files without checksums, so a flipped bit would silently change a
weight.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_gc.checkpoint import side_files
from lightning_gc.checkpoint.distributed_metadata import NAME as METADATA
from lightning_gc.checkpoint.distributed_metadata import check_objects
from lightning_gc.checkpoint.host import Ranks, on_all_ranks
from lightning_gc.core.checksum import NAME as CHECKSUM
from lightning_gc.core.checksum import check_checksum, with_checksum
from lightning_gc.core.state_structure import COUNT, TEXT, Each, Record
from lightning_gc.exchange.peers import explaining
from lightning_gc.transports.distributed import broadcast_text

LAST = "meta.pt"
"""The file that Lightning writes last, when all others are complete."""

_RECORD = "files.json"
_STRUCTURE = Record({"format": COUNT, "files": Each(TEXT), CHECKSUM: TEXT})
_OF_RANK = re.compile(r"__(\d+)_.*")
_BLOCK = 1 << 20


def record_files(host: Ranks, target: Path, folder: Path) -> None:
    """Write the checksums of a complete distributed checkpoint's files to ``folder``.

    Each rank reads back the files that it has written.

    Raises:
        RuntimeError: on all ranks, if one cannot read or write.
    """
    names = []
    if host.global_rank == 0:
        names = [path.name for path in sorted(target.iterdir()) if _is_of_checkpoint(path.name)]
    names = json.loads(broadcast_text(json.dumps(names), host.root_device))
    found: dict[str, str] = {}

    def read() -> str:
        return json.dumps({name: _sum_of(target / name) for name in _share(names, host)})

    problem = f"could not read back the files of {target}"
    for text in on_all_ranks(host, explaining(problem, read)).values():
        found |= json.loads(text)

    def write() -> str:
        if host.global_rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f"{_RECORD}.part"
            part.write_text(json.dumps(with_checksum({"format": 1, "files": found})))
            os.replace(part, folder / _RECORD)
        return ""

    on_all_ranks(host, explaining(f"could not write {folder / _RECORD}", write))


def check_files(host: Ranks, target: Path, *, recorded: bool, safely: bool) -> bool:
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
        record = _matching(target, records)
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


def _matching(target: Path, records: list[tuple[Path, dict[str, str]]]) -> dict[str, str] | None:
    """Return the record with the current checksum of ``LAST``: it belongs to the last save."""
    if not records or not (target / LAST).is_file():
        return None
    digest = _sum_of(target / LAST)
    return next((files for _, files in records if files.get(LAST) == digest), None)


def _is_of_checkpoint(name: str) -> bool:
    return name in (LAST, METADATA) or name.endswith(".distcp")


def _share(names: Iterable[str], host: Ranks) -> list[str]:
    """Return the files that this rank reads: where possible, the ones that it has written."""

    def reader(name: str) -> int:
        match = _OF_RANK.fullmatch(name)
        return int(match[1]) % host.world_size if match else 0

    return [name for name in names if reader(name) == host.global_rank]


def _sum_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
