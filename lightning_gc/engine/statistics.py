"""EpochStatistics: sums over an epoch of gradients, squared norms and errors, for a controller."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_gc.core import NUMBER, Bucket, Each, Record, Tally
from lightning_gc.core.saved_state import FINITE, FLOATS
from lightning_gc.engine.error_buffers import ErrorBuffers, to_host

PIECE = 1 << 16
"""Elements of a tensor on the host that torch squares and adds up at once, in float32: a sum of 25
million is off by 0.3 %, one of these by one or two in a hundred thousand."""


class EpochStatistics:
    """Adds up, on the device, the statistics that a controller declares.

    Args:
        gradients: ``"epoch sum"`` of local raw gradients, ``"first batch"`` for the gradients of
            an epoch's first batch, or ``"none"``. Costs one float32 per parameter and one pass.
        moments: also sum their squared norms, to separate gradient and noise; needs the epoch sum.
        errors: sum ``‖e_t‖²`` and ``γ_t²·‖e_t‖²`` over steps. Costs one pass over the error.
        scale: sum ``‖g_t‖²`` of local gradients since the last decision. Costs one pass over them.
    """

    structure = Record(
        {
            "sums": Each(FLOATS),
            **dict.fromkeys(("squares", "total_error", "total_error_update", "recent"), NUMBER),
        },
        {"first": FINITE},
    )
    """Structure of ``own_state()``; norms of huge gradients may overflow."""

    def __init__(
        self,
        gradients: Literal["none", "epoch sum", "first batch"] = "none",
        moments: bool = False,
        errors: bool = False,
        scale: bool = False,
    ) -> None:
        if moments and gradients == "first batch":
            raise ValueError(
                "Moments need the gradients of the whole epoch, not of the first batch only; use a "
                "controller that looks at the epoch's sum."
            )
        self.first_only = gradients == "first batch"
        self.sums = gradients != "none" or moments
        self.moments = moments
        self.errors = errors
        self.scale = scale
        self._store = ErrorBuffers(("sum",))
        self._first: int | None = None
        self._squares: Tensor | float = 0.0  # Σ‖g_t‖² over the epoch
        self._errors: Tensor | float = 0.0
        self._update_errors: Tensor | float = 0.0
        self._recent: Tensor | float = 0.0  # Σ‖g_t‖² since the last decision

    def see_gradient(self, bucket: Bucket) -> None:
        """Add a local gradient: raw, unscaled, zero if it was not finite."""
        if self.scale and bucket.names:
            self._recent = self._recent + _squares(bucket, bucket.grad).sum()
        if not self.sums:
            return
        if self._first is None:
            self._first = bucket.step
        if self.first_only and bucket.step != self._first:
            return
        self._store.flat(bucket)["sum"].add_(bucket.grad)
        if self.moments and bucket.names:
            self._squares = self._squares + _squares(bucket, bucket.grad).sum()

    def see_error(self, bucket: Bucket, error: Tensor, rates: Mapping[str, float]) -> None:
        """Add the squared norm of one bucket's error, left by a step at these learning rates."""
        if not self.errors or not bucket.names:
            return
        squared = _squares(bucket, error)
        self._errors = self._errors + squared.sum()
        start = 0
        for rate, group in itertools.groupby(rates.get(name, 0.0) for name in bucket.names):
            stop = start + len(list(group))
            self._update_errors = self._update_errors + rate**2 * squared[start:stop].sum()
            start = stop

    @property
    def total_error(self) -> float:
        """``Σ‖e_t‖²`` over all steps so far, in units of the gradient."""
        return float(self._errors)

    @property
    def total_error_update(self) -> float:
        """``Σ γ_t²·‖e_t‖²``, in units of the update; 0 for parameters of no known rate γ_t."""
        return float(self._update_errors)

    @property
    def squared_gradients(self) -> float:
        """``Σ‖g_t‖²`` since ``forget_gradients``."""
        return float(self._recent)

    def forget_gradients(self) -> None:
        """Set ``squared_gradients`` to zero: a decision has been made."""
        self._recent = 0.0

    def norms(self) -> dict[str, float]:
        """Return parameter name -> norm of its summed gradient."""
        named = self._store.named
        norms = [torch.linalg.vector_norm(kept["sum"]) for kept in named.values()]
        return dict(zip(named, torch.stack(norms).tolist(), strict=True)) if norms else {}

    def summed(self) -> dict[str, Tensor]:
        """Return parameter name -> its summed gradient, not a copy."""
        return {name: kept["sum"] for name, kept in self._store.named.items()}

    def sum(self) -> Tensor:
        """Return the summed gradients as one flat tensor, sorted by parameter name.

        The order of DDP's buckets is not stable: after a resume it differs until the first step.
        """
        named = self._store.named
        return torch.cat([named[name]["sum"].reshape(-1) for name in sorted(named)])

    def squares(self) -> float:
        """Return ``Σ‖g_t‖²`` over the epoch."""
        return float(self._squares)

    def end_epoch(self) -> None:
        """Reset the epoch's sums, but not the total error."""
        for kept in self._store.named.values():
            kept["sum"].zero_()
        self._squares = 0.0
        self._first = None

    def own_state(self) -> dict[str, Any]:
        """Return this worker's sums: tensors and numbers that may be averaged over workers."""
        sums = {name: to_host(kept["sum"]) for name, kept in self._store.named.items()}
        state = {
            "sums": sums,
            "squares": self.squares(),
            "total_error": self.total_error,
            "total_error_update": self.total_error_update,
            "recent": self.squared_gradients,
        }
        return state if self._first is None else state | {"first": self._first}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Resume from ``own_state()``."""
        self._store.load({name: {"sum": tensor} for name, tensor in state["sums"].items()})
        self._squares = float(state["squares"])
        self._first = round(state["first"]) if "first" in state else None
        self._errors = float(state["total_error"])
        self._update_errors = float(state["total_error_update"])
        self._recent = float(state["recent"])


def _squares(bucket: Bucket, flat: Tensor) -> Tensor:
    """Return squared norms, ``(parameters,)`` float64, which do not depend on the bucket."""
    size = PIECE if flat.device.type == "cpu" else max(bucket.numel, 1)
    pieces = [flat.narrow(0, a, b - a).split(size) for _, a, b in bucket.spans()]
    wide = torch.promote_types(flat.dtype, torch.float32)  # of 16 bits a norm is off, or infinite
    norms = torch._foreach_norm([piece for each in pieces for piece in each], 2, dtype=wide)
    squared = torch.stack(norms).double() ** 2
    if len(norms) == len(pieces):  # no sum per parameter, which on a device is a kernel each
        return squared
    return torch.stack([each.sum() for each in squared.split([len(each) for each in pieces])])


class Statistics:
    """Counts elements and bytes; measures norms on request.

    Attributes:
        tally: elements and bytes so far.
        norms_wanted: measure norms before and after compression in this round.
        norms: ``(‖x‖, ‖x − C(x)‖)`` per bucket of the last measured round.
        leftovers: errors of that round, by parameter name, also without a memory.
        epoch: sums for a controller, or None.
    """

    def __init__(self) -> None:
        self.tally = Tally()
        self.norms_wanted = False
        self.norms: list[tuple[Tensor, Tensor]] = []
        self.leftovers: dict[str, Tensor] = {}
        self.epoch: EpochStatistics | None = None

    def see_error(
        self,
        bucket: Bucket,
        error: Tensor,
        before: Tensor | None,
        rates: Mapping[str, float] | None,
    ) -> None:
        """Record a bucket's error ``x − C(x)``.

        Args:
            bucket: where it has arisen.
            error: ``(numel,)``.
            before: ``‖x‖``; None: do not measure norms.
            rates: parameter name -> learning rate of this round; None: no memory keeps the error,
                so that it does not count for the controller.
        """
        if self.epoch is not None and rates is not None:
            self.epoch.see_error(bucket, error, rates)
        if before is not None:
            self.norms.append((before, torch.linalg.vector_norm(error)))
            self.leftovers |= bucket.split(error)
