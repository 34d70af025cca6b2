"""Memory: the rule by which what was not sent comes back, written as a flow around the exchange."""

from __future__ import annotations

import abc
from collections.abc import Generator, Mapping
from typing import Any, Protocol, Self

from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.flow import Flow, Reply, Request
from lightning_gc.search_space import Choice, Range


class GradientExchange(Protocol):
    """Compresses and exchanges one buffer. A memory calls it once per round."""

    def __call__(self, buffer: Tensor) -> Generator[Request, Reply, Tensor]:
        """Compress ``buffer``, leave the error in it, and return the mean over workers.

        Args:
            buffer: ``(numel,)``, changed in place.

        Returns:
            ``(numel,)``, in true units; not to be changed. It overwrites ``bucket.grad``, if that
            is precise enough. A simulated worker beside the first has it only if the memory
            declares buffers as ``common``.
        """

    def dense(self, buffer: Tensor) -> Generator[Request, Reply, Tensor]:
        """Exchange ``buffer`` uncompressed, leave zeros in it, and return the mean over workers."""


class Memory(abc.ABC):
    """Decides what is compressed, given the gradient and what was not sent before.

    Subclasses are frozen dataclasses and hold configuration only. Their state is a few flat
    buffers, one element per gradient element, float32 or wider, zero at first, kept by the engine
    under parameter names.

    Laws, each held by a test of the same number in ``lightning_gc.testing``:

    1. Nothing is lost, where ``conserves``: over any number of steps, the means that were applied
       and the mean over workers of the errors add up to the mean of the gradients.
    2. The gradient is not changed by ``flow``, but by the exchange.
    3. Zero gradients and a zero state give a zero buffer.

    Attributes:
        buffers: names of the flat buffers. The first one holds the error: it is what ``flow``
            exchanges. Empty: nothing is kept, and the gradient itself is exchanged.
        conserves: law 1 holds.
        feeds_back: what a step has left enters the next one, so the compressor must say by its
            result how much it has sent.
        corrects_momentum: momentum is built up before compression, so the compressor must be
            biased (there must be an error to correct).
        lr_aware: buffers are kept in units of the update, learning rate times gradient: the
            engine multiplies them by γ_{t−1}/γ_t when a parameter's learning rate changes.
        common: those of ``buffers`` that hold the same on all workers, made of the mean.
        space: what is worth tuning, and in which range.
        reads_weights: ``bucket.weights`` is wanted.
        lookahead: the share of its own error by which a worker moves its weights, for the time of
            its forward and backward pass.
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
        """Whether ``bucket.weights`` is wanted."""
        return False

    @property
    def lookahead(self) -> float:
        """Share of its error by which a worker moves its weights."""
        return 0.0

    @abc.abstractmethod
    def flow(self, bucket: Bucket, state: Mapping[str, Tensor], exchange: GradientExchange) -> Flow:
        """Add what was kept to the gradient, exchange the sum, and keep what is left of it.

        Error feedback is ``yield from exchange(state["error"].add_(bucket.grad))``.

        Args:
            bucket: the local gradient, in true (unscaled) units.
            state: ``{buffer name: flat tensor}``, to be updated in place.
            exchange: to be called once.
        """

    def check_optimizer(self, group: Mapping[str, Any]) -> None:
        """Refuse what an optimizer must not do beside this memory, at fit start.

        Args:
            group: one of its ``param_groups``.

        Raises:
            ValueError: naming the value and what to set instead.
        """
        return

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Return the instances on which the contract suite is run; the default one if not given."""
        return (cls(),)


def refuse_momentum(memory: Memory, group: Mapping[str, Any]) -> None:
    """Raise ValueError where an optimizer has momentum of its own, which would come on top."""
    for field in ("momentum", "betas"):
        value = group.get(field)
        if value:
            raise ValueError(
                f"{memory!r} has the momentum, so the optimizer must have none, but its {field} is "
                f"{value!r}; use torch.optim.SGD with momentum=0, or memory=Residual()."
            )
