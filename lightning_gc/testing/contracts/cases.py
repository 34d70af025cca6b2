"""Define the contracts' test cases: shapes, gradients, conservation gap, parametrisation."""

import contextlib
import itertools
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gc.compressors import Compressor
from lightning_gc.core import Bucket
from lightning_gc.testing.lockstep import Lockstep, Round

SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (17, 13),
    "conv": (4, 3, 3, 3),
    "bias": (19,),
    "scalar": (),
    "prime": (101,),
    "smaller_than_workers": (2,),
}
EMPTY: tuple[tuple[int, ...], ...] = ((0,), (0, 5), (3, 0))
WORKERS = (1, 2, 3, 4)
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative. In bfloat16 the mean itself is rounded, as in plain DDP."""

Named = dict[str, Tensor]


def generator(seed: int) -> torch.Generator:
    """Return a private random generator."""
    return torch.Generator().manual_seed(seed)


def tensors(numel: int) -> dict[str, Tensor]:
    """Return flat tensors that are hard to compress, by name."""
    g = generator(numel)
    normal = torch.randn(numel, generator=g)
    heavy = normal / torch.rand(numel, generator=g).clamp_min(1e-6)
    one = torch.zeros(numel)
    one[numel // 2] = -3.0
    return {
        "normal": normal,
        "heavy tails": heavy,
        "all negative": -normal.abs() - 0.1,
        "constant": torch.full((numel,), 0.7),
        "one element": one,
        "zeros": torch.zeros(numel),
        "tiny": normal * 1e-30,
        "huge": normal * 1e30,
    }


def bucket_of(flat: Tensor, *, step: int = 0, worker: int = 0, workers: int = 1) -> Bucket:
    """Return the bucket of one parameter called "w"."""
    shapes = {"w": shape_of(flat.numel())}
    return Bucket(flat, shapes, step=step, seed=1, worker=worker, workers=workers)


def gradients(
    workers: int, step: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> list[Named]:
    """Return one random gradient of all shapes per worker, in reverse order in odd steps.

    DDP also changes a bucket's order after the first step.
    """
    g = generator(1000 * step + workers)
    made = [
        {n: (torch.randn(s, generator=g) * scale).to(dtype) for n, s in SHAPES.items()}
        for _ in range(workers)
    ]
    return [dict(reversed(named.items())) for named in made] if step % 2 else made


def flat(named: Mapping[str, Tensor]) -> Tensor:
    """Return all elements in one float64 vector, in the order of ``SHAPES``."""
    return torch.cat([named[name].double().reshape(-1) for name in SHAPES])


def mean(all_named: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return the mean over workers, flat, in float64."""
    return torch.stack([flat(named) for named in all_named]).mean(0)


