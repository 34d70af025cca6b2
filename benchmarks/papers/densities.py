"""What share of elements an estimated threshold lets through, beside the share that was wanted.

On numbers drawn from three distributions, on gradients of a language model that is being trained,
and on the same with error feedback, which is what compressors see in training. Prints a table and
writes a dated file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import dated_page
import torch
from models import build
from torch import Tensor

from lightning_gc import GaussianK, RedSync, SIDCo, TopK
from lightning_gc.compressors import SparseCodec
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.text_table import markdown

DENSITIES = (0.1, 0.01, 0.001)
METHODS: dict[str, SparseCodec] = {
    'TopK(selection="sampled")': TopK(selection="sampled"),
    "GaussianK()": GaussianK(),
    "RedSync()": RedSync(),
    "SIDCo()": SIDCo(),
    'SIDCo(fit="pareto")': SIDCo(fit="pareto"),
    'SIDCo(fit="gamma")': SIDCo(fit="gamma"),
}


def drawn(numel: int, draws: int) -> dict[str, list[Tensor]]:
    """Return tensors of three distributions."""
    g = torch.Generator().manual_seed(0)

    def many(draw: Callable[[], Tensor]) -> list[Tensor]:
        return [draw() for _ in range(draws)]

    def normal() -> Tensor:
        return torch.randn(numel, generator=g)

    def laplace() -> Tensor:
        return -torch.rand(numel, generator=g).clamp_min(1e-12).log() * normal().sign()

    def student() -> Tensor:
        return normal() / (torch.randn(2, numel, generator=g).square().mean(0)).sqrt()

    return {
        "Gaussian": many(normal),
        "Laplace": many(laplace),
        "Student t, 2 degrees of freedom": many(student),
    }


def trained(steps: int) -> Iterator[dict[str, Tensor]]:
    """Train the LSTM of the network benchmark; yield its matrices' gradients after each step."""
    torch.manual_seed(0)
    module, loader = build("lstm8", steps, 1)
    optimizer = module.configure_optimizers()
    for batch in loader:
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        yield {n: p.grad.flatten() for n, p in module.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(module.parameters(), module.clip or 1.0)
        optimizer.step()


def share(codec: SparseCodec, x: Tensor, step: int = 0) -> float:
    """Return the share of elements that are sent."""
    bucket = Bucket(x, {"w": tuple(x.shape)}, step=step)
    return codec.choose(x, bucket).numel() / x.numel()


def of_training(codec: SparseCodec, steps: int, skipped: int, feedback: bool) -> list[float]:
    """Return the share of each matrix in each step, with error feedback or without."""
    errors: dict[str, Tensor] = {}
    found = []
    for step, named in enumerate(trained(steps)):
        for name, grad in named.items():
            if grad.numel() < 10_000:
                continue
            x = errors.setdefault(name, torch.zeros_like(grad)) if feedback else grad.clone()
            if feedback:
                x.add_(grad)
            before = x.count_nonzero()
            codec.encode(x, Bucket(grad, {name: tuple(grad.shape)}, step=step))
            if step >= skipped:
                found.append(float(before - x.count_nonzero()) / x.numel())
    return found


def cell(shares: list[float], wanted: float) -> str:
    """Return the median over what was wanted, and the range."""
    ratios = sorted(each / wanted for each in shares)
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--numel", type=int, default=1_000_000, help="of drawn tensors (default: %(default)s)")
    add("--draws", type=int, default=5, help="(default: %(default)s)")
    add("--steps", type=int, default=40, help="of training (default: %(default)s)")
    add("--out", type=Path, default=dated_page.RESULTS, help="folder")
    options = parser.parse_args()
    text = f"""{dated_page.title("Densities")}

`python benchmarks/papers/densities.py`: elements sent over elements wanted, median and range, of
{options.draws} tensors of {options.numel:,} elements, and of the large matrices of a two-layer LSTM
in its steps {options.steps // 4} to {options.steps}, without and with error feedback.
"""
    samples = drawn(options.numel, options.draws)
    for density in DENSITIES:
        columns = [f"density {density:g}", *samples, "gradients", "with error feedback"]
        lines = []
        for name, method in METHODS.items():
            codec = method.at(density)
            line = [cell([share(codec, x) for x in xs], density) for xs in samples.values()]
            for feedback in (False, True):
                found = of_training(codec, options.steps, options.steps // 4, feedback)
                line.append(cell(found, density))
            lines.append([f"`{name}`", *line])
        part = f"\n{markdown(columns, lines)}"
        dated_page.say(part)
        text += part
    dated_page.write(options.out, "densities", text)


if __name__ == "__main__":
    main()
