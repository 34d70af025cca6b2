"""RoundPlan: the settings of local steps, declared and checked once, and those it is made of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypedDict

from fsspec.registry import known_implementations, registry
from torch import Tensor

from lightning_gc.compressors import Compressor
from lightning_gc.controllers import Budget, Controller
from lightning_gc.core.combinations import judge
from lightning_gc.core.refusal import refuse
from lightning_gc.core.settings import Settings
from lightning_gc.exchange.validation import make_controller
from lightning_gc.local_steps.unequal import Unequal
from lightning_gc.memories import Memory
from lightning_gc.transports.interfaces import host_and_port, is_host

MIXED = 0.5
"""Share of a worker's own weights in ``merge="mix"``."""
_LONGEST = 1e9
"""Most seconds that a worker can be told to wait; beyond, the system's clocks overflow."""


@dataclass(frozen=True)
class OuterSGD(Settings):
    """SGD on the common weights θ, with the mean Δ̄ over workers of "θ minus own weights".

    ``v ← μ·v + Δ̄``, then ``θ ← θ − η·v``, or with ``nesterov`` ``θ ← θ − η·(Δ̄ + μ·v)``, as
    ``torch.optim.SGD`` does. The default, η = 1 and μ = 0, averages the workers' weights (local
    SGD). Momentum costs one float32 per parameter, the same on all workers.

    Args:
        lr: η, above 0, constant. Above 1 goes beyond the mean of the weights, below 1 stays behind.
        momentum: μ, in [0, 1). Higher averages over more rounds; needs hundreds of them.
        nesterov: Nesterov momentum.

    Raises:
        ValueError: a value outside these ranges, ``nesterov`` without momentum.

    Example:
        >>> import torch
        >>> from lightning_gc import OuterSGD
        >>> weights = torch.tensor([1.0, 2.0])
        >>> OuterSGD().step(weights, None, torch.tensor([0.5, -0.5]))
        >>> weights
        tensor([0.5000, 2.5000])
        >>> OuterSGD.diloco()
        OuterSGD(lr=0.7, momentum=0.9, nesterov=True)

    Reference:
        Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.
        Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    limits = {
        "lr": "(0, inf) the outer learning rate; 1.0, which averages the workers' weights",
        "momentum": "[0, 1); 0.9, or 0.0 for none",
    }

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            refuse(
                "OuterSGD(nesterov=True) needs momentum; use OuterSGD.diloco(), or nesterov=False"
            )

    @classmethod
    def diloco(cls) -> OuterSGD:
        """Return DiLoCo's settings."""
        return cls(lr=0.7, momentum=0.9, nesterov=True)

    def step(self, weights: Tensor, velocity: Tensor | None, mean: Tensor) -> None:
        """Make one step.

        Products are rounded before they are added: whether they are fused depends on a device's
        instructions, and on an element's place, and all workers must get the same bits.

        Args:
            weights: θ, changed in place.
            velocity: v, changed in place; None without momentum.
            mean: Δ̄, left as it is.
        """
        update = mean
        if velocity is not None:
            velocity.mul_(self.momentum).add_(mean)
            update = (velocity * self.momentum).add_(mean) if self.nesterov else velocity
        weights.sub_(update * self.lr)


@dataclass(frozen=True)
class InnerMoments(Settings):
    """Average moments of the workers' own optimizers every so many rounds (DES-LOC).

    Round r ends with the mean of the weights, as ever. Where K divides r, it also ends with the
    mean over workers of a moment: ``u_i ← mean_j u_j``. Second moments change slowly, so they need
    fewer averages than first ones, and both need fewer than the weights.

    Moments are sent uncompressed: an average costs as many bytes as a round of ``Identity()`` for
    each moment. A parameter that a worker's optimizer has no state of counts as zero there.

    Args:
        periods: name of a moment in the optimizers' state -> K, in rounds, at least 1. AdamW has
            ``exp_avg`` and ``exp_avg_sq``, SGD and Muon have ``momentum_buffer``.

    Raises:
        ValueError: no moments, or a period below 1; also, when a round ends, a moment that no
            optimizer keeps, or whose shape is not the parameter's.

    Example:
        >>> from lightning_gc import InnerMoments
        >>> moments = InnerMoments({"exp_avg": 2, "exp_avg_sq": 6})
        >>> [moments.due(ended) for ended in (1, 2, 6)]
        [(), ('exp_avg',), ('exp_avg', 'exp_avg_sq')]

    Reference:
        Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training
        Foundation Models", 2025. There a period is in steps; here it is in rounds of H steps.
    """

    periods: Mapping[str, int] = field(default_factory=lambda: {"exp_avg": 3, "exp_avg_sq": 6})

    def __post_init__(self) -> None:
        if not self.periods:
            refuse("InnerMoments(periods={}): name a moment, such as {'exp_avg': 3}")
        for name, rounds in self.periods.items():
            if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
                why = f"the period of {name} must be a number of rounds, 1 or more; use 3"
                refuse("InnerMoments", why, periods=dict(self.periods))

    def due(self, ended: int) -> tuple[str, ...]:
        """Return the moments that are averaged at the end of this round, counted from 1."""
        return tuple(name for name, every in self.periods.items() if ended % every == 0)


