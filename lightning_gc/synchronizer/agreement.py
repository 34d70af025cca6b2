"""Agreement: compare configuration and model across workers at the start; refuse differences."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping

import torch

from lightning_gc.transports.distributed import Distributed, gather_text


def check_agreement(
    configuration: Mapping[str, str], transport: Distributed, device: torch.device
) -> None:
    """Raise ValueError on all workers if one's configuration or model differs from worker 0's."""
    ours = "\n".join(f"{name}={value}" for name, value in configuration.items())
    texts = [text.splitlines() for text in gather_text(ours, transport, device)]
    for worker, text in enumerate(texts):
        for expected, found in itertools.zip_longest(texts[0], text, fillvalue="nothing more"):
            if found != expected:
                raise ValueError(
                    f"Worker {worker} has {found}, but worker 0 has {expected}. All workers "
                    f"need the same configuration; give them the same arguments."
                )


def digest_of(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return number and digest of parameter names and shapes, in order."""
    parameters = [f"{name} {shape}" for name, shape in shapes.items()]
    digest = hashlib.sha256("\n".join(parameters).encode()).hexdigest()
    return f"{len(parameters)} of digest {digest[:12]}"
