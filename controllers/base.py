"""Define controllers: pure policies that map an epoch's observation to the next level."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from lightning_gc.core.combinations import judge
from lightning_gc.core.settings import Settings

State = dict[str, Any]
"""A controller's state: numbers, strings, lists and dicts of these."""

Level = float | None
"""Value of a compressor's knob; None means uncompressed."""


class Point(NamedTuple):
    """Error and bytes of one level.

    Attributes:
        level: value of the knob.
        error: ``‖x − C(x)‖``.
        nbytes: of one worker's message.
    """

    level: float
    error: float
    nbytes: float


class Curve(NamedTuple):
    """Error and bytes of a gradient at several levels.

    Attributes:
        norm: ``‖x‖`` of the gradient summed over the epoch, in units of the gradient.
        points: one per level.
    """

    norm: float
    points: tuple[Point, ...]


class ExchangeRecord(NamedTuple):
    """One request of a worker.

    Attributes:
        messages: that it sent.
        nbytes: that it sent in all.
        seconds: that the request took. On CUDA from when its stream has reached the request until
            it has finished it. Both include waiting for a late peer; see ``Observation.exchanges``.
    """

    messages: float
    nbytes: float
    seconds: float


class Candidate(NamedTuple):
    """One choice of a menu, and the predicted seconds of a step with it.

    Attributes:
        level: the choice; None: uncompressed.
        name: as in the menu.
        step_seconds: predicted for a step, less the seconds of a step with the present choice.
    """

    level: Level
    name: str
    step_seconds: float


class Weighed(NamedTuple):
    """All choices of a menu with their predicted seconds.

    Attributes:
        seconds: that it took to find this out, between two steps.
        candidates: one for each choice, in the order of their levels; the last one is uncompressed.
        sixteen: name of the choice that sends 16 bits of each element, as a hook of torch does.
        workers: W; 0 if not declared.
    """

    seconds: float
    candidates: tuple[Candidate, ...]
    sixteen: str = ""
    workers: int = 0


@dataclass(frozen=True)
class Needs:
    """Observations that a controller needs, each with a cost per step.

    Attributes:
        gradients: ``Observation.gradient_norms`` of the sum over the epoch, or of the epoch's first
            batch; then it also decides after the first step of every epoch. Costs one float32 per
            parameter, and a pass over the gradient.
        moments: ``gradient_noise``, ``gradient_squared`` and ``gradient_dissimilarity``. Costs the
            same, and one dense all-reduce at the end of an epoch.
        errors: ``total_error`` and ``total_error_update``, and ``error_norms`` at the end of an
            epoch. Costs one pass over the error.
        scale: ``gradient_scale`` and ``rates_ahead``. Costs one pass over the gradient, and one
            over the run's schedule.
        curves: levels of ``error_curves``, computed at the end of an epoch. Costs one
            float32 per parameter, a pass over the gradient, and at the end of an epoch one
            compression per level of every parameter, on worker 0.
        seconds: ``step_seconds``, ``each_step``, ``phase_seconds``. Costs a look at the clock per
            step; on CUDA ``each_step`` costs an event.
        link: ``exchanges`` and the link fitted to them. Costs two looks at the clock per request,
            or two events on CUDA, and two all-reduces of numbers per decision.
        trace: path of a file to which worker 0 appends each observation, state and decision; empty
            for none. ``replay`` reads it.
        rounds: all values of H that it may set in ``Decision.every``; it needs local steps.
            Costs nothing.
        weighed: it may ask for ``Observation.weighed`` by ``Decision.weigh``; it needs a ``Menu``.
            Costs three to nine exchanges of a part of the gradient with each choice, when it asks.
    """

    gradients: Literal["none", "epoch sum", "first batch"] = "none"
    moments: bool = False
    errors: bool = False
    scale: bool = False
    curves: tuple[float, ...] = ()
    seconds: bool = False
    link: bool = False
    trace: str = ""
    rounds: tuple[int, ...] = ()
    weighed: bool = False

    def __post_init__(self) -> None:
        if self.curves and self.gradients == "first batch":
            raise ValueError(
                "error curves need the gradients' epoch sum, and the first batch's gradients are "
                "needed too; only one of these is kept."
            )

    @property
    def sums(self) -> Literal["none", "epoch sum", "first batch"]:
        """The gradients to keep: for ``gradient_norms``, or for ``error_curves``."""
        return "epoch sum" if self.curves else self.gradients

    def __or__(self, other: Needs) -> Needs:
        """Return the needs of both controllers.

        Raises:
            ValueError: one needs gradients of the epoch, the other of its first batch.
        """
        wanted = sorted({self.gradients, other.gradients} - {"none"})
        if len(wanted) > 1:
            raise ValueError(
                f"one needs the gradients' {', the other their '.join(wanted)}; only one of these "
                f"is kept."
            )
        return Needs(
            gradients=other.gradients if self.gradients == "none" else self.gradients,
            moments=self.moments or other.moments,
            errors=self.errors or other.errors,
            scale=self.scale or other.scale,
            curves=tuple(sorted({*self.curves, *other.curves})),
            seconds=self.seconds or other.seconds,
            link=self.link or other.link,
            trace=self.trace or other.trace,
            rounds=tuple(sorted({*self.rounds, *other.rounds})),
            weighed=self.weighed or other.weighed,
        )


