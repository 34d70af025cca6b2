"""Memory: base class of error feedback rules, each a flow around the compressed exchange."""

from __future__ import annotations

import abc
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias

from torch import Tensor

from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Flow, Reply, Request
from lightning_gc.core.search_space import Choice, Range
from lightning_gc.core.settings import Settings
from lightning_gc.memories.storage import Storage

State: TypeAlias = Mapping[str, Tensor]
"""Buffer name -> flat tensor."""


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

    def dense(self, buffer: Tensor) -> Generator[Request, Reply, Tensor]:
        """Exchange ``buffer`` uncompressed, zero it, and return the mean over workers."""


class Memory(Settings, abc.ABC):
    """Decides what is compressed, given the gradient and the errors of earlier steps.

    Subclasses are frozen dataclasses of settings. Their state is a few flat buffers, one element
    per gradient element, float32 or wider, initially zero, kept by the engine by parameter name,
    between steps in fewer bits where ``stored`` says so.

    Laws, each held by a test of the same number in ``lightning_gc.testing``:

    1. Nothing is lost, if ``conserves``: over any number of steps, the sum of the applied means
       plus the mean over workers of the errors is the sum of the mean gradients.
    2. ``flow`` does not change the gradient; only the exchange does.
    3. Zero gradients and a zero state give a zero buffer.
    4. What is ``stored`` in fewer bits is rounded without bias, by less than one step; and storing
       what has been restored changes nothing.

    Attributes:
        buffers: names of the flat buffers. The first one is the error, which ``flow`` exchanges.
            Empty: no state, and the gradient itself is exchanged.
        conserves: law 1 holds.
        feeds_back: a step's error enters the next step, so the compressor's result must be the mean
            of what was sent.
        accumulates: what a step leaves is added to the next gradient, so that it adds up.
        corrects_momentum: momentum is accumulated before compression, so the compressor must be
            biased (there must be an error to correct).
        lr_aware: buffers are in units of the update, learning rate times gradient: the engine
            multiplies them by γ_{t−1}/γ_t when a parameter's learning rate changes.
        common: those of ``buffers`` that are equal on all workers, computed from the mean.
        space: settings worth tuning, with their ranges.
        holds_idle: where a parameter has no gradient on a worker, its buffers, but common ones, are
            put back after the round; what the scheme has added to the error is kept.
        sets_aside: where a parameter has no gradient on a worker, what it would send is kept from
            the exchange, and zeros are sent.
        stored: how buffers are kept between steps; None: in float32 or wider. Not for those that
            are ``lr_aware`` or ``common``.
        reads_weights: ``flow`` reads ``bucket.weights``.
        lookahead: share of its error by which a worker moves its weights during its forward and
            backward pass.
    """

    buffers: tuple[str, ...] = ()
    feeds_back: bool = True
    accumulates: bool = True
    corrects_momentum: bool = False
    lr_aware: bool = False
    common: tuple[str, ...] = ()
    holds_idle: bool = True
    sets_aside: bool = True
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
    def lookahead(self) -> float:
        return 0.0

    @abc.abstractmethod
    def flow(self, bucket: Bucket, state: State, exchange: GradientExchange) -> Flow:
        """Combine gradient and state, exchange the result and update the state.

        Error feedback is ``yield from exchange(state["error"].add_(bucket.grad))``.

        Args:
            bucket: the local gradient, unscaled.
            state: the buffers, updated in place.
            exchange: call it once.
        """

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

    conserves = False

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"{type(self).__name__}(momentum={self.momentum!r}): it must be in [0, 1); use 0.9."
            )

    def check_optimizer(self, group: Mapping[str, Any]) -> None:
        betas = group.get("betas")
        for field, momentum in (("momentum", group.get("momentum")), ("betas", betas and betas[0])):
            if momentum:
                raise ValueError(
                    f"{self!r} has the momentum, so the optimizer must have none, but its {field} "
                    f"is {group[field]!r}; use torch.optim.SGD with momentum=0, AdamW with "
                    f"betas=(0.0, 0.999), or memory=ErrorFeedback()."
                )
