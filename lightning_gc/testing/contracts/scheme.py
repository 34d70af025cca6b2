"""SchemeContract: the laws of schemes, one test each."""

from __future__ import annotations

from typing import Any

import torch

from lightning_gc.compressors import QSGD, Compressor, HardThreshold, Identity, RandomK, TopK
from lightning_gc.compressors.low_rank.powersgd import PowerSGD
from lightning_gc.memories import Residual
from lightning_gc.schemes import Scheme
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.damaged_payloads import with_liar
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
            lockstep = Lockstep(workers, compressor, Residual(), scheme)
            assert cases.lost(lockstep, 20) < cases.TOLERANCE[torch.float32]

    def test_2_replicas_get_the_same_bits(
        self, scheme: Scheme, compressor: Compressor, workers: int
    ) -> None:
        """All workers have the same result, bit for bit (else ``Lockstep`` raises)."""
        if not fits(scheme, compressor):
            return
        lockstep = Lockstep(workers, compressor, None, scheme)
        for step in range(3):
            result = lockstep.step(cases.gradients(workers, step))
            assert cases.flat(result.mean).isfinite().all()

    def test_2_replicas_get_the_same_bits_of_a_liar(
        self, scheme: Scheme, compressor: Compressor
    ) -> None:
        if fits(scheme, compressor):
            with_liar(lambda: Lockstep(3, compressor, Residual(), scheme), self.examples)

    def test_2_without_compression_it_is_the_mean(self, scheme: Scheme, workers: int) -> None:
        """With ``Identity``, or ``TopK`` of all elements, any scheme returns the mean."""
        made = cases.gradients(workers, 0)
        all_of_it = Identity() if fits(scheme, Identity()) else TopK(1.0)
        result = Lockstep(workers, all_of_it, None, scheme).step(made)
        torch.testing.assert_close(cases.flat(result.mean), cases.mean(made), rtol=1e-6, atol=1e-6)

    def test_3_refuses_what_cannot_work(self, scheme: Scheme, compressor: Compressor) -> None:
        message = refusal(scheme, compressor)
        if message is not None:
            assert repr(compressor) in message
            assert "use " in message.lower()

    def test_3_refuses_what_no_scheme_can(self, scheme: Scheme) -> None:
        """Collectives take no scheme; payloads that are not linear cannot be averaged."""
        assert "no scheme" in (refusal(scheme, PowerSGD(2)) or "")
        assert not (scheme.averages and fits(scheme, TopK(0.1)))


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