def lost(lockstep: Lockstep, steps: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the relative amount of gradient that is neither applied nor in errors.

    ``‖Σ mean_t + mean error_T − Σ mean gradient_t‖ / ‖Σ mean gradient_t‖``; without a memory errors
    are dropped at each step, so they are summed over steps too.
    """
    applied = given = torch.zeros(())
    dropped: list[Tensor] = []
    remembers = bool(lockstep.engines[0].memory.buffers)
    for step in range(steps):
        made = gradients(len(lockstep.engines), step, dtype)
        result: Round = lockstep.step(made)
        applied = applied + flat(result.mean)
        given = given + mean(made)
        dropped = [mean(result.errors)] if remembers else [*dropped, mean(result.errors)]
    gap = applied + torch.stack(dropped).sum(0) - given
    return float(gap.norm() / given.norm())


def finite_state(lockstep: Lockstep) -> bool:
    """Return whether all tensors that the engines keep are finite."""
    kept = (engine.state_dict() for engine in lockstep.engines)
    return all(tensor.isfinite().all() for state in kept for tensor in _leaves(state))


def _leaves(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for each in state.values():
            yield from _leaves(each)


def excess(errors: Sequence[Tensor], allowed: float, rounding: float) -> str | None:
    """Return in words that the mean of squared errors is above ``allowed``, by over 4 sigma.

    None if it is not.
    """
    measured = torch.stack(list(errors))
    slack = 4 * float(measured.std(correction=0)) / math.sqrt(len(errors))
    mean = float(measured.mean())
    if mean <= allowed * (1 + rounding) + slack:
        return None
    draws = f", the mean of {len(errors)} draws" if len(errors) > 1 else ""
    return f"the squared error is {mean:.6g}{draws}, where bound() allows {allowed:.6g}"


def unbiased(draw: Callable[[int], Tensor], wanted: Tensor, draws: int) -> bool:
    """Return whether the mean over draws is ``wanted`` along random directions, up to 4 sigma."""
    directions = torch.randn(wanted.numel(), 16, generator=generator(3), dtype=torch.float64).sign()
    made = [draw(i).double().view(-1) @ directions for i in range(draws)]
    projected = torch.stack(made)  # (draws, 16)
    gap = (projected.mean(0) - wanted.double().view(-1) @ directions).abs()
    return bool((gap <= 4 * projected.std(0) / draws**0.5 + 1e-4).all())


def turns(compressor: Compressor, size: Callable[[Any], int], most: float = math.inf) -> None:
    """Assert that the knob, up to ``most``, moves ``size`` as it declares, and is clamped."""
    knob = compressor.knob
    if knob is None:
        given = f"it has no knob, but its level is {compressor.level!r}, not None"
        assert compressor.level is None, broken(compressor, "law 4", given)
        return
    high = min(knob.high, most)
    levels = [knob.low, (knob.low * high) ** 0.5, high]
    turned = [compressor.at(level) for level in levels]
    for level, at in zip(levels, turned, strict=True):
        given = f"at({level:g}) has the level {at.level!r}, where {knob.clamp(level)!r} was asked"
        assert at.level == knob.clamp(level), broken(compressor, "law 4", given)
    sizes = [size(t) for t in turned]
    given = (
        f"Knob({knob.field!r}, more={knob.more!r}) at {', '.join(f'{t.level:g}' for t in turned)} "
        f"makes payloads of {', '.join(map(str, sizes))} bytes"
    )
    ordered = sorted(sizes, reverse=knob.more == "compression")
    assert sizes == ordered, broken(compressor, "law 4", f"{given}: the other direction")
    assert sizes[0] != sizes[-1], broken(compressor, "law 4", f"{given}: it moves nothing")
    given = f"at({knob.high * 10:g}) is not clamped to {knob.clamp(knob.high)!r}"
    clamped = compressor.at(knob.high * 10).level == knob.clamp(knob.high)
    assert clamped, broken(compressor, "law 4", given)


def private(compressor: Compressor, run: Callable[[int], Sequence[Tensor]]) -> None:
    """Assert that equal seeds or steps give equal tensors, without the global generator."""
    state = torch.get_rng_state()
    first = run(7)
    torch.rand(3)
    again = run(7)
    torch.set_rng_state(state)
    run(8)
    drew = "it drew from torch's global generator; draw from bucket.generator(shared=...)"
    assert torch.equal(torch.get_rng_state(), state), broken(compressor, "law 6", drew)
    for a, b in zip(first, again, strict=True):
        difference = unequal(a, b) if a.shape == b.shape else "their lengths differ"
        given = f"the same step with the same seed gave other tensors: {difference}"
        assert difference is None, broken(compressor, "law 6", given)


def parametrize(metafunc: Any, **choices: Iterable[Any]) -> None:
    """Parametrise a test over the product of those choices that are its arguments."""
    asked = {name: list(c) for name, c in choices.items() if name in metafunc.fixturenames}
    if asked:
        rows = list(itertools.product(*asked.values()))
        metafunc.parametrize(list(asked), rows, ids=["-".join(map(label, row)) for row in rows])


def label(value: Any) -> str:
    """Return a short test id of a value."""
    return str(value).replace(" ", "").replace("torch.", "")


EXCHANGE = "a law of exchanges"
"""Laws of whole rounds between workers have no numbers."""


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
    """Say of an exception which law was tested, and for which input.

    A ValueError of ours refuses a payload that nobody has damaged here, so the law is broken. An
    exception of the instance's own code gets a note.
    """
    try:
        yield
    except Exception as error:
        *_, (last, _) = traceback.walk_tb(error.__traceback__)
        module = last.f_globals.get("__name__", "")
        refused = isinstance(error, ValueError) and module.startswith("lightning_gc.")
        what = f"a message that nothing has damaged is refused: {error}".removesuffix(".")
        if refused and module != type(who).__module__:
            raise AssertionError(broken(who, law, what, on)) from error
        if " breaks " not in str(error):  # else it says so itself
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


MATRICES = {221: (17, 13), 4096: (64, 64)}


def shape_of(numel: int) -> tuple[int, ...]:
    """Return the shape of the parameter with this number of elements."""
    return MATRICES.get(numel, (numel,))
