"""Checksum: SHA-256 of saved state, over its names and values and not over a file's encoding.

So it can lie within the state itself, in a file of any format, written by any CheckpointIO.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_gc.core.pytree import Tree

NAME = "sha256"


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...


def checksum(value: Any) -> str:
    """Return the SHA-256 of nested dicts and lists of tensors, numbers, texts and None.

    The order of a dict's names does not count; shapes, dtypes and every bit of a tensor do.

    Raises:
        ValueError: anything else, which a checkpoint cannot hold without pickled code.

    Example:
        >>> checksum({"a": 1, "b": [2.0]}) == checksum({"b": [2.0], "a": 1})
        True
        >>> checksum({"a": 1}) == checksum({"a": 1.0})
        False
    """
    digest = hashlib.sha256()
    _add(digest, value)
    return digest.hexdigest()


def with_checksum(state: Tree) -> Tree:
    """Return ``state`` and, under ``"sha256"``, its checksum."""
    return state | {NAME: checksum(state)}


def check_checksum(state: Mapping[str, Any]) -> None:
    """Raise ValueError if the content of ``with_checksum`` has changed."""
    content = {name: value for name, value in state.items() if name != NAME}
    if state.get(NAME) != checksum(content):
        raise ValueError("its content does not have the checksum that it was saved with")


def _add(digest: _Hash, value: Any) -> None:
    """Add a value, preceded by its kind and length, so that no two values read alike."""
    if isinstance(value, dict):
        digest.update(f"dict {len(value)};".encode())
        for name in sorted(value, key=repr):
            _add(digest, name)
            _add(digest, value[name])
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)};".encode())
        for each in value:
            _add(digest, each)
    elif isinstance(value, Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    elif value is None or isinstance(value, bool | int | float | str):
        text = _in_words(value).encode()
        digest.update(f"{len(text)};".encode() + text)
    else:
        raise ValueError(
            f"State can hold tensors, numbers, texts, lists and dicts only, but it has {value!r} "
            f"of {type(value).__name__}; keep it as one of these."
        )


def _in_words(value: bool | int | float | str | None) -> str:
    # Subclasses, such as NumPy's numbers, come back from a file as the plain type.
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return f"{kind.__name__} {kind(value)!r}"
    return "None"
