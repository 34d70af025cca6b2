"""What a memory is: the rule by which what was not sent comes back."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.search_space import Choice, Range


class Memory(abc.ABC):
    """Decides what is compressed, given the gradient and what was left behind before.

    Subclasses are frozen dataclasses and hold configuration only. Their state is a few flat
    buffers, one element per gradient element, float32 or wider, zero at first, kept by the engine
    under parameter names.

    Laws, each held by a test of the same number in ``lightning_gc.testing``:

    1. Nothing is lost, where ``conserves``: over any number of steps, the means that were applied
       and the mean over workers of the errors add up to the mean of the gradients.
    2. The gradient is not changed by ``compensate`` unless it is returned itself.
    3. Zero gradients and a zero state give a zero buffer.

    Attributes:
        buffers: names of the flat buffers; the first one is what ``compensate`` returns, and
            what is left in it after the flow is the new error. Empty: nothing is remembered.
        conserves: law 1 holds.
        feeds_back: what a step has left enters the next one, so the compressor must say by its
            result how much it has sent.
        corrects_momentum: momentum is built up before compression, so the compressor must be
            biased (there must be an error to correct).
        lr_aware: buffers are kept in units of the update, learning rate times gradient: the
            engine multiplies them by γ_{t−1}/γ_t when a parameter's learning rate changes.
        common: those of ``buffers`` that hold the same on all workers, made of the mean.
        looks_back: ``remember`` wants to be called when a round is over.
        compares: it wants to know what was in the first buffer before the flow: a copy is kept.
        space: what is worth tuning, and in which range.
        reads_weights: ``bucket.weights`` is wanted.
        ahead: the share of its own error by which a worker moves its weights, for the time of its
            forward and backward pass.
    """

    buffers: tuple[str, ...] = ()
    conserves: bool = True
    feeds_back: bool = True
    corrects_momentum: bool = False
    lr_aware: bool = False
    common: tuple[str, ...] = ()
    looks_back: bool = False
    compares: bool = False
    space: tuple[Range | Choice, ...] = ()
    reads_weights: bool = False
    ahead: float = 0.0

    @abc.abstractmethod
    def compensate(self, bucket: Bucket, state: Mapping[str, Tensor]) -> Tensor:
        """Return the flat buffer to compress, ``(numel,)``; it may be changed in place by the flow.

        Args:
            bucket: the local gradient, in true (unscaled) units.
            state: ``{buffer name: flat tensor}``, to be updated in place.
        """

    def remember(
        self, bucket: Bucket, state: Mapping[str, Tensor], before: Tensor, mean: Tensor
    ) -> None:
        """Learn from a round that is over, if ``looks_back``.

        Args:
            bucket: as for ``compensate``; its ``grad`` may have been overwritten.
            state: to be updated in place; the first buffer holds the new error.
            before: what that buffer held before the flow, ``(numel,)``, if ``compares``; else
                that buffer.
            mean: what all workers apply, ``(numel,)``, in true units; simulated workers have it
                where a buffer is ``common``.
        """
        raise NotImplementedError(f"{self!r} looks back, but has not said what it remembers.")

    def averages(self, step: int) -> bool:
        """Return whether errors are replaced by their mean over workers before this round."""
        return False

    def flushes(self, step: int) -> bool:
        """Return whether this round sends everything uncompressed, errors included."""
        return False

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
