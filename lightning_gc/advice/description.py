"""Describe a training by a few numbers, and judge them before torch is imported."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from lightning_gc.controllers.auto import MANY
from lightning_gc.core.refusal import refuse
from lightning_gc.core.registry import did_you_mean
from lightning_gc.transports.link import Link
from lightning_gc.transports.network_model import rates

Shapes = dict[str, tuple[int, ...]]
"""Name -> shape of each parameter."""
SIXTEEN = "cast"
"""The method of 16 bits, which is always compared."""
PLAIN, HOOK = "plain DDP", "torch bf16 hook"
"""Names of torch's own 32 and 16 bits, as in ``bench.baselines``, which imports Lightning."""
METHODS = (
    SIXTEEN,
    "qsgd",
    "topk",
    "topk:value_dtype=bfloat16",
    "topk:value_dtype=bfloat16,scheme=two_shot",
    "powersgd:rank=2",
)
"""Methods whose costs are shipped."""
EXAMPLE = "lightning-gc advise --params 124M --step-ms 45 --gpu --link 1gbit --workers 4"
LATENCY_US = 50.0
"""Microseconds of a message, if the user gives none: a switched Ethernet."""
MATRICES = 48
"""Number of matrices of a model that is described by its size only, as GPT-2's blocks have."""


LEFT_OUT = f"Sparsifiers are left out among more than {MANY} workers, unless they are named."


def candidates(workers: int) -> tuple[str, ...]:
    """Return the methods that are compared if the caller names none.

    Sparsifiers are left out among many workers, where they lose most at equal bytes.
    """
    return tuple(each for each in METHODS if workers <= MANY or not each.startswith("topk"))


def gpt2() -> Shapes:
    """Return the parameters of GPT-2 with 124 million parameters, in the order of use."""
    shapes: Shapes = {"embedding": (50_257, 768), "positions": (1_024, 768)}
    for block in range(12):
        wide = {"qkv": (2_304, 768), "out": (768, 768), "up": (3_072, 768), "down": (768, 3_072)}
        for name, (outputs, inputs) in wide.items():
            shapes |= {f"{block}.{name}": (outputs, inputs), f"{block}.{name}.bias": (outputs,)}
        shapes |= {f"{block}.norm{i}.{part}": (768,) for i in (1, 2) for part in ("weight", "bias")}
    return shapes | {"norm.weight": (768,), "norm.bias": (768,)}


def resnet50() -> Shapes:
    """Return the parameters of ResNet-50 in the order of use."""
    shapes: Shapes = {"conv": (64, 3, 7, 7), "norm.w": (64,), "norm.b": (64,)}

    def conv(name: str, *shape: int) -> None:
        shapes.update({name: shape, f"{name}.w": shape[:1], f"{name}.b": shape[:1]})

    inputs = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            name = f"{stage}.{block}"
            conv(f"{name}.1", width, inputs, 1, 1)
            conv(f"{name}.2", width, width, 3, 3)
            conv(f"{name}.3", 4 * width, width, 1, 1)
            if block == 0:
                conv(f"{name}.down", 4 * width, inputs, 1, 1)
            inputs = 4 * width
    return shapes | {"head": (1_000, 2_048), "head.bias": (1_000,)}


