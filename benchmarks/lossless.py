"""Measure the bytes that ``Lossless`` sends of a gradient, beside the entropy, and its time.

One thread. Gradients of three models after some steps of training, in three dtypes. Seconds are
processor time, the least of several repeats, since other programs share the machine. The last
column is the rate of a link between two workers at which the bytes saved are worth the time: one
encoding and two decodings. Prints a table and writes a dated file.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import dated_page
import models
import torch
from torch import Tensor

from lightning_gc import Lossless
from lightning_gc.core.bucket import Bucket

DTYPES = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
"""Dtype -> bits of its mantissa."""


def gradient(name: str, steps: int) -> Tensor:
    """Return a model's flat gradient after ``steps`` steps."""
    torch.manual_seed(0)
    module, loader = models.build(name, steps + 1, seed=0)
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(loader):
        optimizer.zero_grad()
        module.training_step(batch, index).backward()
        if module.clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), module.clip)
        if index == steps:
            break
        optimizer.step()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def bound(x: Tensor, mantissa: int) -> float:
    """Return bits per element: the exponents' entropy, a sign and a mantissa."""
    shares = torch.bincount(x.float().view(torch.int32) >> 23 & 255).double() / x.numel()
    shares = shares[shares > 0]
    return float(-(shares * shares.log2()).sum()) + 1 + mantissa


def least(run: Callable[[], object], repeats: int) -> float:
    """Return the least processor time of ``run``, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def row(name: str, grad: Tensor, repeats: int) -> str:
    """Measure one gradient."""
    codec, numel, x = Lossless(), grad.numel(), grad.float()
    bucket = Bucket(grad, {"all": (numel,)})
    payload = codec.encode(x.clone(), bucket)
    out = torch.zeros(numel)
    codec.decode(payload, out, 1.0, bucket)
    assert torch.equal(out, x), "not lossless"
    bits = 8 * sum(t.nbytes for t in payload) / numel
    plain, limit = 8 * grad.element_size(), bound(grad, DTYPES[grad.dtype])
    copy = least(lambda: x.clone(), repeats)
    encode = (least(lambda: codec.encode(x.clone(), bucket), repeats) - copy) / numel
    decode = least(lambda: codec.decode(payload, out, 1.0, bucket), repeats) / numel
    dtype = str(grad.dtype).removeprefix("torch.")
    pays = (plain - bits) / (encode + 2 * decode) / 1e9
    return (
        f"| {name} | {dtype} | {bits:.2f} | {bits / limit:.3f} | {plain / bits:.2f} | "
        f"{encode * 1e9:.0f} | {decode * 1e9:.0f} | {pays:.2f} |\n"
    )


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["lstm8", "gpt", "resnet18"])
    parser.add_argument("--steps", type=int, default=5, help="of training before the gradient")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=dated_page.RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = dated_page.columns(
        "gradient of", "dtype", "bits per element", "of the entropy", "ratio",
        "encode, ns per element", "decode, ns", "pays below, Gbit/s",
    )  # fmt: skip
    for name in given.models:
        grad = gradient(name, given.steps)
        for dtype in DTYPES:
            # As under a loss scaler, so that float16 has what it can hold of it.
            scaled = grad * 1024 if dtype == torch.float16 else grad
            table += row(models.MODELS[name], scaled.to(dtype), given.repeats)
    dated_page.say(table)
    head = dated_page.title("Lossless: bits and time")
    about = f"{dated_page.versions('torch')}, one thread. `python benchmarks/lossless.py`"
    dated_page.write(given.out, "lossless", f"{head}\n\n{about}\n\n{table}")


if __name__ == "__main__":
    main()