@dataclass(frozen=True)
class Observation:
    """Plain numbers on which a controller may base a decision.

    The first one comes before the first step, with ``epoch=-1``, no metrics and no norms. Bytes,
    elements and steps count since the last decision.

    Attributes:
        epoch: the last finished epoch, from 0; -1 before the end of the first one.
        learning_rate: of the last step.
        next_learning_rate: of the next step.
        metrics: logged values by name, worker 0's.
        step_metrics: names of metrics of the last batch only, not of the epoch.
        gradient_norms: parameter name -> norm of worker 0's local, raw gradients, as the controller
            declares: summed over the epoch, told at its end, or of its first batch, told from the
            next step on. Compressed parameters only.
        error_norms: parameter name -> norm of worker 0's error, at the end of an epoch; if needed.
        total_error: ``Σ‖e_t‖²`` over all steps so far, in units of the gradient, mean over workers;
            0 if not declared.
        total_error_update: ``Σ γ_t²·‖e_t‖²``, in units of the update, with each parameter's own
            learning rate γ_t; 0 if not declared.
        gradient_scale: root mean square of the elements of local gradients, over the steps since
            the last decision and over workers; 0 if not declared.
        rates_ahead: mean learning rate of each of equal parts of the rest of the run, by its
            schedulers; empty if not declared or not known.
        wire_bytes: bytes sent, mean over workers.
        dense_bytes: bytes that plain DDP would have sent.
        steps: number of rounds.
        num_elements: elements of all gradients, the papers' d.
        sizes: parameter name -> elements, of those that the compressor takes.
        num_compressed: elements of tensors that the compressor takes; the others are sent
            uncompressed.
        sent_elements: elements sent, compressed or not, mean over workers.
        max_epochs: epochs of the run; None if it has no end.
        progress: finished share of the run, in [0, 1]; None if it has no end.
        ended: an epoch has just ended, or the run begins; False within an epoch.
        resumed: the run has been resumed since the epoch began, or at its end, so a metric may be
            missing that was logged before the checkpoint, or would have been without the stop.
        gradient_noise: ``E‖g − ∇f_i‖²``, estimated at the end of an epoch from its steps, mean over
            workers; 0 if not declared. Changes of ∇f_i within the epoch count as noise.
        gradient_squared: ``‖∇f_i‖²``, estimated at the same time. Unbiased, so it may be below 0.
        gradient_dissimilarity: ``mean_i‖∇f_i − ∇f‖²`` over workers i, estimated at the same time.
        levels: parameter name -> level in force since the last decision, after clamping.
        error_curves: parameter name -> error and bytes by level, of worker 0's gradients summed
            over the epoch, at its end; empty if not declared. Parameters with a gradient that is
            not finite are left out.
        step_seconds: mean seconds of a step since the last decision, without validation; mean over
            workers, 0 if not declared. Of simulated workers the sum of their phases.
        phase_seconds: ``"compress"``, ``"communicate"``, ``"wait"``, ``"decode"``, of simulated
            workers also ``"compute"`` -> mean seconds per step, mean over workers. But
            ``"communicate"`` is the least of all workers, and ``"wait"`` what it takes longer in
            the mean: a worker that comes early waits for the slowest. On CUDA they are too small:
            only steps that ``CompressionMonitor`` logs are timed, and all steps are counted.
        exchanges: the latest requests since the last decision, 64 at most, of the worker with
            the shortest requests, so that they contain the least waiting; empty if not declared. On
            CUDA the latest that the device has finished since then.
        latency_us: of a message, fitted to ``exchanges``; 0 without exchanges.
        bandwidth_gbps: in 10⁹ bits per second, fitted to ``exchanges``; a lower bound if all
            messages have one size.
        link_r2: share of the variance of their seconds that the fit explains.
        weight_sizes: as ``sizes``, of the weights that FSDP gathers compressed.
        weight_levels: as ``levels``, of these weights.
        each_step: seconds of each step since the last decision, worker 0's, at most 64; empty if
            not declared. Of simulated workers all are the mean. On CUDA the device's.
        weighed: None unless the last decision asked for it. It has no candidates while a worker
            compiles kernels.
        optimizers: names of the optimizers' classes.
        total_steps: steps of the run; None if unknown or without end.
    """

    epoch: int
    learning_rate: float = 0.0
    next_learning_rate: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    step_metrics: tuple[str, ...] = ()
    gradient_norms: Mapping[str, float] = field(default_factory=dict)
    error_norms: Mapping[str, float] = field(default_factory=dict)
    total_error: float = 0.0
    total_error_update: float = 0.0
    gradient_scale: float = 0.0
    rates_ahead: tuple[float, ...] = ()
    wire_bytes: float = 0.0
    dense_bytes: float = 0.0
    steps: int = 0
    num_elements: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    num_compressed: int = 0
    sent_elements: float = 0.0
    max_epochs: int | None = None
    progress: float | None = None
    ended: bool = True
    resumed: bool = False
    gradient_noise: float = 0.0
    gradient_squared: float = 0.0
    gradient_dissimilarity: float = 0.0
    levels: Mapping[str, Level] = field(default_factory=dict)
    error_curves: Mapping[str, Curve] = field(default_factory=dict)
    step_seconds: float = 0.0
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    exchanges: tuple[ExchangeRecord, ...] = ()
    latency_us: float = 0.0
    bandwidth_gbps: float = 0.0
    link_r2: float = 0.0
    weight_sizes: Mapping[str, int] = field(default_factory=dict)
    weight_levels: Mapping[str, Level] = field(default_factory=dict)
    each_step: tuple[float, ...] = ()
    weighed: Weighed | None = None
    optimizers: tuple[str, ...] = ()
    total_steps: int | None = None

    @property
    def steps_left(self) -> int | None:
        """Steps of the run that are still to come; None if unknown or without end."""
        if self.total_steps is None or self.progress is None:
            return None
        return round(self.total_steps * (1 - self.progress))

    @property
    def density(self) -> float:
        """Sent share of all elements since the last decision; 0 before the first step."""
        elements = self.steps * self.num_elements
        return self.sent_elements / elements if elements else 0.0


