"""SchemeContract: the laws of schemes, one test each."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gc.compressors import (
    QSGD,
    Compressor,
    HardThreshold,
    Identity,
    PowerSGD,
    RandomK,
    TopK,
)
from lightning_gc.memories import Residual
from lightning_gc.schemes import Scheme
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.damaged_payloads import Lying
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
        Identity(),
        TopK(0.1),
        RandomK(0.1),
        HardThreshold(1.0),
        QSGD(4, 64),
    )
    examples: int = 25

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrise over instances, compressors and numbers of workers."""
        cases.parametrize(
            metafunc, scheme=self.instances, compressor=self.compressors, workers=cases.WORKERS
        )

    def test_1_what_a_scheme_rounds_away_is_booked(
        self, scheme: Scheme, compressor: Compressor, workers: int
    ) -> None:
        """Conservation over 20 steps with error feedback."""
        if not fits(scheme, compressor):
            return
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
        """If one of three workers sends damaged payloads, an error names it or all results agree.

        Errors stay finite.
        """
        if not fits(scheme, compressor):
            return

        @settings(max_examples=self.examples, derandomize=True, database=None, deadline=None)
        @given(st.data())
        def hold(data: st.DataObject) -> None:
            lockstep = Lockstep(3, compressor, Residual(), scheme)
            liar = data.draw(st.integers(0, 2), label="liar")
            small = [{n: g[n] for n in ("bias", "conv")} for g in cases.gradients(3, 0)]
            lockstep.transport = Lying(3, liar, data)
            said = ""
            try:
                lockstep.step(small)
            except ValueError as error:
                said = str(error)
            assert not said or f"orker {liar} " in said
            for engine in lockstep.engines:
                assert all(error.isfinite().all() for error in engine.errors().values())

        hold()

    def test_2_without_compression_it_is_the_mean(self, scheme: Scheme, workers: int) -> None:
        """With ``Identity``, or ``TopK`` of all elements, any scheme returns the mean."""
        made = cases.gradients(workers, 0)
        all_of_it = Identity() if fits(scheme, Identity()) else TopK(1.0)
        result = Lockstep(workers, all_of_it, None, scheme).step(made)
        torch.testing.assert_close(cases.flat(result.mean), cases.mean(made), rtol=1e-6, atol=1e-6)

    def test_3_refuses_what_cannot_work(self, scheme: Scheme, compressor: Compressor) -> None:
        """Combinations that ``check`` refuses are refused at construction, with a fix."""
        if fits(scheme, compressor):
            return
        message = refusal(scheme, compressor)
        assert message is not None, f"{scheme!r} accepted {compressor!r}"
        assert repr(compressor) in message
        assert "Use " in message

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
    try:
        scheme.check(compressor)
    except ValueError:
        return False
    return True
