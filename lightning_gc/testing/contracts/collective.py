"""CollectiveContract: laws of compressors that run their own communication, one test each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gc.compressors import Collective, Compressor
from lightning_gc.memories import NoMemory
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.damaged_payloads import with_liar
from lightning_gc.testing.contracts.sentences import apart, broken, named
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
            total = mean.double() + left
            gap = apart(total, wanted, rtol=1e-4, atol=scale)
            what = f"the result and the mean error do not sum to the mean gradient: {gap}"
            if gap is not None and not any(error.any() for error in errors):
                what += "; no worker's buffer holds what it did not send"
            on = f"{named(kind, 221)} and {several} workers"
            assert gap is None, broken(collective, "law 1", what, on)

    def test_collective_3_keeps_its_bound(self, collective: Compressor) -> None:
        for kind, flat in cases.tensors(221).items():
            bound = collective.bound(221)
            allowed = bound.allowed(float(flat.double().square().sum()))
            errors = [
                exchanged(collective, [flat.view(SHAPE)], seed)[1][0].double().square().sum()
                for seed in range(24)
            ]
            excess, on = cases.excess(errors, allowed, 1e-4), named(kind, 221)
            assert excess is None, broken(collective, "law 3", f"{excess} by {bound!r}", on)

    def test_collective_3_unbiased_if_declared(self, collective: Compressor) -> None:
        if not collective.traits.unbiased:
            return
        flat = cases.tensors(221)["normal"]
        given_ = [flat.view(SHAPE), flat.flip(0).view(SHAPE)]
        wanted = torch.stack(given_).double().mean(0)
        mean = cases.unbiased(lambda seed: exchanged(collective, given_, seed)[0], wanted, 200)
        what = "traits say unbiased, but the mean of 200 results is not the mean gradient"
        assert mean, broken(collective, "law 3", what, f"{named('normal', 221)} and 2 workers")

    def test_collective_4_knob_moves_bytes_in_its_direction(self, collective: Compressor) -> None:
        gradient = torch.randn(64, 64, generator=cases.generator(4))

        def size(turned: Compressor) -> int:
            lockstep = Lockstep(2, turned, NoMemory())
            for _ in range(3):  # the first steps may be dense
                last = lockstep.step([{"w": gradient}] * 2)
            return last.wire_bytes[0]

        cases.turns(collective, size, 16)

    def test_collective_6_randomness_is_private(self, collective: Compressor) -> None:
        gradient = cases.tensors(221)["normal"].view(SHAPE)

        def run(seed: int) -> Sequence[Tensor]:
            mean, errors = exchanged(collective, [gradient, -2 * gradient], seed)
            return [mean, *errors]

        cases.private(collective, run)

    def test_collective_7_trusts_no_bytes(self, collective: Compressor) -> None:
        with_liar(collective, lambda: Lockstep(3, collective), self.conversations)


def exchanged(
    compressor: Compressor, gradients: list[Tensor], seed: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Return the mean of an exchange without a memory, and each worker's error.

    Of the first one that compresses: those before it, of the same gradients, say nothing.
    """
    lockstep = Lockstep(len(gradients), compressor, NoMemory(), seed=seed)
    for _ in range(compressor.compressing_step(0) + 1):
        result = lockstep.step([{"w": gradient} for gradient in gradients])
    return result.mean["w"], [error["w"] for error in result.errors]
