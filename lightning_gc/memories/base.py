"""Memory: base class of error feedback rules, each a flow around the compressed exchange."""

from __future__ import annotations

import abc
from collections.abc import Generator, Mapping
from typing import Any, Protocol, Self

from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.flow import Flow, Reply, Request
from lightning_gc.search_space import Choice, Range


class GradientExchange(Protocol):
    """Compresses and exchanges one buffer. A memory calls it once per bucket and round."""

    def __call__(self, buffer: Tensor) -> Generator[Request, Reply, Tensor]:
        """Compress ``buffer``, leave the error in it, and return the mean over workers.

        Args:
            buffer: ``(numel,)``, changed in place.

        Returns:
            ``(numel,)``, unscaled; not to be changed. It overwrites ``bucket.grad`` if that has at
            least 32 bits per element. Simulated workers other than worker 0 get it only if the
            memory declares ``common`` buffers.
        """

    def dense(self, buffer: Tensor) -> Generator[Request, Reply, Tensor]:
        """Exchange ``buffer`` uncompressed, zero it, and return the mean over workers."""


class Memory(abc.ABC):
    """Decides what is compressed, given the gradient and the errors of earlier steps.

    Subclasses are frozen dataclasses that hold configuration only. Their state is a few flat
    buffers, one element per gradient element, float32 or wider, initially zero, kept by the engine
    under parameter names.

    Laws, each held by a test of the same number in ``lightning_gc.testing``:

    1. Nothing is lost, if ``conserves``: over any number of steps, the sum of the applied means
       plus the mean over workers of the errors is the sum of the mean gradients.
    2. ``flow`` does not change the gradient; only the exchange does.
    3. Zero gradients and a zero state give a zero buffer.

    Attributes:
        buffers: names of the flat buffers. The first one is the error, which ``flow`` exchanges.
            Empty: no state, and the gradient itself is exchanged.
        conserves: law 1 holds.
        feeds_back: a step's error enters the next step, so the compressor's result must be the mean
            of what was sent.
        corrects_momentum: momentum is accumulated before compression, so the compressor must be
            biased (there must be an error to correct).
        lr_aware: buffers are in units of the update, learning rate times gradient: the engine
            multiplies them by γ_{t−1}/γ_t when a parameter's learning rate changes.
        common: those of ``buffers`` that are equal on all workers, computed from the mean.
        space: settings worth tuning, with their ranges.
        reads_weights: ``flow`` reads ``bucket.weights``.
        lookahead: share of its error by which a worker moves its weights during its forward and
            backward pass.
    """

    buffers: tuple[str, ...] = ()
    feeds_back: bool = True
    corrects_momentum: bool = False
    lr_aware: bool = False
    common: tuple[str, ...] = ()
    space: tuple[Range | Choice, ...] = ()

    @property
    def conserves(self) -> bool:
        """Whether law 1 holds."""
        return True

    @property
    def reads_weights(self) -> bool:
        """Whether ``flow`` reads ``bucket.weights``."""
        return False

    @property
    def lookahead(self) -> float:
        """Share of its error by which a worker moves its weights in a forward and backward pass."""
        return 0.0

    @abc.abstractmethod
    def flow(self, bucket: Bucket, state: Mapping[str, Tensor], exchange: GradientExchange) -> Flow:
        """Combine gradient and state, exchange the result and update the state.

        Error feedback is ``yield from exchange(state["error"].add_(bucket.grad))``.

        Args:
            bucket: the local gradient, unscaled.
            state: ``{buffer name: flat tensor}``, updated in place.
            exchange: call it once.
        """

    def check_optimizer(self, group: Mapping[str, Any]) -> None:
        """Refuse optimizer settings that conflict with this memory, at fit start.

        Args:
            group: one of its ``param_groups``.

        Raises:
            ValueError: with the value and what to set instead.
        """
        return

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Return instances for the contract tests; by default the one without arguments."""
        return (cls(),)


def refuse_momentum(memory: Memory, group: Mapping[str, Any]) -> None:
    """Raise ValueError if the optimizer has momentum, which would be applied twice."""
    for field in ("momentum", "betas"):
        value = group.get(field)
        if value:
            raise ValueError(
                f"{memory!r} has the momentum, so the optimizer must have none, but its {field} is "
                f"{value!r}; use torch.optim.SGD with momentum=0, or memory=Residual()."
            )
