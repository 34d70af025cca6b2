"""CollectiveContract: laws of compressors that run their own communication, one test each."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gc.compressors import Collective, Compressor
from lightning_gc.memories import NoMemory
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.damaged_payloads import Lying
from lightning_gc.testing.lockstep import Lockstep

SHAPE = (17, 13)


class CollectiveContract:
    """Tests compressors that run their own communication. Part of ``CompressorContract``.

    Attributes:
        instances: compressors to test, without the codecs among them.
        conversations: number of rounds with a worker that sends damaged payloads.
    """

    instances: tuple[Compressor, ...] = ()
    conversations: int = 25

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrise over collectives and numbers of workers."""
        collectives = [c for c in self.instances if isinstance(c.method, Collective)]
        cases.parametrize(metafunc, collective=collectives, several=(1, 2, 3))

    def test_collective_1_takes_and_leaves_the_rest(
        self, collective: Compressor, several: int
    ) -> None:
        """The result plus the mean error is the mean gradient."""
        if not collective.traits.conserves:
            return
        for kind in ("normal", "heavy tails", "constant", "one element", "zeros", "tiny"):
            given_ = [cases.tensors(221)[kind].roll(i).view(SHAPE) for i in range(several)]
            mean, errors = exchanged(collective, given_)
            wanted = torch.stack(given_).double().mean(0)
            left = torch.stack(errors).double().mean(0)
            scale = 1e-5 * float(torch.stack(given_).abs().max())
            torch.testing.assert_close(
                mean.double() + left, wanted, rtol=1e-4, atol=scale, msg=kind
            )

    def test_collective_3_keeps_its_bound(self, collective: Compressor) -> None:
        """With one worker, the mean squared error over draws is within ``bound``, up to 4 sigma."""
        for kind, flat in cases.tensors(221).items():
            allowed = collective.bound(221).allowed(float(flat.double().square().sum()))
            errors = [
                exchanged(collective, [flat.view(SHAPE)], seed)[1][0].double().square().sum()
                for seed in range(24)
            ]
            measured = torch.stack(errors)
            slack = 4 * float(measured.std(correction=0)) / len(errors) ** 0.5
            assert float(measured.mean()) <= allowed * (1 + 1e-4) + slack, kind

    def test_collective_3_unbiased_if_declared(self, collective: Compressor) -> None:
        """Along random directions, the mean over draws is the mean gradient's, up to 4 sigma."""
        if not collective.traits.unbiased:
            return
        flat = cases.tensors(221)["normal"]
        given_ = [flat.view(SHAPE), flat.flip(0).view(SHAPE)]
        directions = torch.randn(221, 16, generator=cases.generator(3), dtype=torch.float64).sign()
        draws = [
            exchanged(collective, given_, seed)[0].double().view(-1) @ directions
            for seed in range(200)
        ]
        projected = torch.stack(draws)
        wanted = torch.stack(given_).double().mean(0).view(-1) @ directions
        assert ((projected.mean(0) - wanted).abs() <= 4 * projected.std(0) / 200**0.5 + 1e-4).all()

    def test_collective_4_knob_moves_bytes_in_its_direction(self, collective: Compressor) -> None:
        """From ``low`` to ``high`` messages only grow, or only shrink, as the knob declares."""
        knob = collective.knob
        if knob is None:
            assert collective.level is None
            return
        gradient = torch.randn(64, 64, generator=cases.generator(4))
        sizes = []
        for level in (knob.low, (knob.low * min(knob.high, 16)) ** 0.5, min(knob.high, 16)):
            turned = collective.at(level)
            assert turned.level == knob.clamp(level)
            lockstep = Lockstep(2, turned, NoMemory())
            sizes.append(lockstep.step([{"w": gradient}, {"w": gradient}]).wire_bytes[0])
        assert sizes == sorted(sizes, reverse=knob.more == "compression")
        assert sizes[0] != sizes[-1]
        assert collective.at(knob.high * 10).level == knob.clamp(knob.high)

    def test_collective_6_randomness_is_private(self, collective: Compressor) -> None:
        """Equal seeds give equal results; the global generator is not touched."""
        gradient = cases.tensors(221)["normal"].view(SHAPE)
        state = torch.get_rng_state()
        first = exchanged(collective, [gradient, -2 * gradient], 7)
        torch.rand(3)
        again = exchanged(collective, [gradient, -2 * gradient], 7)
        torch.set_rng_state(state)
        exchanged(collective, [gradient, -2 * gradient], 8)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(first[0], again[0])
        assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))

    def test_collective_7_trusts_no_bytes(self, collective: Compressor) -> None:
        """If one of three workers sends damaged payloads, an error names it or all results agree.

        Results may differ only if it can send a different payload to each. Errors stay finite.
        """

        @settings(max_examples=self.conversations, derandomize=True, database=None, deadline=None)
        @given(st.data())
        def hold(data: st.DataObject) -> None:
            lockstep = Lockstep(3, collective)
            liar = data.draw(st.integers(0, 2), label="liar")
            small = [{n: g[n] for n in ("bias", "conv")} for g in cases.gradients(3, 0)]
            lockstep.transport = lying = Lying(3, liar, data)
            said = ""
            try:
                lockstep.step(small)
            except ValueError as error:
                said = str(error)
            except RuntimeError:  # Lockstep: results differ
                assert lying.to_each_another
            assert not said or f"orker {liar} " in said
            for engine in lockstep.engines:
                assert all(error.isfinite().all() for error in engine.errors().values())

        hold()


def exchanged(
    compressor: Compressor, gradients: list[Tensor], seed: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Return the mean of one exchange without a memory, and each worker's error."""
    lockstep = Lockstep(len(gradients), compressor, NoMemory(), seed=seed)
    result = lockstep.step([{"w": gradient} for gradient in gradients])
    return result.mean["w"], [error["w"] for error in result.errors]
