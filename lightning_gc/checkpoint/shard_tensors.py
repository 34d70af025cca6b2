"""Shard tensors: cut tensors like parameters, and put a rank's part together from saved parts.

A parameter of shape ``(n, ...)`` has errors of that shape in each replica, and those of replicas
differ. A rank saves its own part; another mesh reads the parts that overlap its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_gc.checkpoint.distributed_metadata import (
    Chunk,
    Entry,
    chunks_of,
    read_metadata,
    read_tensor,
)
from lightning_gc.core.checksum import NAME as CHECKSUM
from lightning_gc.core.checksum import checksum
from lightning_gc.core.pytree import Tree
from lightning_gc.core.state_structure import TEXT, WHOLE, Listed, Record

Path_ = tuple[str, ...]
"""Where a tensor lies in a tree of nested dicts; one of the names is a parameter's."""

Shape = tuple[int, ...]
_T = TypeVar("_T")

_SHAPE = Listed(WHOLE)
PART = Record({"shape": _SHAPE, "offsets": _SHAPE, "sizes": _SHAPE, CHECKSUM: TEXT})
"""What a rank's file says of each of its tensors."""


class Part(NamedTuple):
    """A parameter's global shape, where a part of it begins, and the part's shape."""

    shape: Shape
    offsets: Shape
    sizes: Shape


def part_of(shape: Shape, local: Shape, dim: int, shard: int, shards: int) -> Part:
    """Return a rank's part of a parameter that FSDP2 has cut into ``shards`` along ``dim``."""
    begin = min(shard * math.ceil(shape[dim] / shards), shape[dim])
    return Part(shape, tuple(begin if d == dim else 0 for d in range(len(shape))), local)


def key_of(path: Path_) -> str:
    """Return a text for a path."""
    return json.dumps(path)


def path_of(key: str) -> Path_:
    """Return the path of a text.

    Raises:
        ValueError: it is not the text of one.
    """
    path = json.loads(key)
    Listed(TEXT).check(path, key)
    if not path:
        raise ValueError("an empty path")
    return tuple(path)


def described(path: Path_, tensor: Tensor, parts: Mapping[str, Part]) -> Tree:
    """Return what a file says of a tensor (``PART``)."""
    part = _found(path, parts)
    assert part is not None
    about = {name: list(value) for name, value in part._asdict().items()}
    return about | {CHECKSUM: checksum(tensor)}


class Assembly:
    """Puts a rank's part of every tensor together: of one replica, or the mean over several.

    Tensors that match no parameter of this model, or one of another shape, are kept by name: each
    is then a tensor without data, of the shape that was saved, replicas first.

    Args:
        parts: parameter name -> this rank's part.
        replicas: those to be read, in the order in which their parts are added.
    """

    def __init__(self, parts: Mapping[str, Part], replicas: range) -> None:
        self._parts, self._replicas = parts, replicas
        self._sums: dict[Path_, Tensor] = {}
        self._covered: dict[Path_, int] = {}
        self._unknown: dict[Path_, Tensor] = {}

    def add(
        self, path: Path_, part: Part, replica: int, saved: int, load: Callable[[], Tensor]
    ) -> None:
        """Add a replica's part of a tensor; call ``load`` only if it overlaps this rank's part.

        Args:
            path: of the tensor.
            part: which part it is.
            replica: whose; all parts of the first replica come first.
            saved: the number of replicas that have been saved.
            load: returns the part.
        """
        own = _found(path, self._parts)
        if own is None or own.shape != part.shape:
            self._unknown[path] = torch.empty((saved, *part.shape), device="meta")
            return
        if path not in self._sums:
            self._sums[path] = torch.zeros(own.sizes, dtype=torch.float32, device="cpu")
            self._covered[path] = 0
        here, there = [], []
        for begin, size, theirs, length in zip(
            own.offsets, own.sizes, part.offsets, part.sizes, strict=True
        ):
            first, last = max(begin, theirs), min(begin + size, theirs + length)
            if first >= last:
                return
            here.append(slice(first - begin, last - begin))
            there.append(slice(first - theirs, last - theirs))
        piece = load()[tuple(there)]
        target = self._sums[path][tuple(here)]
        if replica == self._replicas.start:
            target.copy_(piece)  # added to zeros, -0.0 would become 0.0
        else:
            target.add_(piece.float())
        self._covered[path] += target.numel()

    def mean(self) -> dict[Path_, Tensor]:
        """Return the mean over replicas of all that has been added, in float32.

        Raises:
            ValueError: a part is missing, or something is not finite.
        """
        replicas = len(self._replicas)
        for path, total in self._sums.items():
            needed = replicas * total.numel()
            if self._covered[path] != needed:
                raise ValueError(f"{'/'.join(path)} has {self._covered[path]} of {needed} elements")
            if not bool(total.isfinite().all()):
                raise ValueError(f"{'/'.join(path)} has NaN or infinity")
            if replicas > 1:
                total /= replicas
        return self._sums | self._unknown


def add_format_1(assembly: Assembly, folder: Path, replicas: range) -> None:
    """Add the tensors of a folder in which format 1 kept them.

    They are in a distributed checkpoint of torch's: a tensor ``(R, *shape)`` per path.

    Args:
        assembly: to add to.
        folder: of the checkpoint.
        replicas: those to be read.
    """
    for key, entry in sorted(read_metadata(folder).tensors.items()):
        path, (saved, *shape) = path_of(key), entry.size
        for replica, chunk in chunks_of(entry, replicas):
            if chunk.sizes[0] != 1:
                raise ValueError(f"{folder} has a part of {key} of several replicas")
            part = Part(tuple(shape), chunk.offsets[1:], chunk.sizes[1:])

            def load(entry: Entry = entry, chunk: Chunk = chunk) -> Tensor:
                return read_tensor(folder, entry, chunk)[0]

            assembly.add(path, part, replica, saved, load)


def taken_out(tree: Tree, names: Mapping[str, tuple[int, ...]]) -> tuple[dict[Path_, Tensor], Tree]:
    """Return the tensors that are shaped like parameters, by path, and the tree without them.

    Args:
        tree: nested dicts.
        names: parameter name -> shape of this rank's part.
    """
    tensors: dict[Path_, Tensor] = {}

    def rest(part: Tree, path: Path_) -> Tree:
        left: Tree = {}
        for name, value in part.items():
            here = (*path, name)
            if isinstance(value, dict):
                left[name] = rest(value, here)
            elif isinstance(value, Tensor) and _found(here, names) == tuple(value.shape):
                tensors[here] = value
            else:
                left[name] = value
        return left

    return tensors, rest(tree, ())


def put_back(tree: Tree, tensors: Mapping[Path_, Tensor]) -> Tree:
    """Return ``tree`` with tensors at their paths; dicts on the way are changed in place."""
    for path, tensor in tensors.items():
        part = tree
        for name in path[:-1]:
            part = part.setdefault(name, {})
        part[path[-1]] = tensor
    return tree


def _found(path: Path_, names: Mapping[str, _T]) -> _T | None:
    """Return what a mapping has for the parameter whose name is in the path."""
    return next((names[name] for name in path if name in names), None)
