"""Files that somebody has prepared: whoever unpickles them leaves a mark."""

import pickle
from pathlib import Path
from typing import Any

import torch

MARK = "harm"


class Evil:
    """What unpickles as a call that creates a file.

    Args:
        folder: where that file then is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return Path.touch, (self.folder / MARK,)


def harmed(folder: Path) -> bool:
    """Return whether code has run."""
    return (folder / MARK).exists()


def pickled(path: Path, folder: Path) -> None:
    """Write a pickle that runs code."""
    path.write_bytes(pickle.dumps(Evil(folder)))


def saved(path: Path, folder: Path, **content: Any) -> None:
    """Write a file of torch's with code beside what it should have."""
    torch.save(content | {"harm": Evil(folder)}, path)


def with_object(folder: Path, harm: Path) -> None:
    """Give a distributed checkpoint an object that torch's planner unpickles."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - our own
    kinds = metadata.state_dict_metadata
    index = next(i for i in metadata.storage_data if "Bytes" in type(kinds[i.fqn]).__name__)
    place = metadata.storage_data[index]
    file = folder / place.relative_path
    before = file.stat().st_size
    with file.open("ab") as end:
        torch.save(Evil(harm), end)
    place.offset, place.length = before, file.stat().st_size - before
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def with_tensor(folder: Path, harm: Path) -> None:
    """Put code where a distributed checkpoint has a tensor."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - our own
    for place in metadata.storage_data.values():
        file = folder / place.relative_path
        before = file.stat().st_size
        with file.open("ab") as end:
            torch.save(Evil(harm), end)
        place.offset, place.length = before, file.stat().st_size - before
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
