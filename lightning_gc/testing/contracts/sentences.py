"""Sentences of a failing law: who breaks it, for which input, and what happened."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_gc.testing.contracts.shapes import shape_of

EXCHANGE = "a law of exchanges"
"""Those of whole rounds between workers have no numbers."""


def broken(who: object, law: str, what: str, on: str = "") -> str:
    """Return the sentence of a broken law.

    Args:
        who: the instance under test.
        law: such as ``law 1``.
        what: what happened, with the values.
        on: the input.
    """
    given = f" for {on}" if on else ""
    return f"{who!r} breaks {law}{given}: {what}."


def named(kind: str, numel: int) -> str:
    """Return the words for one of the tensors of ``cases.tensors``."""
    shape = shape_of(numel)
    sides = f", {' x '.join(map(str, shape))}" if len(shape) > 1 else ""
    return f"{kind!r} of {numel} element{'s' if numel > 1 else ''}{sides}"


@contextlib.contextmanager
def telling(who: object, law: str, on: str) -> Iterator[None]:
    """Add to an exception of the instance's own code which law was asked, for which input."""
    try:
        yield
    except AssertionError:
        raise  # it says so itself
    except Exception as error:
        error.add_note(f"Raised by {who!r} while {law} was tested for {on}.")
        raise


def apart(
    found: Tensor, wanted: Tensor, rtol: float, atol: float, exactly: bool = False
) -> str | None:
    """Return where two tensors differ most, in words; None if they are equal up to rounding."""
    one, other = found.detach().double().view(-1), wanted.detach().double().view(-1)
    same = one == other if exactly else torch.isclose(one, other, rtol=rtol, atol=atol)
    if bool(same.all()):
        return None
    gap = (one - other).abs().nan_to_num(nan=float("inf")).masked_fill(same, -1.0)
    at = int(gap.argmax())
    return (
        f"element {at} is {float(one[at]):.6g} where it should be {float(other[at]):.6g}, and "
        f"{int((~same).sum()):,} of {same.numel():,} elements differ"
    )


def unequal(found: Tensor, wanted: Tensor) -> str | None:
    """Return where two tensors that should be equal bit for bit differ, in words, else None."""
    return apart(found, wanted, 0.0, 0.0, exactly=True)
