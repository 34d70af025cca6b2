"""Test that training recovers from extreme numbers in a few rounds (RecoveryContract)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_gc.compressors import Compressor, GTopK
from lightning_gc.core import Limits, Payload, Reply, Request
from lightning_gc.memories import MomentumCorrection
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.cases import broken, telling
from lightning_gc.testing.contracts.decoder import changed
from lightning_gc.testing.lockstep import Lockstep
from lightning_gc.transports.simulated import Simulated

_LARGEST = torch.finfo(torch.float32).max
SPIKES: dict[str, Callable[[Tensor], Tensor]] = {
    "one element of 1e38": lambda x: _with_one(x, 1e38),
    "one element of -3.4e38": lambda x: _with_one(x, -_LARGEST),
    "all of 1e38": lambda x: x.sign() * 1e38,
    "all of 3.4e38": lambda x: torch.full_like(x, _LARGEST),
    "one denormal": lambda x: _with_one(torch.zeros_like(x), 1e-45),
    "denormals": lambda x: x * 1e-40,
}
"""Transformations of an ordinary gradient; all results are finite in float32."""


SETTLED: dict[str, Callable[[Tensor], Tensor]] = {
    "normal numbers of 1e30": lambda x: x * 1e30,
    "all of 1e30": lambda x: torch.full_like(x, 1e30),
    "signs of 1e30": lambda x: x.sign() * 1e30,
    "one element of 1e30": lambda x: _with_one(torch.zeros_like(x), 1e30),
    "1e30 beside 1e-38": lambda x: torch.where(x > 0, x * 1e30, x * 1e-38),
    "all of 1e-45": lambda x: torch.full_like(x, 1e-45),
}
"""Gradients that leave float32 in no sum over elements, workers and rounds."""


class RecoveryContract:
    """Tests that no number, once met, stays for ever. Part of ``CompressorContract``.

    Each compressor has the memory that it has by default.

    Attributes:
        crowds: numbers of workers for which finite gradients have finite means and errors.
    """

    crowds: tuple[int, ...] = (1, 2, 4)

    def test_8_recovers_from_finite_spikes(self, compressor: Compressor) -> None:
        """On one worker, and on both twice in a row."""
        for kind, spike in SPIKES.items():
            for rounds, workers in ((1, 1), (2, 2)):
                given = spikes(spike, rounds=rounds, workers=workers)
                on = f"{kind} on {workers} of 2 workers, {rounds} times in a row"
                with telling(compressor, "law 8", on):
                    recovers(compressor, Lockstep(2, compressor), given, on)

    def test_8_finite_in_finite_out(self, compressor: Compressor) -> None:
        """Up to 1e30. Beyond, an error may leave float32 only together with the mean."""
        for kind, change in (SETTLED | SPIKES).items():
            for workers in self.crowds:
                lockstep = Lockstep(workers, compressor)
                for step in range(2):
                    given = [
                        {name: change(tensor) for name, tensor in named.items()}
                        for named in ordinary(workers, step)
                    ]
                    on = f"{kind} on {workers} workers, in round {step}"
                    stays_finite(compressor, lockstep, given, on, means=kind in SETTLED)

    def test_8_recovers_from_a_liar(self, compressor: Compressor) -> None:
        """Worker 1 of three floods one message with one number, or is named."""
        for value in (float("nan"), float("inf"), _LARGEST):
            for message in range(3):
                lockstep = Lockstep(3, compressor)
                lockstep.transport = Flooding(3, 1, message, value)
                on = f"{value} in all of message {message} of worker 1 of 3"
                try:
                    rounds = [ordinary(3, step) for step in range(3)]
                    recovers(compressor, lockstep, rounds, on)
                except ValueError as error:
                    what = f"only worker 1 lied, and the refusal does not name it: {str(error)!r}"
                    is_named = "orker 1 " in str(error)
                    assert is_named, broken(compressor, "law 8", what, on)


class Flooding(Simulated):
    """Simulated workers; one of them fills a single message with one number.

    Args:
        workers: W.
        liar: the worker.
        message: how many messages go before it.
        value: the number, in all floating tensors.
    """

    def __init__(self, workers: int, liar: int, message: int, value: float) -> None:
        super().__init__(workers)
        self.liar = liar
        self.before = message
        self.value = value

    def fulfil(self, requests: Sequence[Request]) -> list[Reply]:
        sent = list(requests)
        if self.before == 0:
            sent[self.liar] = changed(sent[self.liar], self._filled)
        self.before -= 1
        return super().fulfil(sent)

    def _filled(self, payload: Payload, limits: Limits | None) -> Payload:
        number = torch.tensor(self.value)
        return tuple(
            number.to(t.dtype).expand_as(t).clone() if t.is_floating_point() else t for t in payload
        )


def recovers(
    who: Compressor, lockstep: Lockstep, rounds: Sequence[list[cases.Named]], on: str
) -> None:
    """Assert that state stays finite in these rounds, and that results become so.

    They may take two ordinary rounds for it. They may take a dozen where momentum adds up a spike,
    and where a tenth of a spike is sent in each round and added before it is divided by W.
    """
    first = lockstep.engines[0]
    slow = isinstance(first.memory, MomentumCorrection) or isinstance(who, GTopK)
    calm = 12 if slow else 2
    for given in (*rounds, *(ordinary(first.workers, step) for step in range(calm))):
        result = lockstep.step(given)
        what = "an error or another kept tensor is not finite"
        assert cases.finite_state(lockstep), broken(who, "law 8", what, on)
    what = f"results are not finite {calm} ordinary rounds later"
    finite = all(mean.isfinite().all() for mean in result.mean.values())
    assert finite, broken(who, "law 8", what, on)


def stays_finite(
    who: Compressor, lockstep: Lockstep, given: list[cases.Named], on: str, *, means: bool
) -> None:
    """Assert that a round leaves finite state, and finite errors of each finite mean."""
    with telling(who, "law 8", on):
        result = lockstep.step(given)
    what = "an error or another kept tensor is not finite"
    assert cases.finite_state(lockstep), broken(who, "law 8", what, on)
    for name, mean in result.mean.items():
        finite = bool(mean.isfinite().all())
        what = f"the gradients of {name} are finite, their mean is not"
        assert finite or not means, broken(who, "law 8", what, on)
        errors = [error[name] for error in result.errors if name in error]
        what = f"the mean of {name} is finite, an error is not"
        kept = not finite or all(error.isfinite().all() for error in errors)
        assert kept, broken(who, "law 8", what, on)


def ordinary(workers: int, step: int) -> list[cases.Named]:
    """Return a random gradient of two shapes per worker."""
    return [{n: g[n] for n in ("bias", "matrix")} for g in cases.gradients(workers, step)]


def spikes(spike: Callable[[Tensor], Tensor], rounds: int, workers: int) -> list[list[cases.Named]]:
    """Return two workers' gradients in an ordinary round, then spikes on some of the workers."""
    made = [ordinary(2, step) for step in range(1 + rounds)]
    for given in made[1:]:
        for named in given[-workers:]:
            named |= {name: spike(tensor) for name, tensor in named.items()}
    return made


def _with_one(x: Tensor, value: float) -> Tensor:
    changed = x.clone()
    changed.view(-1)[x.numel() // 2] = value
    return changed