@dataclass(frozen=True)
class GrowingRounds(Settings):
    """Let a round have ``H = max(base, ⌊(α/η)²⌋)`` steps, where η is the learning rate.

    As η falls workers drift apart more slowly, so that rounds may be longer for the same distance.
    η is the largest learning rate of the last step before the round, mean over workers. The first
    round, and one before which η has risen since the round before, as in a warm-up, has ``base``
    steps.

    Args:
        alpha: α, above 0, in units of the learning rate: H = 1 where η = α. Higher exchanges less
            often. With a largest rate η₀ a first try is ``η₀·√base``.
        base: fewest steps of a round, at least 1.
        longest: most steps of a round; None: up to the end of the run.

    Raises:
        ValueError: a value outside these ranges.

    Example:
        >>> from lightning_gc import GrowingRounds
        >>> rounds = GrowingRounds(alpha=0.02, base=4)
        >>> [rounds.length(rate, before=0.01) for rate in (0.01, 0.005, 0.002)]
        [4, 16, 100]

    Reference:
        Gu, Lyu, Arora, Zhang and Huang, "A Quadratic Synchronization Rule for Distributed Deep
        Learning", ICLR 2024.
    """

    alpha: float
    base: int = 4
    longest: int | None = None
    limits = {
        "alpha": "(0, inf) alpha, in units of the learning rate,; the largest rate times √base",
    }

    def __post_init__(self) -> None:
        for name, steps in (("base", self.base), ("longest", self.longest)):
            if steps is not None and (not isinstance(steps, int) or steps < 1):
                refuse(f"GrowingRounds({name}={steps!r}): give a number of steps, 1 or more")
        if self.longest is not None and self.longest < self.base:
            refuse(
                f"GrowingRounds(base={self.base}, longest={self.longest}): the longest round has "
                f"fewer steps than the shortest; exchange the two"
            )

    def length(self, rate: float, before: float | None) -> int:
        """Return H of a round.

        Args:
            rate: η, before the round.
            before: η before the round before it; None in the first one.
        """
        if before is None or rate > before:
            return self.base
        most = 2**62 if self.longest is None else self.longest
        squared = (self.alpha / rate) ** 2 if rate > 0 else math.inf
        return max(self.base, math.floor(min(squared, most)))


