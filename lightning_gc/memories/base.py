"""Memory: base class of error feedback rules, each a flow around the compressed exchange."""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, TypeAlias

import torch
from torch import Tensor

from lightning_gc.compressors.base import Compressor
from lightning_gc.core import Bucket, Choice, Flow, Range, Reply, Request
from lightning_gc.core.combinations import judge
from lightning_gc.core.settings import Settings
from lightning_gc.memories.storage import Storage
from lightning_gc.schemes.base import Scheme

State: TypeAlias = Mapping[str, Tensor]
"""Buffer name -> flat tensor."""


Unused: TypeAlias = Literal["restore", "skip", "send"]
"""See ``Memory.unused``."""


class GradientExchange(Protocol):
    """Compresses and exchanges one buffer. A memory calls it once per bucket and round."""

    def __call__(self, buffer: Tensor) -> Generator[Request, Reply, Tensor]:
        """Compress ``buffer``, leave the error in it, and return the mean over workers.

        Args:
            buffer: ``(numel,)``, changed in place.

        Returns:
            ``(numel,)``, unscaled. It overwrites ``bucket.grad`` if that has at least 32 bits per
            element. Only what is the same on all workers, a ``common`` buffer, may be added to it,
            in place. Simulated workers other than worker 0 get it only if there are such buffers.
        """

    def feedback(
        self, error: Tensor, decay: float = 1.0, gain: float = 1.0
    ) -> Generator[Request, Reply, Tensor]:
        """Exchange ``decay·error + gain·gradient``; leave what was not sent in ``error``.

        The same as ``exchange(error.mul_(decay).add_(bucket.grad, alpha=gain))``. On a GPU the sum
        is computed by the kernel that encodes it.
        """

    def dense(self, buffer: Tensor) -> Generator[Request, Reply, Tensor]:
        """Exchange ``buffer`` uncompressed, zero it, and return the mean over workers."""