@dataclass(frozen=True)
class Decision:
    """Levels, and with local steps H, until the next decision, and the reason.

    Attributes:
        level: for all parameters; None sends them uncompressed.
        levels: parameter name -> level, for parameters with another level.
        reason: one sentence for the log.
        figures: name -> number to log, such as a critical share or the budget spent.
        warning: advice to the user, which worker 0 gives as a warning; empty for none.
        keeps_levels: do not change levels; ``level`` and ``levels`` are ignored, as in
            ``Decision(None, keeps_levels=True, every=8)``.
        every: with local steps, H from the next round on; None keeps H. Only for a controller that
            declares it in ``Needs.rounds``.
        weights: ``level`` and ``levels`` of the weights that FSDP gathers; None keeps them. Set by
            the argument ``weights_controller``.
        after: steps until the next decision, or to the end of the epoch; 0: by ``turns`` and
            ``every_steps``.
        weigh: let the next observation have ``weighed``. Only for a controller that declares
            ``Needs.weighed``.
        says: one line for the log, at once, on worker 0; empty for none. A reason is logged between
            epochs only.
    """

    level: Level
    levels: Mapping[str, Level] = field(default_factory=dict)
    reason: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    warning: str = ""
    keeps_levels: bool = False
    every: int | None = None
    weights: tuple[Level, Mapping[str, Level]] | None = None
    after: int = 0
    weigh: bool = False
    says: str = ""


