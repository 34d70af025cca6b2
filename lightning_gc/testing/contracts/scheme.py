"""Test the laws of schemes, one test each (SchemeContract)."""

from typing import Any

import torch

from lightning_gc.compressors import QSGD, Compressor, HardThreshold, Identity, RandomK, TopK
from lightning_gc.compressors.low_rank.powersgd import PowerSGD
from lightning_gc.core.settings import short
from lightning_gc.memories import ErrorFeedback
from lightning_gc.schemes import Scheme
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.cases import apart, broken, telling
from lightning_gc.testing.contracts.decoder import with_liar
from lightning_gc.testing.lockstep import Lockstep


class SchemeContract:
    """Tests schemes against their laws.

    Attributes:
        instances: schemes to test.
        compressors: to combine them with.
        examples: rounds with a worker that sends damaged payloads, per combination.

    Example:
        >>> from lightning_gc import TwoShot
        >>> from lightning_gc.testing.contracts import SchemeContract
        >>> class TestMine(SchemeContract):
        ...     instances = (TwoShot(),)
    """

    instances: tuple[Scheme, ...] = ()
    compressors: tuple[Compressor, ...] = (
        *(Identity(), TopK(0.1), RandomK(0.1)),
        *(HardThreshold(1.0), QSGD(4, 64)),
    )
    examples: int = 25

    def pytest_generate_tests(self, metafunc: Any) -> None:
        cases.parametrize(
            metafunc, scheme=self.instances, compressor=self.compressors, workers=cases.WORKERS
        )

    def test_1_what_a_scheme_rounds_away_is_booked(
        self, scheme: Scheme, compressor: Compressor, workers: int
    ) -> None:
        """Conservation over 20 steps with error feedback."""
        if fits(scheme, compressor):
            lockstep = Lockstep(workers, compressor, ErrorFeedback(), scheme)
            on = f"{compressor!r} and {workers} workers"
            with telling(scheme, "law 1", on):
                lost = cases.lost(lockstep, 20)
            what = f"after 20 steps {lost:.2g} of the gradient is neither applied nor in errors"
            assert lost < cases.TOLERANCE[torch.float32], broken(scheme, "law 1", what, on)

    def test_2_replicas_get_the_same_bits(
        self, scheme: Scheme, compressor: Compressor, workers: int
    ) -> None:
        """All workers have the same result, bit for bit (else ``Lockstep`` raises)."""
        if not fits(scheme, compressor):
            return
        lockstep = Lockstep(workers, compressor, None, scheme)
        on = f"{compressor!r}, {workers} workers"
        for step in range(3):
            what = f"the mean of step {step} is not finite"
            with telling(scheme, "law 2", on):
                result = lockstep.step(cases.gradients(workers, step))
            assert cases.flat(result.mean).isfinite().all(), broken(scheme, "law 2", what, on)

    def test_2_replicas_get_the_same_bits_of_a_liar(
        self, scheme: Scheme, compressor: Compressor
    ) -> None:
        if fits(scheme, compressor):
            who = (scheme, compressor)
            with_liar(who, lambda: Lockstep(3, compressor, ErrorFeedback(), scheme), self.examples)

    def test_2_without_compression_it_is_the_mean(self, scheme: Scheme, workers: int) -> None:
        """With ``Identity``, or ``TopK`` of all elements, any scheme returns the mean."""
        made = cases.gradients(workers, 0)
        all_of_it = Identity() if fits(scheme, Identity()) else TopK(1.0)
        on = f"{all_of_it!r} and {workers} workers"
        with telling(scheme, "law 2", on):
            result = Lockstep(workers, all_of_it, None, scheme).step(made)
        gap = apart(cases.flat(result.mean), cases.mean(made), rtol=1e-6, atol=1e-6)
        assert gap is None, broken(scheme, "law 2", f"the result is not the mean: {gap}", on)

    def test_3_refuses_what_cannot_work(self, scheme: Scheme, compressor: Compressor) -> None:
        message = refusal(scheme, compressor)
        if message is not None:
            says = short(compressor) in message and "use " in message.lower()
            what = f"its refusal names no compressor, or nothing to use instead: {message!r}"
            assert says, broken(scheme, "law 3", what, repr(compressor))

    def test_3_refuses_what_no_scheme_can(self, scheme: Scheme) -> None:
        """Collectives take no scheme; payloads that are not linear cannot be averaged."""
        said = refusal(scheme, PowerSGD(2)) or ""
        what = f"PowerSGD(2), which takes no scheme, is not refused as such, but with {said!r}"
        assert "no scheme" in said, broken(scheme, "law 3", what)
        what = "it averages payloads, but takes TopK(0.1), whose payloads have no mean"
        assert not (scheme.averages and fits(scheme, TopK(0.1))), broken(scheme, "law 3", what)


def refusal(scheme: Scheme, compressor: Compressor) -> str | None:
    """Return the message of the refused combination, or None if it is accepted."""
    try:
        Lockstep(2, compressor, None, scheme)
    except ValueError as error:
        return str(error)
    return None


def fits(scheme: Scheme, compressor: Compressor) -> bool:
    """Return whether the scheme can carry the compressor's payloads."""
    return refusal(scheme, compressor) is None
