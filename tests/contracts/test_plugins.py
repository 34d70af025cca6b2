"""Plug-ins outside the package: how short they are, and that they are held to all laws."""

import ast
import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_gc.compressors import Collective, Contraction, Knob, SparseCodec, Traits
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Flow, Mean
from lightning_gc.core.wire import Field, Wire
from lightning_gc.memories import Memory
from lightning_gc.memories.base import GradientExchange
from lightning_gc.testing.contracts import CompressorContract, MemoryContract


@dataclass(frozen=True)
class Fading(Memory):
    """Error feedback whose old error counts half."""

    buffers = ("error",)
    conserves = False

    def flow(self, bucket: Bucket, state: Mapping[str, Tensor], exchange: GradientExchange) -> Flow:
        yield from exchange(state["error"].mul_(0.5).add_(bucket.grad))


@dataclass(frozen=True)
class EveryNth(SparseCodec):
    """Send every n-th element."""

    n: int = 10

    traits = Traits("sparsifier", knob=Knob("n", 1, 1000, more="compression", integer=True))
    ragged = False

    def most(self, numel: int) -> int:
        return -(-numel // self.n)

    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        return torch.arange(0, buffer.numel(), self.n, device=buffer.device)

    def bound(self, numel: int) -> Contraction:
        return Contraction(0.0)


@dataclass(frozen=True)
class BlockMeans(Collective):
    """Send the mean of each block, averaged over workers."""

    block: int = 4

    traits = Traits("quantiser", knob=Knob("block", 1, 64, more="compression", integer=True))

    def rounds(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        numel = buffer.numel()
        own = pad(buffer, (0, -numel % self.block)).view(-1, self.block).mean(1)
        buffer.sub_(own.repeat_interleave(self.block)[:numel])
        bucket.tally.count(numel, numel, (own,))
        (mean,) = yield Mean((own,))
        out.copy_(mean.repeat_interleave(self.block)[:numel])

    def wire(self, numel: int) -> Wire:
        return (Field("means", torch.float32, -(-numel // self.block)),)

    def bound(self, numel: int) -> Contraction:
        return Contraction(0.0)


class TestFading(MemoryContract):
    instances = (Fading(),)


class TestEveryNth(CompressorContract):
    instances = (EveryNth(3), EveryNth())


class TestBlockMeans(CompressorContract):
    instances = (BlockMeans(), BlockMeans(7))


@dataclass(frozen=True)
class Forgets(BlockMeans):
    """Loses what it does not send."""

    def rounds(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        yield from super().rounds(bucket, buffer, out)
        buffer.zero_()


@dataclass(frozen=True)
class Guesses(BlockMeans):
    """Draws from the global generator."""

    def rounds(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        yield from super().rounds(bucket, buffer, out)
        noise = torch.rand(()) * 1e-3
        buffer.add_(noise)
        out.sub_(noise)


@dataclass(frozen=True)
class Remembers(BlockMeans):
    """Keeps state that it does not declare."""

    def rounds(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        yield from super().rounds(bucket, buffer, out)
        for state in bucket.state.values():
            state["steps"] = bucket.step


def test_the_laws_find_what_breaks_them() -> None:
    """One that loses its error, draws from the global generator, or keeps undeclared state."""
    contract = CompressorContract()
    contract.test_collective_1_takes_and_leaves_the_rest(BlockMeans(), 2)
    for broken, law in (
        (Forgets(), lambda c: contract.test_collective_1_takes_and_leaves_the_rest(c, 2)),
        (Guesses(), contract.test_collective_6_randomness_is_private),
        (Remembers(), contract.test_3_keeps_what_it_declares),
    ):
        try:
            law(broken)
        except (AssertionError, RuntimeError):
            continue
        raise AssertionError(f"no law sees what {broken} does")


def code_lines(cls: type) -> int:
    """Return the lines of a class that are neither blank nor docstrings, decorator included."""
    source = inspect.getsource(cls)
    blank = {n for n, line in enumerate(source.splitlines(), 1) if not line.strip()}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            assert node.end_lineno is not None
            blank |= set(range(node.lineno, node.end_lineno + 1))
    return len(source.splitlines()) - len(blank)


def test_they_are_short() -> None:
    assert code_lines(Fading) <= 15
    assert code_lines(EveryNth) <= 25