@dataclass(frozen=True)
class Elastic(Settings):
    """Let workers of local steps die, leave and join while the others go on.

    Every worker is a job of its own: ``Trainer(devices=1, num_nodes=1, max_steps=...)`` with the
    same ``LocalStepsStrategy``. One more job joins a run; a job that gets Ctrl-C or SIGTERM leaves
    it. A round is committed when all its members have the same result; if one of them dies, the
    others repeat the round with the same differences and errors. With
    ``LocalStepsStrategy(island=N)`` each job has N processes, which end together.

    Args:
        rendezvous: ``"host:port"``, where ``lightning-gc rendezvous`` listens. If nobody listens
            there and it is an address of this machine, this job does. Or a folder, for workers
            without ports between them: a path from ``/``, ``./`` or ``~``, or a URL of fsspec
            such as ``"s3://bucket/run"``. No process serves there; one of the workers decides.
        min_workers: fewest members of a round. With fewer, workers wait.
        grace: seconds that a round waits, after its first member has asked for it, for those that
            have not. A worker that comes later loses its steps of the round. A worker that has
            been silent for so long is not waited for. A run begins as late after the first
            ``min_workers`` have come.
        timeout: seconds of a message between workers. A worker that says nothing for so long is
            dead.
        patience: seconds that a worker waits for a rendezvous, or for ``min_workers``.
        secret: a long random text that all jobs and the rendezvous share, such as one of ``openssl
            rand -base64 32``. Without it everybody who reaches the rendezvous may take part, and
            change the training.
        number: this worker's number; None: the rendezvous gives one.
        address: host that the other workers reach this machine by; None: its address on the way
            to the rendezvous.
        ports: first and last port on which it serves snapshots to workers that join; None: any.
        roll: file to which the roll is written, if this job serves the rendezvous. In a folder,
            every job that gives a file writes one. A run of the file continues there. Another run
            gets the file, and the former rounds a free name.

    Raises:
        ValueError: no ``"host:port"``, an empty secret, or a number out of range.

    Example:
        >>> from lightning_gc import Elastic
        >>> Elastic("10.0.0.1:29400", min_workers=3, secret="a long text")
        Elastic(rendezvous='10.0.0.1:29400', min_workers=3, grace=5.0, timeout=30.0)
    """

    rendezvous: str | Path
    min_workers: int = 2
    grace: float = 5.0
    timeout: float = 30.0
    patience: float = field(default=600.0, repr=False)
    secret: str | None = field(default=None, repr=False)
    number: int | None = field(default=None, repr=False)
    address: str | None = field(default=None, repr=False)
    ports: tuple[int, int] | None = field(default=None, repr=False)
    roll: str | Path | None = field(default=None, repr=False)
    limits = {
        "grace": f"[0, {_LONGEST:g}] the number of seconds",
        "timeout": f"[1, {_LONGEST:g}] the number of seconds",
        "patience": f"[1, {_LONGEST:g}] the number of seconds",
    }

    @property
    def in_folder(self) -> bool:
        """Whether workers meet in a folder, and not at an address."""
        where = self.rendezvous
        begins = isinstance(where, str) and where.startswith(("/", "./", "../", "~"))
        return isinstance(where, Path) or begins or "://" in str(where)

    def _check_folder(self) -> None:
        scheme, found, _ = str(self.rendezvous).partition("://")
        stores = {*known_implementations, *registry} - {"http", "https"}
        if found and scheme not in stores:
            refuse(
                f"Elastic(rendezvous={self.rendezvous!r}): fsspec cannot write to {scheme}://; "
                f"give host and port without a scheme, such as '10.0.0.1:29400', a path, or a URL "
                f"of fsspec, such as 's3://bucket/run'"
            )
        if self.address is not None or self.ports is not None:
            refuse(
                f"Elastic(rendezvous={str(self.rendezvous)!r}, address={self.address!r}, "
                f"ports={self.ports!r}): nothing listens where workers meet in a folder; leave "
                f"address and ports out"
            )

    def __post_init__(self) -> None:
        if self.in_folder:
            self._check_folder()
        elif "/" in str(self.rendezvous):
            why = "give host and port, such as '10.0.0.1:29400', or a folder that begins with "
            refuse("Elastic", f"{why}/, ./ or ~, such as './meeting'", rendezvous=self.rendezvous)
        else:
            host_and_port(self.rendezvous, "Elastic", "rendezvous")
        check_secret(self.secret, "Elastic")
        if not _is_whole(self.min_workers) or self.min_workers < 1:
            refuse("Elastic", "use 1 or more, such as 2, as an int", min_workers=self.min_workers)
        if self.number is not None and (not _is_whole(self.number) or self.number < 0):
            why = "numbers begin with 0; give an int, or leave it out"
            refuse("Elastic", why, number=self.number)
        if self.address is not None and not (
            isinstance(self.address, str) and is_host(self.address)
        ):
            why = "give this machine's host without a port, such as '10.0.0.2'"
            refuse("Elastic", why, address=self.address)
        if self.ports is not None and not _are_ports(self.ports):
            why = "give the first and the last port, such as (29500, 29520)"
            refuse("Elastic", why, ports=self.ports)
        if self.roll is not None and (not isinstance(self.roll, str | Path) or not str(self.roll)):
            refuse("Elastic", "give the name of a file, such as 'roll.jsonl'", roll=self.roll)


def check_secret(secret: Any, owner: str) -> None:
    """Raise ValueError if a secret is neither None nor a text that all can have equally."""
    if secret is None or (isinstance(secret, str) and secret and secret == secret.strip()):
        return
    found = "is empty" if isinstance(secret, str) else f"is of type {type(secret).__name__}"
    if isinstance(secret, str) and secret.strip():
        found = "begins or ends with white space; use its strip()"
    refuse(
        f"{owner}(secret=...): the secret {found}. Give a long random text, or leave it out if "
        f"everyone who reaches the port may take part"
    )