class KnobLike(Protocol):
    """The knob of a compressor, as a controller sees it.

    ``field`` is density, bits, threshold, rank or choice, from ``low`` to ``high``; ``more`` is
    what a higher value gives more of, "bytes" or "compression".
    """

    @property
    def field(self) -> str: ...

    @property
    def more(self) -> str: ...

    @property
    def low(self) -> float: ...

    @property
    def high(self) -> float: ...


class Controller(Settings, abc.ABC):
    """Chooses levels, epoch by epoch. Frozen configuration; its state is passed in.

    Laws, tested for every controller:

    1. It is pure: equal observations and states give equal decisions, and nothing is changed.
    2. Its state consists of plain values, loadable with ``weights_only=True``.
    3. Worker 0 decides for all; a controller does not see the number of workers.
    """

    @property
    def needs(self) -> Needs:
        """Costly observations that the controller needs; none by default."""
        return Needs()

    @abc.abstractmethod
    def init(self) -> State:
        """Return the state before the first observation."""

    @abc.abstractmethod
    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        """Return the next levels and the new state.

        Raises:
            ValueError: something needed is missing, such as a metric.
        """

    def turns(self, epoch: int) -> int:
        """Return how often per run to decide within epoch ``epoch``, besides at its end.

        With n, a decision is due after every n-th part of the run's steps, and early in the run
        whenever the number of steps has doubled. Each costs an all-reduce of a few numbers and a
        broadcast. 0, the default: never.
        """
        return 0

    def every_steps(self, epoch: int) -> int:
        """Return the number of steps between decisions within epoch ``epoch``, for any run length.

        For quantities that change with time, such as a link's rate. 0, the default: see ``turns``.
        """
        return 0

    def deciding(self, epoch: int) -> tuple[Controller, int]:
        """Return the controller that decides in an epoch, and the epoch that is its first one.

        Itself and 0, unless it hands over to others, as ``Chain`` does. That controller's
        ``needs``, ``turns`` and ``every_steps`` count within the epoch.
        """
        return self, 0

    def resuming(self, state: State, changed: str) -> tuple[State, str]:
        """Return the state after a resume, and one line that worker 0 logs; empty for none.

        Another state than the given one begins like a new run, with a decision before the next
        step. The default returns the state and no line.

        Args:
            state: of the checkpoint.
            changed: words on the number of workers or the optimizers, if they are others than
                before; empty if not.
        """
        return state, ""

    def ending(self, state: State) -> str:
        """Return one line that worker 0 logs at the end of a fit; empty, the default, for none."""
        return ""

    def __post_init__(self, *init_only: Any) -> None:
        for level in self.known_levels():
            self._check_level(level)

    def known_levels(self) -> tuple[Level, ...]:
        """Return the levels that it will set, if they are known before the first step.

        They must lie in the range of the compressor's knob. None, uncompressed, always does.
        """
        return ()

    def check(self, knob: KnobLike | None) -> None:
        """Raise ValueError if this controller cannot set the compressor's knob."""
        outside = knob and [
            level
            for level in self.known_levels()
            if level is not None and not knob.low <= level <= knob.high
        ]
        usual = knob and min(max(4 if knob.low >= 1 else 0.01, knob.low), knob.high)
        judge("Controller and level", controller=self, knob=knob, outside=outside, usual=usual)

    def _check_level(self, level: Level) -> None:
        """Raise ValueError if a level is invalid for any knob."""
        number = isinstance(level, int | float) and not isinstance(level, bool)
        if level is not None and not (number and 0 <= level < float("inf")):
            raise ValueError(
                f"{type(self).__name__}: a level is a finite number of at least 0, or None for "
                f"uncompressed, but one is {level!r}."
            )


def compresses_less(a: Level, b: Level, knob: KnobLike) -> bool:
    """Return whether level ``a`` sends at least as much as ``b``; None sends everything."""
    if a is None or b is None:
        return a is None
    return a >= b if knob.more == "bytes" else a <= b
