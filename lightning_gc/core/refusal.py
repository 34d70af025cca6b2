"""Refuse a value in a sentence: class, value, rule and fix."""

from __future__ import annotations

from typing import Any, Never


def refuse(owner: object, why: str = "", /, **given: Any) -> Never:
    """Raise ``ValueError`` in a sentence: owner, values, rule and fix.

    Args:
        owner: what was called: its name, or the instance that is refused. Without ``why`` it is the
            whole sentence.
        why: the rule and the fix. A full stop is added.
        **given: the arguments that are refused. Without any an instance is shown with all fields.

    Example:
        >>> from lightning_gc.core.refusal import refuse
        >>> refuse("Budget", "a share of the time, such as 0.1", share=2.0)
        Traceback (most recent call last):
        ValueError: Budget(share=2.0): a share of the time, such as 0.1.
    """
    said = owner if isinstance(owner, str) else type(owner).__name__ if given else repr(owner)
    if given:
        said = f"{said}({', '.join(f'{name}={value!r}' for name, value in given.items())})"
    raise ValueError(f"{said}: {why}." if why else f"{said}.")
