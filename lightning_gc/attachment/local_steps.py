"""AttachedRounds: exchange differences of weights every H steps, for all ways in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from lightning_gc.attachment.attached import Attached, InBackground, Setup, peers_of
from lightning_gc.exchange.peers import Peers, take_over
from lightning_gc.exchange.synchronizer import Synchronizer
from lightning_gc.exchange.validation import digest_of
from lightning_gc.local_steps import OuterSGD
from lightning_gc.local_steps.local_rounds import (
    Exchanger,
    LocalRounds,
    finished,
    reset_poisoned,
)
from lightning_gc.local_steps.round_plan import RoundPlan


class RoundExchange(Exchanger, InBackground, Protocol):
    """Carries out the exchanges of one real worker until it is closed."""


@dataclass(frozen=True)
class Meeting:
    """A worker's connection to the other workers.

    Attributes:
        exchange: carries out the exchanges; it has started the worker's engine.
        peers: the other workers, for a controller's decisions.
        begin: gives a module the weights and buffers that all workers begin with.
    """

    exchange: RoundExchange
    peers: Peers
    begin: Callable[[nn.Module], None]


Meet = Callable[[Setup, Mapping[str, str]], Meeting]
"""Connects a worker, given the settings that must be equal on all workers, as text."""


def among_ranks(setup: Setup, agreed: Mapping[str, str]) -> Meeting:
    """Connect a worker to all ranks of the default process group, whose number is fixed."""
    synchronizer = Synchronizer(
        setup.workers,
        setup.device,
        timeout=setup.timeout,
        revocable=True,
        agreed=agreed,
        verify=setup.verify,
    )
    return Meeting(synchronizer, peers_of(setup.device, None, None), take_over)


class AttachedRounds(Attached):
    """Handle of a module whose workers exchange differences of weights every H steps.

    Args:
        module: that is trained, without a wrapper.
        setup: as for ``Attached``.
        plan: when what is exchanged.
        outer: the step of the common weights.
        keep: takes the rounds of this process, before the control loop sets H.
        meet: connects this worker to the others.

    Attributes:
        rounds: of this worker.
    """

    rounds: LocalRounds

    def __init__(
        self,
        module: nn.Module,
        setup: Setup,
        plan: RoundPlan,
        outer: OuterSGD,
        keep: Callable[[Sequence[LocalRounds]], None],
        meet: Meet = among_ranks,
    ) -> None:
        setup.workers.name(module)
        tensors = (*module.named_parameters(), *module.named_buffers())
        layout = {name: tuple(tensor.shape) for name, tensor in tensors}
        agreed = {
            "plan": repr(plan),
            "outer": repr(outer),
            "names and shapes of parameters and buffers": digest_of(layout),
        }
        meeting = meet(setup, setup.agreed | agreed)
        self._keep, self._meeting, self._outer, self._plan = keep, meeting, outer, plan
        super().__init__(module, setup, meeting.peers, meeting.exchange)

    def _start(self) -> None:
        self._meeting.begin(self._module)
        workers, exchange = self._workers, self._meeting.exchange
        self.rounds = LocalRounds(
            *(self._module, workers.names, workers.first, exchange, self._plan, self._outer)
        )
        self._keep([self.rounds])
        super()._start()

    def after_pass(self) -> None:
        """Do nothing: a worker's own steps exchange no gradients."""

    def stepped(self, ends: bool = False) -> None:
        """Count this worker's own step; exchange what is due.

        Args:
            ends: it was the last one, so everything is exchanged.
        """
        if ends or self.rounds.is_due:
            self.refuse_unsynchronised()
        optimizers = self._setup.optimizers()
        rate = max(float(group["lr"]) for group in optimizers[0].param_groups)
        if not finished(self.rounds.stepped(ends, rate)):
            reset_poisoned(optimizers)

    def end_rounds(self) -> None:
        """Exchange everything now, so that all workers have the common weights."""
        finished(self.rounds.ending())
