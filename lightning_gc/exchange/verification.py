"""Verification: workers compare digests of means, weights and messages, and stop if they differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_gc.core import Flow, Gather
from lightning_gc.core.digest import ReplicaError, check_same, digest
from lightning_gc.transports.base import Checksummed, Transport, shortened

Verify = int | Literal["payload"]
_SEE = (
    "A message was damaged on its way, or these workers compute differently: other hardware, other "
    "libraries, a faulty memory. Their weights part or have parted, so all workers stop; resume "
    "from a checkpoint, and with verify='payload' if messages may be damaged."
)


class Means:
    """Compares digests of the mean gradients, of every n-th step, from the first one on.

    Means that differ in a step between, and are the same again in the next, leave weights that
    differ; so for n > 1 the weights are compared as well.

    Args:
        every: n.

    Communication pattern:
        One all-gather after the last bucket of such a step, of 8 bytes per worker, however many
        buckets there are. If they differ, another all-gather finds the bucket.

    Raises:
        ReplicaError: on all workers; it names those that differ from most, step and parameters.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        # Appended to and emptied by flows, which one thread runs in order.
        self._digests: list[tuple[str, Tensor]] = []

    def transport(self, inner: Transport) -> Transport:
        """Return the transport to use over ``inner``."""
        return inner

    def watch(self, flow: Flow, grad: Tensor, shapes: Mapping[str, Any], step: int) -> Flow:
        """Return the flow to run instead of ``flow``, which leaves a bucket's mean in ``grad``."""
        return self._watched(flow, grad, shapes) if step % self.every == 0 else flow

    def compare(self, step: int, weights: Iterable[Tensor]) -> Flow | None:
        """Return a flow to run after the flows of a step's buckets, or None."""
        if step % self.every:
            return None
        # Here, not in the flow: the optimizer may change them while the flow runs.
        return self._compared(step, [digest(*weights)] if self.every > 1 else [])

    def _watched(self, flow: Flow, grad: Tensor, shapes: Mapping[str, Any]) -> Flow:
        yield from flow
        self._digests.append((shortened(shapes), digest(grad)))

    def _compared(self, step: int, weights: list[Tensor]) -> Flow:
        buckets, self._digests = self._digests, []
        every = [*(own for _, own in buckets), *weights]
        if not every:  # no worker has an element of these shards
            return
        own = torch.cat(every)
        if len({int(of_all) for (of_all,) in (yield Gather((digest(own),)))}) == 1:
            return
        whats = [f"the mean gradient of step {step} for {names}" for names, _ in buckets]
        whats += [f"the weights before step {step}"] * len(weights)
        rows = torch.stack([each for (each,) in (yield Gather((own,)))]).tolist()  # (W, whats)
        for what, digests in zip(whats, zip(*rows, strict=True), strict=True):
            check_same(digests, what, _SEE)
        raise ReplicaError(f"The message that compares the workers in step {step} was damaged.")


class Messages(Means):
    """Compares the means of every step, and the checksum of every message before decoding it."""

    def __init__(self) -> None:
        super().__init__(1)

    def transport(self, inner: Transport) -> Transport:
        return Checksummed(inner)


def verification(verify: Verify, owner: str) -> Means | None:
    """Return what ``verify=`` of a strategy or of ``attach`` asks for, if anything.

    Raises:
        ValueError: neither a number of steps nor ``"payload"``.
    """
    if verify == "payload":
        return Messages()
    if isinstance(verify, bool) or not isinstance(verify, int) or verify < 0:
        raise ValueError(
            f"{owner}(verify={verify!r}): give n to compare the workers' means in every n-th step, "
            f"'payload' to compare a checksum of every message as well, or 0 for neither."
        )
    return Means(verify) if verify else None
