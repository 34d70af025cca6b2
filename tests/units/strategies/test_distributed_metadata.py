"""A distributed checkpoint's metadata are read as data; what torch does not write is refused."""

import pickle
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_gc.checkpoint.distributed_files import Slice, check_objects, read_metadata
from tests.support import prepared

WEIGHT = torch.arange(12.0).reshape(3, 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    there = tmp_path / "checkpoint"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no process group
        save({"weight": WEIGHT, "rate": 0.1}, checkpoint_id=there, no_dist=True)
    return there


def described(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - our own


def changed(folder: Path, change: Callable[[Any], Any]) -> None:
    """Write metadata in which something is otherwise."""
    content = described(folder)
    change(content)
    (folder / ".metadata").write_bytes(pickle.dumps(content))


def test_it_finds_the_objects_that_torch_unpickles(folder: Path) -> None:
    places = described(folder).storage_data
    (rate,) = (place for index, place in places.items() if index.fqn == "rate")
    assert read_metadata(folder) == [Slice(rate.relative_path, rate.offset, rate.length)]
    check_objects(folder)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_any_binary_protocol_is_read(folder: Path, protocol: int) -> None:
    expected = read_metadata(folder)
    content = described(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(content, protocol))
    assert read_metadata(folder) == expected


def _place(content: Any) -> Any:
    return next(p for i, p in content.storage_data.items() if i.fqn == "weight")


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a file elsewhere": (
        lambda c: setattr(_place(c), "relative_path", "../other"),
        "not the name of a file",
    ),
    "an absolute path": (
        lambda c: setattr(_place(c), "relative_path", "/etc/passwd"),
        "not the name of a file",
    ),
    "a file that is missing": (
        lambda c: setattr(_place(c), "relative_path", "__7_0.distcp"),
        "__7_0.distcp, which is missing",
    ),
    "bytes behind the end": (lambda c: setattr(_place(c), "length", 1 << 40), "which has fewer"),
    "a negative offset": (lambda c: setattr(_place(c), "offset", -1), "offset is -1"),
    "a part outside": (
        lambda c: setattr(c.state_dict_metadata["weight"].chunks[0], "offsets", torch.Size((1, 0))),
        "of a tensor of size",
    ),
    "half a tensor": (
        lambda c: setattr(c.state_dict_metadata["weight"], "size", torch.Size((6, 4))),
        "not have all parts",
    ),
    "parts without place": (
        lambda c: c.storage_data.clear(),
        "no place of the part",
    ),
    "another class": (lambda c: setattr(c, "planner_data", print), "names builtins.print"),
    "another class of torch's": (
        lambda c: setattr(c, "planner_data", torch.nn.Linear),
        "names torch.nn.modules.linear.Linear",
    ),
    "a call of a known class": (lambda c: setattr(c, "planner_data", Called()), "calls torch.di"),
    "no entries": (lambda c: setattr(c, "state_dict_metadata", None), "NoneType where torch"),
}


class Called:
    def __reduce__(self) -> Any:
        return meta.MetadataIndex, ("weight",)


@pytest.mark.parametrize("name", WRONG)
def test_what_torch_does_not_write_is_refused(folder: Path, name: str) -> None:
    change, why = WRONG[name]
    changed(folder, change)
    with pytest.raises(ValueError, match=why) as raised:
        read_metadata(folder)
    assert str(raised.value).startswith(f"{folder / '.metadata'} ")


@pytest.mark.slow
def test_every_flipped_bit_is_refused_or_harmless(folder: Path) -> None:
    """Each raises ValueError, or reads something that has the form of metadata."""
    data = (folder / ".metadata").read_bytes()
    refused = 0
    for bit in range(0, 8 * len(data), 3):
        content = bytearray(data)
        content[bit // 8] ^= 1 << bit % 8
        (folder / ".metadata").write_bytes(content)
        try:
            read_metadata(folder)
        except ValueError:
            refused += 1
    assert refused > len(data)


@pytest.mark.parametrize("prepare", [prepared.with_object, prepared.with_tensor])
def test_prepared_objects_run_nothing(
    folder: Path, tmp_path: Path, prepare: Callable[[Path, Path], None]
) -> None:
    prepare(folder, tmp_path)
    with pytest.raises(ValueError, match="weights_only=True"):
        check_objects(folder)
    assert not prepared.harmed(tmp_path)


def test_a_damaged_object_is_noticed(folder: Path) -> None:
    """torch does not compare the sums in its own files."""
    (where,) = read_metadata(folder)
    file = folder / where.file
    content = bytearray(file.read_bytes())
    content[content.index(struct.pack(">d", 0.1), where.start) + 5] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"__0_0\.distcp has an object .* is damaged"):
        check_objects(folder)
