"""Assemble a rank's part of each error tensor from the parts that other meshes have saved.

A parameter of shape ``(n, ...)`` has an error of that shape in each replica, and replicas' errors
differ. Each rank saves its part. On another mesh a rank reads the parts that overlap its own.
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
"""Path of a tensor in a tree of nested dicts; one of its names is a parameter's."""

Shape = tuple[int, ...]
_T = TypeVar("_T")

_SHAPE = Listed(WHOLE)
PART = Record({"shape": _SHAPE, "offsets": _SHAPE, "sizes": _SHAPE, CHECKSUM: TEXT})
"""Structure of a rank's entry for each of its tensors."""


class Part(NamedTuple):
    """A part of a parameter: the parameter's global shape, the part's offsets and shape."""

    shape: Shape
    offsets: Shape
    sizes: Shape


def part_of(shape: Shape, local: Shape, dim: int, shard: int, shards: int) -> Part:
    """Return a rank's part of a parameter that FSDP2 has cut into ``shards`` along ``dim``."""
    begin = min(shard * math.ceil(shape[dim] / shards), shape[dim])
    return Part(shape, tuple(begin if d == dim else 0 for d in range(len(shape))), local)


def key_of(path: Path_) -> str:
    """Return a path as text."""
    return json.dumps(path)


def path_of(key: str) -> Path_:
    """Return the path from its text.

    Raises:
        ValueError: ``key`` is not the text of a path.
    """
    path = json.loads(key)
    Listed(TEXT).check(path, key)
    if not path:
        raise ValueError("an empty path")
    return tuple(path)


def described(path: Path_, tensor: Tensor, parts: Mapping[str, Part]) -> Tree:
    """Return a file's entry for a tensor (``PART``)."""
    part = _found(path, parts)
    assert part is not None
    about = {name: list(value) for name, value in part._asdict().items()}
    return about | {CHECKSUM: checksum(tensor)}


class Assembly:
    """Assemble a rank's part of every tensor, from one replica or as the mean over several.

    A saved tensor may match no parameter of this model, or one of another shape. It is then kept
    by name, as a tensor without data of shape ``(R, *shape)``.

    Args:
        parts: parameter name -> this rank's part.
        replicas: replicas to read, in the order in which their parts are added.
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
            path: path of the tensor.
            part: position of the part.
            replica: index of its replica. All parts of the first replica come first.
            saved: number of saved replicas.
            load: returns the part's tensor.
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
            target.copy_(piece)  # adding to zeros would turn -0.0 into 0.0
        else:
            target.add_(piece.float())
        self._covered[path] += target.numel()

    def mean(self) -> dict[Path_, Tensor]:
        """Return the mean over replicas of each added tensor, in float32.

        Raises:
            ValueError: a part is missing, or an element is not finite.
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
    """Add the tensors of a checkpoint of format 1.

    They are in a distributed checkpoint of torch: a tensor ``(R, *shape)`` per path.

    Args:
        assembly: receives the tensors.
        folder: folder of the distributed checkpoint.
        replicas: replicas to read.
    """
    for key, entry in sorted(read_metadata(folder).tensors.items()):
        path, (saved, *shape) = path_of(key), entry.size
        for replica, chunk in chunks_of(entry, replicas):
            if chunk.sizes[0] != 1:
                raise ValueError(f"{folder} has a part of {key} that covers several replicas")
            part = Part(tuple(shape), chunk.offsets[1:], chunk.sizes[1:])

            def load(entry: Entry = entry, chunk: Chunk = chunk) -> Tensor:
                return read_tensor(folder, entry, chunk)[0]

            assembly.add(path, part, replica, saved, load)


def taken_out(tree: Tree, names: Mapping[str, tuple[int, ...]]) -> tuple[dict[Path_, Tensor], Tree]:
    """Return the parameter-shaped tensors of a tree by path, and the tree without them.

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
    """Put tensors into ``tree`` at their paths, in place, and return it."""
    for path, tensor in tensors.items():
        part = tree
        for name in path[:-1]:
            part = part.setdefault(name, {})
        part[path[-1]] = tensor
    return tree


def _found(path: Path_, names: Mapping[str, _T]) -> _T | None:
    """Return the mapping's value for the parameter name in the path; None if it has none."""
    return next((names[name] for name in path if name in names), None)
