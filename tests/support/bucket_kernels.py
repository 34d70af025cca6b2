"""Compare exchanges of whole buckets by kernels with the same exchanges by torch operations."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from lightning_gc.compressors import Compressor
from lightning_gc.compressors.quantisers.blockwise_codes import BlockwiseLevels
from lightning_gc.compressors.signs import sign_payload
from lightning_gc.compressors.sparsifiers import random_sparsifier
from lightning_gc.compressors.wrappers.per_parameter import by_default
from lightning_gc.core import Bucket, Payload
from lightning_gc.engine import Engine
from lightning_gc.kernels import quantise, signs
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.transports.simulated import Simulated
from tests.support.kernel_device import DEVICE, INTERPRETED, here, same

Shape = tuple[int, ...]
LAYOUTS: dict[str, list[Shape]] = {
    "one": [(1,)],
    "some": [(30, 40), (7,), (0, 5), (), (129,), (2, 600)],
    "few": [(30, 5), (7,), (0, 5), (), (130,)],
    "many": [(5,)] * 200,
    "several": [(2, 3)] * 12,
    "piece": [(1 << 15, 1), (3,), (257, 129)],
}
"""Shapes of parameters: 0-dim, empty, tiny, of one piece of a kernel and more than one."""
KINDS = ("normal", "ties", "idle", "not finite", "tiny", "huge")
"""What gradients hold."""


def gradient(kind: str, shapes: Sequence[Shape], worker: int, step: int) -> Tensor:
    """Return a flat gradient of one worker, on the CPU.

    Args:
        kind: one of ``KINDS``, or ``"largest"``, which 16-bit floats round to infinity.
        shapes: of the parameters.
        worker: its index; only worker 0 has numbers that are not finite, in step 1.
        step: number of the step.
    """
    sizes = [math.prod(shape) for shape in shapes]
    draw = torch.Generator().manual_seed(1000 * step + worker)
    flat = torch.randn(sum(sizes), generator=draw)
    if kind == "ties":
        flat = flat.mul(2).round().clamp(-1, 1)
    elif kind == "tiny":
        flat *= 1e-39
    elif kind == "huge":
        flat *= 1e30
    elif kind == "largest":
        flat = flat.sign() * 3.4e38
    elif kind == "not finite" and worker == 0 and step == 1:
        flat[:: max(1, flat.numel() // 3)] = float("nan")
        flat[1 :: max(2, flat.numel() // 2)] = -float("inf")
    elif kind == "idle":
        for index, part in enumerate(flat.split(sizes)):
            if (index + step) % 2 == worker % 2:
                part.zero_()
    return flat


def philox(key: int, numel: int, step: int = 0) -> Tensor:
    """Return numbers of Philox-4x32-10 as its paper has it, made floats in ``tl.rand``'s way."""
    counters = np.arange(-(-numel // 4), dtype=np.uint64)
    c = [counters, np.full_like(counters, step), *(np.zeros_like(counters) for _ in range(2))]
    keys = [key & 0xFFFFFFFF, key >> 32]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        k0, k1 = (np.uint64(k) for k in keys)
        c = [(b >> np.uint64(32)) ^ c[1] ^ k0, b & low, (a >> np.uint64(32)) ^ c[3] ^ k1, a & low]
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    words = np.stack(c, 1).reshape(-1)[:numel].astype(np.uint32).view(np.int32)
    folded = np.where(words < 0, -words - 1, words).astype(np.float32)
    return torch.from_numpy(folded * np.float32(4.6566127342e-10))


def _levels(codec: BlockwiseLevels, buffer: Tensor, bucket: Bucket) -> Payload:
    """Encode as ``codec`` does, with the random numbers of the kernels of whole buckets."""
    (name,), size = bucket.shapes, min(codec.block_size, buffer.numel())
    norms = quantise.in_blocks(buffer, size).abs().amax(dim=1)
    noise = None
    if codec.rounding == "stochastic":
        noise = torch.zeros(norms.numel() * size, device=buffer.device)
        noise[: buffer.numel()] = philox(bucket.key(name), buffer.numel(), bucket.step)
    return quantise.quantise_reference(buffer, norms, size, codec.bits, noise), norms


def _mean(numbers: Tensor, count: int | Tensor) -> Tensor:
    """Return a mean of signs' magnitudes, added in the order of the kernels."""
    empty = numbers.new_zeros((), dtype=torch.float32)
    return signs.by_torch(numbers, signs.share_of(int(count))) if numbers.numel() else empty


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Let torch compute what kernels do otherwise, and numba nothing.

    Where kernels draw random numbers, torch is given the same. On a GPU torch adds magnitudes of
    signs in another order than kernels do, so it is given theirs.
    """
    with contextlib.ExitStack() as stack:
        if DEVICE == "cuda":
            stack.enter_context(mock.patch.object(sign_payload, "mean", _mean))
        if INTERPRETED or DEVICE == "cuda":  # numba draws the numbers of the host
            stack.enter_context(mock.patch.object(BlockwiseLevels, "encode", _levels))
        for module in [m for n, m in sys.modules.items() if n.startswith("lightning_gc.")]:
            for name in {"fused", "compiled"} & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, return_value=False))
        yield


def train(
    compressor: Compressor,
    kind: str,
    shapes: Sequence[Shape],
    *,
    workers: int = 2,
    steps: int = 3,
    memory: Memory | None = None,
    scheme: Scheme | None = None,
    min_numel: int = 0,
) -> list[Tensor]:
    """Return mean and errors of every worker and step, and the bytes that were sent."""
    wrapped = by_default(compressor, min_numel)
    engines = [
        Engine(wrapped, memory, scheme, worker=worker, workers=workers, seed=3)
        for worker in range(workers)
    ]
    named = {f"p{i}": shape for i, shape in enumerate(shapes)}
    network, found = Simulated(workers), list[Tensor]()
    for step in range(steps):
        grads = [here(gradient(kind, shapes, worker, step)) for worker in range(workers)]
        flows = [e.flow(g, named) for e, g in zip(engines, grads, strict=True)]
        network.run(flows)
        for engine, grad in zip(engines, grads, strict=True):
            found += [grad.cpu(), *(error.cpu().clone() for error in engine.errors().values())]
            engine.advance()
    return [*found, torch.tensor(network.sent_bytes, dtype=torch.float32)]


def assert_same_bits(
    compressor: Compressor,
    kind: str,
    layout: str,
    *,
    workers: int = 2,
    memory: Memory | None = None,
    scheme: Scheme | None = None,
    min_numel: int = 0,
) -> None:
    """Train with kernels and without: means, errors and bytes must be equal, bit for bit."""
    given = compressor, kind, LAYOUTS[layout]
    ours, theirs = list[Tensor](), list[Tensor]()
    by_generator = mock.patch.object(random_sparsifier, "by_generator", return_value=False)
    for with_kernels, found in ((True, ours), (False, theirs)):
        with by_generator, contextlib.nullcontext() if with_kernels else without_kernels():
            found += train(
                *given, workers=workers, memory=memory, scheme=scheme, min_numel=min_numel
            )
    assert len(ours) == len(theirs)
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert same(a, b), f"{index} of {len(ours)}: {a} {b}"