class Memory(Settings, abc.ABC):
    """Decides what is compressed, given the gradient and the errors of earlier steps.

    Subclasses are frozen dataclasses of settings. Their state is a few flat buffers, one element
    per gradient element, float32 or wider, initially zero, kept by the engine by parameter name,
    between steps, in fewer bits if ``stored`` is set.

    Laws, each held by a test of the same number in ``lightning_gc.testing``:

    1. Nothing is lost if ``conserves``: over any number of steps, the sum of the applied means
       plus the mean over workers of the errors is the sum of the mean gradients.
    2. ``flow`` does not change the gradient; only the exchange does.
    3. Zero gradients and a zero state give a zero buffer.
    4. Numbers ``stored`` in fewer bits are rounded without bias, by less than one step. Storing
       restored numbers changes nothing.

    Attributes:
        buffers: names of the flat buffers. The first one is the error, which ``flow`` exchanges.
            Empty: no state, and the gradient itself is exchanged.
        conserves: law 1 holds.
        feeds_back: a step's error enters the next step, so the compressor's result must be the mean
            of what was sent.
        accumulates: the error of a step is added to the next gradient.
        lr_aware: buffers are in units of the update, learning rate times gradient: the engine
            multiplies them by γ_{t−1}/γ_t when a parameter's learning rate changes.
        common: buffers that are equal on all workers, computed from the mean.
        space: settings worth tuning, with their ranges.
        unused: what happens to a parameter without a gradient on this worker. ``"restore"``: zeros
            are sent, and its buffers except ``common`` are restored after the round, with what the
            scheme has added to the error. ``"skip"``: zeros are sent, and the error is kept; other
            buffers change. ``"send"``: its zero gradient is exchanged like any other.
        stored: how buffers are kept between steps; None: in float32 or wider. Not for ``lr_aware``
            or ``common`` buffers.
        reads_weights: ``flow`` reads ``bucket.weights``.
        rests: without an error, ``flow`` exchanges the gradient itself, so nothing is kept while
            gradients are sent whole.
        lookahead: share of its error by which a worker moves its weights during its forward and
            backward pass.
    """

    buffers: tuple[str, ...] = ()
    feeds_back: bool = True
    accumulates: bool = True
    lr_aware: bool = False
    common: tuple[str, ...] = ()
    unused: Unused = "restore"
    space: tuple[Range | Choice, ...] = ()

    @property
    def conserves(self) -> bool:
        return True

    @property
    def stored(self) -> Storage | None:
        return None

    @property
    def reads_weights(self) -> bool:
        return False

    @property
    def rests(self) -> bool:
        return False

    @property
    def lookahead(self) -> float:
        return 0.0

    @abc.abstractmethod
    def flow(self, bucket: Bucket, state: State, exchange: GradientExchange) -> Flow:
        """Combine gradient and state, exchange the result and update the state.

        Error feedback is ``yield from exchange.feedback(state["error"])``.

        Args:
            bucket: the local gradient, unscaled.
            state: the buffers, updated in place.
            exchange: call it once.
        """

    def check(self, compressor: Compressor, scheme: Scheme | None) -> None:
        """Raise ValueError if this memory cannot work with the compressor or the scheme."""
        judge("Memory", memory=self, compressor=compressor)

    def check_optimizer(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError if one of the optimizer's ``param_groups`` conflicts with it."""
        return

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Return instances for the contract tests; by default the one without arguments."""
        return (cls(),)


@dataclass(frozen=True)
class OwnMomentum(Memory):
    """A memory with momentum, which the optimizer's would be added to."""

    momentum: float = 0.9
    limits = {"momentum": "[0, 1)"}

    conserves = False

    def check_optimizer(self, group: Mapping[str, Any]) -> None:
        refuse_momentum(self, group)


def refuse_momentum(memory: Memory, group: Mapping[str, Any]) -> None:
    """Raise ValueError if one of the optimizer's ``param_groups`` has momentum, as ``memory`` has.

    Args:
        memory: for the sentence.
        group: of the optimizer.
    """
    betas = group.get("betas")
    for field, momentum in (("momentum", group.get("momentum")), ("betas", betas and betas[0])):
        given = {"field": field, "value": group.get(field), "momentum": momentum}
        judge("Optimizer", memory=memory, adds=False, **given)


@dataclass(frozen=True)
class GradientDifferences(Memory):
    """Compresses ``g − h``, where h is a worker's estimate of its gradient, which follows it.

    All workers keep the mean of all estimates too, to which they add the mean of what was sent.
    """

    # The first is what is compressed: compression in place must not change the estimate.
    buffers = ("error", "estimate", "mean_estimate")
    common = ("mean_estimate",)
    # A gradient of zero differs from the estimate like any other, and the estimate follows: it is
    # applied whether or not a worker sends.
    unused = "send"
    # A step's error is not added to a later gradient; the next difference contains it.
    conserves = accumulates = False

    @property
    @abc.abstractmethod
    def follows(self) -> float:
        """Share of what was sent by which the estimate moves, in (0, 1]."""

    def flow(self, bucket: Bucket, state: State, exchange: GradientExchange) -> Flow:
        yield from self.follow(bucket.grad, state, exchange)

    def follow(
        self,
        target: Tensor,
        state: State,
        exchange: Callable[[Tensor], Generator[Request, Reply, Tensor]],
    ) -> Generator[Request, Reply, Tensor]:
        """Send the difference between ``target`` and its estimate, and move the estimates.

        Args:
            target: ``(numel,)``, this worker's.
            state: the buffers.
            exchange: sends the difference.

        Returns:
            ``()``, bool: whether the mean is finite. If not, the estimates are as before.
        """
        error, estimate, common = (state[name] for name in GradientDifferences.buffers)
        sent = torch.sub(target, estimate, out=error).clone()
        mean = yield from exchange(error)
        sent.sub_(error)
        # Where a gradient was not finite, all workers leave their estimates, or these would never
        # again have the mean that is kept of them.
        valid = mean.isfinite().all()
        estimate.add_(sent.mul_(self.follows).masked_fill_(~valid, 0))
        moved = torch.where(valid, mean, 0).mul_(self.follows)
        mean.add_(common)
        common.add_(moved)
        return valid