def llama() -> Shapes:
    """Return the parameters of a Llama-like model of 1.1 billion: large tensors, no biases."""
    width, hidden = 2_048, 5_632
    shapes: Shapes = {"embedding": (32_000, width)}
    for block in range(22):
        parts = {"q": (width, width), "k": (256, width), "v": (256, width), "o": (width, width)}
        parts |= {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
        shapes |= {f"{block}.{name}": shape for name, shape in parts.items()}
        shapes |= {f"{block}.norm{i}": (width,) for i in (1, 2)}
    return shapes | {"norm": (width,), "head": (32_000, width)}


MODELS: dict[str, Callable[[], Shapes]] = {
    "gpt2": gpt2,
    "resnet50": resnet50,
    "llama-1b": llama,
}
"""Name -> shapes of the parameters in the order of use."""


def square(parameters: int) -> Shapes:
    """Return equal square matrices with this number of parameters, up to rounding."""
    number = max(1, min(MATRICES, parameters >> 16))
    side = max(1, round(math.sqrt(parameters / number)))
    return {f"matrix {i}": (side, side) for i in range(number)}


@dataclass(frozen=True)
class Description:
    """A described training.

    Attributes:
        shapes: of the parameters in the order of use, in float32.
        step: seconds of a step of one worker without any exchange.
        workers: W.
        link: its nominal rates, and the latency of one message.
        gpu: take the costs of compression on a GPU.
        overlap: whether the exchange may overlap with the backward pass.
        chosen: methods to predict; empty: all with shipped costs.
        codec: seconds of compression in a step, in place of shipped costs; None: as shipped.
    """

    shapes: Shapes
    step: float
    workers: int
    link: Link
    gpu: bool = False
    overlap: bool = True
    chosen: tuple[str, ...] = ()
    codec: float | None = None

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(map(math.prod, self.shapes.values()))


def described(options: argparse.Namespace) -> Description:
    """Return the case that the options of ``advise``, or of a replay, describe.

    Raises:
        ValueError: an option is missing, mistyped or contradicts another one.
    """
    given = {
        "--params or --model": options.params or options.model,
        "--step-ms": options.step_ms,
        "--link": options.link,
        "--workers": options.workers,
    }
    missing = [name for name, value in given.items() if value is None]
    if missing:
        refuse(
            f"A file such as train.yaml is missing, or a description of the training. The "
            f"description lacks {', '.join(missing)}. Write, for example, {EXAMPLE}"
        )
    chosen = tuple(options.methods or ())
    for name in chosen:
        if name not in METHODS:
            refuse(
                f"{name}: it has no shipped costs{did_you_mean(name, METHODS)}. Choose "
                f"from {', '.join(METHODS)}, or measure it with a file such as train.yaml"
            )
    if options.params and options.model:
        refuse("Give --params or --model, not both")
    latency = LATENCY_US if options.latency_us is None else options.latency_us
    spent = {"--step-ms": options.step_ms, "--latency-us": latency, "--codec-ms": options.codec_ms}
    for name, value in spent.items():
        if value is not None and not 0 < value < math.inf:
            refuse(f"{name} {value:g}: must be above 0, and finite")
    if options.workers < 2:
        refuse(f"--workers {options.workers}: at least 2 exchange gradients")
    return Description(
        square(parameters(options.params)) if options.params else shapes_of(options.model),
        step=options.step_ms * 1e-3,
        workers=options.workers,
        link=link_of(options.link, latency),
        gpu=options.gpu,
        chosen=chosen,
        codec=None if options.codec_ms is None else options.codec_ms * 1e-3,
    )


def link_of(text: str, latency_us: float = LATENCY_US) -> Link:
    """Return the link that ``--link`` describes."""
    up, down = rates(text, "--link ")
    return Link(up, latency_us, down_gbps=None if up == down else down)


def shapes_of(model: str) -> Shapes:
    """Return the shapes of a known model."""
    if model not in MODELS:
        refuse(
            f"--model {model!r} is not known{did_you_mean(model, MODELS)}. Use "
            f"{', '.join(MODELS)}, or give the number of parameters as --params 124M"
        )
    return MODELS[model]()


def parameters(text: str) -> int:
    """Return the number of parameters of ``"124M"``, ``"1.1B"`` or ``"124439808"``."""
    scale = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
    found = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)\s*([KMB]?)", text.strip(), re.IGNORECASE)
    if found is not None and (number := round(float(found[1]) * scale[found[2].upper()])) > 0:
        return number
    near = re.match(r"\s*(\d+(?:\.\d+)?)\s*(k|m|b|g|t)", text, re.IGNORECASE)
    letter = "" if near is None else {"G": "B"}.get(near[2].upper(), near[2].upper())
    meant = f" (did you mean {near[1]}{letter}?)" if near is not None and letter in scale else ""
    raise ValueError(
        f"--params {text!r} is not a number of parameters{meant}. Write it as 124M or 1.1B."
    )