def _is_whole(value: Any) -> bool:
    return type(value) is int  # reports are JSON, and 2.0 or True is not a count there


def _are_ports(ports: Any) -> bool:
    pair = isinstance(ports, tuple | list) and len(ports) == 2 and all(map(_is_whole, ports))
    return pair and 0 < ports[0] <= ports[1] < 1 << 16


class RoundFields(TypedDict, total=False):
    """The fields of ``RoundPlan``, for type checkers."""

    every: int | GrowingRounds | Budget
    outer: OuterSGD
    delay: int
    merge: Literal["rebase", "mix"]
    fragments: int
    moments: InnerMoments | None
    unequal: Unequal | None
    island: int
    elastic: Elastic | None
    buffers: Literal["mean", "own"] | Collection[str]


@dataclass(frozen=True)
class RoundPlan:
    """Settings of local steps: what is exchanged, when, with whom, and how it is taken over.

    ``LocalStepsStrategy``, ``SimulatedLocalStepsStrategy`` and ``LocalSteps`` take these fields as
    arguments: ``LocalStepsStrategy(QSGD(4), every=32, island=8)``.

    A round has H optimizer steps. Fragment i of P is exchanged after ``⌈(i + 1)·H/P⌉`` of them. Its
    result is taken over ``delay`` steps later, while training continues.

    Args:
        every: H, in optimizer steps, at least 1. More sends less, and lets workers drift apart. The
            last round of a fit is shorter. ``GrowingRounds(alpha)``: H grows as the learning rate
            falls. ``Budget(share)``, of ``lightning_gc.controllers``: H is chosen so that exchanges
            take at most that share of the time.
        outer: the step of the common weights; the default averages the workers' weights.
        delay: steps of overlap, fewer than between two exchanges. 0: workers wait. Else training
            goes on during the exchange, and its result is taken over so many steps later.
        merge: with a delay, how. ``"rebase"``: the new common weights, plus how far the worker has
            come since it has sent. ``"mix"``: the mean of these and its own weights.
        fragments: P, at least 1. Parameters are exchanged in so many parts, one after the other,
            each every H steps: smaller messages, more evenly spread.
        moments: ``InnerMoments()`` averages moments of the optimizers too, every few rounds. None:
            each worker keeps its own.
        unequal: how workers that differ in speed, data or health share a round; None: all make H
            steps and count equally.
        island: N, the number of consecutive ranks that train as one worker, such as a node's. They
            average their gradients in each step. All workers have N processes.
        elastic: where workers meet that may die, leave and join. Each is then a separate job.
        buffers: ``"mean"``: each exchange averages buffers with floating point, as running
            statistics need it. ``"own"``: each worker keeps its own buffers. Or names of those that
            stay own, as ``("queue", "*.amax_history")``; ``*`` stands for anything. A mean is no
            queue of features, no extreme and no history.
        owner: the strategy or class with these arguments, for error messages.

    Raises:
        ValueError: a value out of its range, or two settings that exclude each other.

    Example:
        >>> from lightning_gc.local_steps import RoundPlan
        >>> plan = RoundPlan(every=32, fragments=4)
        >>> [step for step in range(1, 33) if plan.due(step, 32)]
        [8, 16, 24, 32]
    """

    every: int | GrowingRounds | Budget = 32
    outer: OuterSGD = OuterSGD()
    delay: int = 0
    merge: Literal["rebase", "mix"] = "rebase"
    fragments: int = 1
    moments: InnerMoments | None = None
    unequal: Unequal | None = None
    island: int = 1
    elastic: Elastic | None = None
    buffers: Literal["mean", "own"] | Collection[str] = "mean"
    owner: str = field(default="RoundPlan", repr=False, compare=False)

    @property
    def arguments(self) -> dict[str, Any]:
        """The fields as a strategy takes them."""
        return {name: value for name, value in vars(self).items() if name != "owner"}

    @property
    def agreed(self) -> dict[str, str]:
        """The settings that must be equal on all workers, as text.

        An island is compared where it is made, and each elastic job has its own address.
        """
        own = ("island", "elastic")
        return {name: repr(value) for name, value in self.arguments.items() if name not in own}

    @property
    def growing(self) -> GrowingRounds | None:
        """The rule for H of each round; None: H is ``every``."""
        return self.every if isinstance(self.every, GrowingRounds) else None

    @property
    def shortest(self) -> int:
        """H, or the fewest steps of growing rounds, or of a budget's."""
        if isinstance(self.every, GrowingRounds):
            return self.every.base
        return self.every.shortest if isinstance(self.every, Budget) else self.every

    def controller(self, given: Controller | str | None) -> Controller | str | None:
        """Return the controller: as given, or a budget's with the one that is given for levels."""
        if not isinstance(self.every, Budget):
            return given
        if given is None:
            return self.every
        levels = make_controller(given, self.owner)
        judge("Budget of local steps", self.owner, plan=self, levels=levels)
        return dataclasses.replace(self.every, levels=levels)

    def own_buffers(self, names: Collection[str]) -> frozenset[str]:
        """Return which of a module's buffers stay each worker's own.

        Raises:
            ValueError: a pattern fits none of the names.
        """
        if isinstance(self.buffers, str):
            return frozenset(names if self.buffers == "own" else ())
        for pattern in self.buffers:
            if not any(fnmatchcase(name, pattern) for name in names):
                near = ", ".join(map(repr, get_close_matches(pattern, names, 3, 0.0)))
                had = f"did you mean one of {near}" if near else "the module has no buffer"
                why = f"{pattern!r} fits no buffer of the module; {had}"
                refuse(self.owner, why, buffers=self.buffers)
        return frozenset(n for n in names if any(fnmatchcase(n, each) for each in self.buffers))

    def due(self, position: int, length: int) -> list[int]:
        """Return the fragment that is exchanged after ``position`` steps of a round, if any.

        Args:
            position: steps of the round that are done.
            length: H of this round, at least ``shortest``.
        """
        ends = [-(-(index + 1) * length // self.fragments) for index in range(self.fragments)]
        return [index for index, end in enumerate(ends) if end == position]

    def __post_init__(self) -> None:
        self._whole("every", self.shortest, 1, "optimizer steps between two exchanges", 32)
        self._whole("fragments", self.fragments, 1, "parts of the parameters", 1)
        self._whole("delay", self.delay, 0, "steps until the result is taken over", 0)
        if self.merge not in ("rebase", "mix"):
            refuse(self.owner, "use 'rebase' or 'mix'", merge=self.merge)
        devices = "the number of devices of a node"
        self._whole("island", self.island, 1, "processes that train as one worker", devices)
        given: Any
        for name, cls in (("outer", OuterSGD), ("moments", InnerMoments), ("unequal", Unequal)):
            given = getattr(self, name)
            if not isinstance(given, cls) and (given is not None or name == "outer"):
                refuse(self.owner, f"give an instance, such as {cls.__name__}()", **{name: given})
        self._check_buffers()
        given = self.elastic
        if given is not None and not isinstance(given, Elastic):
            where = given if isinstance(given, str) else "10.0.0.1:29400"
            why = f"give elastic=Elastic({where!r}), or leave it out"
            refuse(self.owner, why, elastic=given)
        apart = self.shortest // self.fragments
        judge("Local steps", self.owner, plan=self, apart=apart, most=apart - 1)

    def _check_buffers(self) -> None:
        given: Any = self.buffers
        if given in ("mean", "own"):
            return
        if isinstance(given, str):
            why = f"use 'mean' or 'own', or names in a tuple, such as ({given!r},)"
            refuse(self.owner, why, buffers=given)
        names = isinstance(given, Collection) and all(isinstance(each, str) for each in given)
        if not names or not given:
            refuse(self.owner, "use 'mean' or 'own', or names, such as ('queue',)", buffers=given)
        object.__setattr__(self, "buffers", tuple(sorted(given)))  # equal on all workers

    def check(self, compressor: Compressor, memory: Memory, controller: Controller | None) -> None:
        """Raise ValueError for settings that need gradients: exchanged are differences of weights.

        Such a difference already contains the learning rates.

        Args:
            compressor: of the differences.
            memory: of errors of these differences.
            controller: of levels or of H, or None.
        """
        given = {"compressor": compressor, "memory": memory, "controller": controller}
        needs = None if controller is None else controller.needs
        place = "Local steps exchange differences of weights"
        judge(place, self.owner, **given, plan=self, outer=self.outer, needs=needs)
        for steps in () if needs is None else needs.rounds:
            dataclasses.replace(self, every=steps)  # checks it

    def _whole(self, name: str, value: Any, least: int, what: str, such_as: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            why = f"give the number of {what}, {least} or more; use {such_as}"
            refuse(self.owner, why, **{name: getattr(self, name)})
