"""Seconds of each fused kernel on a GPU, against what memory allows and what torch takes.

    python benchmarks/kernels.py [--numel 25000000] [--density 0.01]

The floor is the least that a pass must read and write, at the bandwidth of a ``copy_`` measured in
the same run: 4 bytes an element for select, which writes few. The target is 1.5 floors. Rows are
medians of single launches, interleaved, with a cold L2 cache.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gc.compressors.sparsifiers import topk_selection
from lightning_gc.core import payload_validation
from lightning_gc.kernels import accumulate, dispatch, quantise

BITS, BLOCK_SIZE = 4, 512


class Row(NamedTuple):
    """A pass: its name, the bytes that it must move, and what is run before and while timed."""

    name: str
    needed: float
    run: Callable[[], object]
    before: Callable[[], object] = int


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--numel", type=int, default=25_000_000, help="elements of the gradient")
    parser.add_argument("--density", type=float, default=0.01, help="share of elements selected")
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/kernels.py measures CUDA kernels and needs a GPU; there is none here.")
    device = torch.device("cuda")
    if not all(dispatch.fused(torch.ones(1, device=device), f) for f in ("sparse", "levels")):
        why = f"the warning above says why, or {dispatch.SWITCH} is set to torch"
        sys.exit(f"Triton's kernels do not run here: {why}.")
    table = rows(args.numel, args.density, device)
    seconds = measure(table, args.repeats, device)
    bandwidth = 8 * args.numel / seconds[0]
    properties = torch.cuda.get_device_properties(device)
    lines = [
        f"{properties.name}, torch {torch.__version__}, {args.numel:,} elements, density "
        f"{args.density:g}, copy {bandwidth / 1e9:,.0f} GB/s\n",
        "| pass | µs | floor µs | floors |\n|---|---|---|---|",
    ]
    for row, took in zip(table, seconds, strict=True):
        floor = row.needed / bandwidth
        figures = f"{took * 1e6:,.1f} | {floor * 1e6:,.1f} | {took / floor:.2f}"
        lines.append(f"| {row.name} | {figures} |")
    sys.stdout.write("\n".join(lines) + "\n")


def rows(numel: int, density: float, device: torch.device) -> list[Row]:
    """Return what is measured; the copy first."""
    generator = torch.Generator(device).manual_seed(0)
    gradient = torch.randn(numel, device=device, generator=generator)
    out = torch.zeros_like(gradient)
    k = max(1, round(density * numel))
    threshold = torch.topk(gradient.abs(), k).values[-1]
    positions = (gradient.abs() >= threshold).nonzero().view(-1)[:k]
    values = gradient[positions]
    norms = quantise.in_blocks(gradient, BLOCK_SIZE).abs().amax(1)
    buffer = gradient.clone()
    packed = quantise.quantise(buffer, norms, BLOCK_SIZE, BITS, generator)

    def encode(name: str, run: Callable[..., Tensor]) -> Row:
        task = functools.partial(run, buffer, norms, BLOCK_SIZE, BITS, generator)
        return Row(f"quantise to {BITS} bits, {name}", (8 + BITS / 8) * numel, task)

    def decode(name: str, run: Callable[..., object]) -> Row:
        task = functools.partial(
            run, packed, norms, BLOCK_SIZE, BITS, out, 0.5, payload_validation.codes
        )
        return Row(f"dequantise, {name}", (8 + BITS / 8) * numel, task)

    def add(name: str, run: Callable[..., object]) -> Row:
        return Row(f"accumulate, {name}", 20 * k, lambda: run(out, positions, values, 0.5))

    return [
        Row("`copy_`", 8 * numel, lambda: out.copy_(gradient)),
        Row("select", 4 * numel, lambda: topk_selection.reaching(gradient, threshold)),
        Row("`torch.topk` alone", 4 * numel, lambda: torch.topk(gradient.abs(), k, sorted=False)),
        encode("Triton", quantise.quantise),
        encode("torch", quantise.quantise_reference),
        decode("Triton", quantise.dequantise),
        decode("torch", quantise.dequantise_reference),
        add("Triton", accumulate.accumulate),
        add("torch", accumulate.reference),
    ]


def measure(table: list[Row], repeats: int, device: torch.device) -> list[float]:
    """Return the median seconds of each row; first rounds compile and are not counted."""
    sweep = torch.empty(1 << 28, dtype=torch.uint8, device=device)  # larger than any L2 cache
    seconds: list[list[float]] = [[] for _ in table]
    for repeat in range(repeats + 3):
        for row, found in zip(table, seconds, strict=True):
            row.before()
            sweep.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            row.run()
            end.record()
            end.synchronize()
            if repeat >= 3:
                found.append(start.elapsed_time(end) / 1e3)
    return [statistics.median(found) for found in seconds]


if __name__ == "__main__":
    main()
