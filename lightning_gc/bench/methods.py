"""Methods to measure, from the command line: names of the file's, or ``topk:density=0.01``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

import lightning_gc
from lightning_gc.tuning.method import Method

DEFAULT = ("cast", "qsgd", "topk", "topk:value_dtype=bfloat16,scheme=sparse_reduce")


def select_methods(words: Sequence[str], known: Mapping[str, Method]) -> dict[str, Method]:
    """Return the methods that words name, and refuse those that cannot work.

    Args:
        words: each a method of the file, a compressor's name, or ``name:field=value,...``, where
            ``memory`` and ``scheme`` may stand among the fields.
        known: the methods of the file.

    Raises:
        ValueError: an unknown name or field, a value or combination that is refused, local steps.
    """
    methods = {word: known.get(word) or parse_method(word) for word in words}
    for word, method in methods.items():
        if method.rounds is not None or method.rounds_space:
            raise ValueError(
                f"{word} has local steps (rounds): most of its steps exchange nothing, so that "
                f"single ones tell little. Leave it out here; lightning-gc tune compares it."
            )
        make_strategy(method)
    return methods


def parse_method(word: str) -> Method:
    """Parse ``name:field=value,...``."""
    name, _, rest = word.partition(":")
    fields: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        field, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{word!r}: write a compressor's fields as topk:density=0.01.")
        fields[field.strip()] = yaml.safe_load(value)
    parts = {kind: fields.pop(kind) for kind in ("memory", "scheme") if kind in fields}
    return Method(word, name, fixed=fields, **parts)


def make_strategy(method: Method, **settings: Any) -> Any:
    """Return a new strategy of a method; fields that are not fixed have their defaults."""
    return lightning_gc.CompressedDDPStrategy(
        method.make_compressor({}),
        memory=method.memory,
        scheme=method.scheme,
        controller=method.controller,
        **settings,
    )
