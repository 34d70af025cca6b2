"""Unequal: rounds of workers that differ in speed, in data, or in health."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_gc.core import NUMBER, WHOLE, Flow, Gather, Listed, Optional, Record
from lightning_gc.core.refusal import refuse
from lightning_gc.core.saved_state import Tree
from lightning_gc.core.settings import Settings

_OWN = 3
"""Numbers of a worker before its norms: weight, steps, seconds."""


@dataclass(frozen=True)
class Unequal(Settings):
    """Let unequal workers share a round: fewer steps on slow ones, weights, late results, a clip.

    Worker i has made ``h_i`` steps since the exchange before and is Δ_i from the common weights θ.
    It contributes ``s_i·Δ_i``, and the outer step gets the mean of the contributions:

    ``s_i = a_i · w_i·W/Σ_j w_j``, ``x_i = e_i + s_i·Δ_i``,
    ``c_i = C(x_i)``, ``e_i ← x_i − c_i``, ``Δ̄ = mean_i c_i``

    The scale is applied before compression, so that errors are kept in units of contributions. An
    unsent part keeps the weight of the round in which it was measured. Law: over all rounds, the
    sum of Δ̄ plus the mean error equals the sum of ``Σ_i w_i·a_i·Δ_i/Σ_j w_j``.

    Args:
        pace: ``"measured"``: a worker makes ``n_i = max(1, round(H·v_i/max_j v_j))`` of a round's H
            steps and skips the others, evenly, so that rounds end together. v_i are its steps per
            second in the round before; in the first round all make H. A tuple has one v_i for each
            worker, in any unit. ``"equal"``: all make H steps.
        weigh: w_i. ``"steps"``: h_i. ``"tokens"``: elements of the first tensor of each batch, or
            ``module.tokens(batch)`` if the module has that method. ``"equal"``: 1.
        grace: seconds that a round waits for others after its first worker is ready. The round
            counts a worker that comes later with w_i = 0. It takes over the new common weights and
            keeps its distance: ``θ_i ← θ_new + (θ_i − θ)``. So its next Δ_i contains these steps,
            and nothing is lost. Until it has caught up it makes fewer steps. None: wait for all.
            Simulated workers only.
        median_clip: scale each tensor of Δ_i down to the median norm per step over workers, where
            its own is larger: ``a_i = min(1, h_i·median_j(‖Δ_j‖/h_j)/‖Δ_i‖)``. The median of an
            even number is the lower of the middle ones. A worker with a Δ_i that is not finite
            contributes nothing and begins again at the common weights. Clipped parts are lost.

    Communication pattern:
        One gather before each exchange, if there is something to agree on: 12 bytes of each
        worker, and 4 more for each tensor with ``median_clip``.

    Raises:
        ValueError: an unknown word, a speed that is not above 0, a negative ``grace``.

    Example:
        >>> from lightning_gc import QSGD, LocalStepsStrategy, Unequal
        >>> strategy = LocalStepsStrategy(QSGD(4), every=32, unequal=Unequal())
        >>> strategy.plan.unequal.pace, strategy.plan.unequal.weigh
        ('measured', 'steps')

    Reference:
        Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training", 2026.
    """

    pace: Literal["equal", "measured"] | tuple[float, ...] = "measured"
    weigh: Literal["equal", "steps", "tokens"] = "steps"
    grace: float | None = None
    median_clip: bool = False
    limits = {
        "grace": "[0, inf) the seconds to wait for late workers; 0.5, or None to wait for all",
    }

    def __post_init__(self) -> None:
        if not isinstance(self.pace, str):  # a list, from a file
            object.__setattr__(self, "pace", tuple(self.pace))
            check_speeds("Unequal", "pace", self.pace)
        elif self.pace not in ("equal", "measured"):
            why = "use 'measured', 'equal', or one speed for each worker, such as (1.0, 0.5)"
            refuse("Unequal", why, pace=self.pace)

    def check_workers(self, owner: str, workers: int) -> None:
        """Raise ValueError unless there is a speed for each worker, if speeds are given."""
        if isinstance(self.pace, tuple) and len(self.pace) != workers:
            refuse(
                f"{owner}(unequal=Unequal(pace={self.pace!r})): these are {len(self.pace)} speeds "
                f"for {workers} workers; give {workers}, or use pace='measured'"
            )


def check_speeds(owner: str, name: str, speeds: Sequence[Any]) -> None:
    """Raise ValueError unless all speeds are numbers above 0."""
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in speeds)
    if not speeds or not numbers or not all(0 < v < math.inf for v in speeds):
        why = "give a number above 0 for each worker, such as (1.0, 0.5)"
        refuse(owner, why, **{name: tuple(speeds)})


class WallClock:
    """The real time of this worker.

    Args:
        device: its queued work is waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self, worker: int) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()

    def step(self, worker: int) -> None:
        """Do nothing: time has passed."""

    def depart(self, worker: int, *, wait: bool) -> bool:
        return False

    def land(self, worker: int) -> None:
        """Do nothing: time has passed."""

    def spare(self, worker: int) -> float:
        return math.inf

    def times(self) -> list[float]:
        return []

    def resume(self, times: Sequence[float]) -> None:
        """Do nothing: time has gone on."""


class SimulatedClock:
    """Predicts when each of W workers has made its steps, and when exchanges begin and end.

    A step of worker i takes ``1/speeds[i]`` seconds. An exchange begins when the last worker is
    ready, or ``grace`` seconds after the first of those that were in time for the one before.
    Without a delay workers wait for its end.

    Args:
        speeds: of each worker, in steps per second.
        grace: seconds; None: wait for all.

    Attributes:
        reached: by worker, seconds since the beginning.
        ended: when the last exchange ended, in seconds.
        late: by worker, whether the last exchange began without it.
    """

    def __init__(self, speeds: Sequence[float], grace: float | None) -> None:
        self.speeds, self._grace = tuple(speeds), grace
        self.reached = [0.0] * len(self.speeds)
        self.late = [False] * len(self.speeds)
        self.ended = 0.0
        self._closed, self._lasted = 0.0, math.inf
        self._closes: float | None = None  # when the exchange under way begins

    @property
    def seconds(self) -> float:
        """Predicted seconds until the last worker's last step or exchange."""
        return max(self.reached)

    def now(self, worker: int) -> float:
        """Return a worker's seconds; the work that it has done before is over."""
        return self.reached[worker]

    def step(self, worker: int) -> None:
        """Let a worker make a step."""
        self.reached[worker] += 1 / self.speeds[worker]

    def depart(self, worker: int, *, wait: bool) -> bool:
        """Let a worker come to an exchange; return whether it has begun without it.

        All have made their steps before the first one comes. ``wait``: the exchange does not begin
        before all are there.
        """
        if self._closes is None:
            grace = math.inf if self._grace is None or wait else self._grace
            pairs = zip(self.reached, self.late, strict=True)
            first = min(ready for ready, late in pairs if not late)
            self._closes = min(max(self.reached), first + grace)
            self._lasted, self._closed = self._closes - self._closed, self._closes
            self.late = [reached > self._closes for reached in self.reached]
        return self.late[worker]

    def arrive(self, seconds: float) -> None:
        """End the exchange; its messages take so many seconds."""
        if self._closes is not None:
            self.ended = self._closes + seconds
            self._closes = None

    def land(self, worker: int) -> None:
        """Let a worker wait for the exchange's end."""
        self.reached[worker] = max(self.reached[worker], self.ended)

    def spare(self, worker: int) -> float:
        """Return the seconds that a late worker has until the others end their next round."""
        return self._lasted - max(0.0, self.reached[worker] - self.ended)

    def times(self) -> list[float]:
        """Return what a checkpoint keeps, equal on all workers."""
        late = map(float, self.late)
        return [*self.reached, *late, self.ended, self._closed, min(self._lasted, 1e30)]

    def resume(self, times: Sequence[float]) -> None:
        """Resume from ``times()``."""
        workers = len(self.reached)
        if len(times) == 2 * workers + 3:
            self.reached = list(times[:workers])
            self.late = [bool(each) for each in times[workers:-3]]
            self.ended, self._closed, self._lasted = times[-3:]


def resting(position: int, steps: int, length: int) -> bool:
    """Return whether a worker skips the next step of a round; it makes ``steps`` of ``length``.

    The first step is made, unless all are skipped; the others follow evenly.

    Args:
        position: steps of the round that are over.
        steps: that this worker makes, at most ``length``.
        length: H of this round.
    """
    return -(-(position + 1) * steps // length) == -(-position * steps // length)


class Share:
    """One worker's share in rounds of unequal workers: which steps it makes, and their weight.

    Args:
        settings: equal on all workers.
        fragments: how many.
        worker: this worker's index.
        workers: W.
        clock: that this worker goes by.

    Attributes:
        speeds: of all workers, 1 for the fastest.
        late: whether the last exchange has not counted this worker's distance, which it keeps.
        most: steps that a late worker may make in this round; None: as many as its speed allows.
        figures: of the last exchange, for the monitor.
    """

    common_structure = Record({"speeds": Listed(NUMBER), "times": Listed(NUMBER)})
    own_structure = Record(
        {
            "steps": Listed(WHOLE),
            "tokens": Listed(WHOLE),
            "timed": WHOLE,
            "seconds": NUMBER,
            "each": NUMBER,
            "most": Optional(WHOLE),
        }
    )

    def __init__(
        self,
        settings: Unequal,
        fragments: int,
        worker: int,
        workers: int,
        clock: WallClock | SimulatedClock,
    ) -> None:
        self.settings, self.clock = settings, clock
        self.worker, self.workers = worker, workers
        self.figures: dict[str, float] = {}
        self._fragments = fragments
        self.restart()

    def restart(self) -> None:
        """Forget speeds, steps and times."""
        given = self.settings.pace
        self.speeds = [1.0] * self.workers
        if isinstance(given, tuple):
            self.speeds = [speed / max(given) for speed in given]
        self.most: int | None = None
        self._steps, self._tokens = [0] * self._fragments, [0] * self._fragments
        self._timed, self._each, self.late = 0, 0.0, False
        self._begin_timing()

    def _begin_timing(self, spent: float = 0.0) -> None:
        self._mark = self.clock.now(self.worker) - spent if self._measures else 0.0

    @property
    def _measures(self) -> bool:
        return self.settings.pace == "measured" or self.settings.grace is not None

    @property
    def agrees(self) -> bool:
        """Whether workers gather numbers before an exchange."""
        return self._measures or self.settings.median_clip or self.settings.weigh != "equal"

    def rests(self, position: int, length: int) -> bool:
        """Return whether this worker skips the next of a round's ``length`` steps."""
        steps = max(1, round(self.speeds[self.worker] * length))
        steps = steps if self.most is None else min(steps, self.most)
        return resting(position, steps, length)

    def stepped(self) -> None:
        """Count a step that this worker has made."""
        self._steps = [steps + 1 for steps in self._steps]
        self._timed += 1
        self.clock.step(self.worker)

    def count(self, tokens: int) -> None:
        """Count the tokens of a batch."""
        self._tokens = [so_far + tokens for so_far in self._tokens]

    def pause(self) -> float:
        """Return the time; what follows until ``go_on`` is not work."""
        return self.clock.now(self.worker) if self._measures else 0.0

    def go_on(self, paused: float) -> None:
        """Leave out the seconds since ``paused``."""
        if self._measures:
            self._mark += self.clock.now(self.worker) - paused

    def depart(self, *, wait: bool) -> None:
        """Come to an exchange; ``wait``: the others wait for this worker however late it is."""
        self.late = self.clock.depart(self.worker, wait=wait)
        if self._timed and self._measures:
            self._each = (self.clock.now(self.worker) - self._mark) / self._timed

    def contribute(
        self, index: int, distance: Tensor, shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[Flow, Tensor]:
        """Return the flow that turns ``distance`` into this worker's contribution, in place.

        Args:
            index: of the fragment.
            distance: Δ_i, ``(numel,)``.
            shapes: of its tensors, by parameter name.

        Returns:
            The flow, and what it fills: ``(W, 3 + T)`` float32, each worker's weight, steps and
            seconds of a step, and the norms of its T tensors if they are needed.
        """
        steps, tokens = self._steps[index], self._tokens[index]
        weight = {"equal": 1, "steps": steps, "tokens": tokens}[self.settings.weigh]
        sizes = [math.prod(shape) for shape in shapes.values()]
        numbers = [0.0 if self.late else weight, steps, self._each]
        if not self.late:
            self._steps[index] = self._tokens[index] = 0
        own = torch.tensor(numbers, dtype=torch.float32, device=distance.device)
        if self.settings.median_clip:
            norms = [torch.linalg.vector_norm(piece) for piece in distance.split(sizes)]
            own = torch.cat([own, torch.stack(norms).float()])
        gathered = own.new_zeros(self.workers, own.numel())

        def flow() -> Flow:
            payloads = yield Gather((own,))
            torch.stack([payload[0] for payload in payloads], out=gathered)
            scales = self._scales(gathered)[self.worker].to(distance.dtype)
            for number, piece in enumerate(distance.split(sizes)):
                scale = scales[min(number, scales.numel() - 1)]
                # Not only multiplied: 0 · NaN would be NaN.
                piece.copy_(torch.where(scale == 0, torch.zeros_like(scale), piece * scale))

        return flow(), gathered

    def _scales(self, gathered: Tensor) -> Tensor:
        """Return what each worker multiplies its tensors by, ``(W, T)``; ``(W, 1)`` if by one.

        The number is the share ``w_i·W/Σ_j w_j`` times the clip ``a_i``.
        """
        numbers = gathered.double()
        weights, steps, norms = numbers[:, :1], numbers[:, 1:2].clamp(min=1), numbers[:, _OWN:]
        clip = torch.ones_like(weights)
        if self.settings.median_clip:
            weights = weights * norms.isfinite().all(1, keepdim=True)
            counted = weights > 0
            ranked = torch.where(counted, norms / steps, torch.inf).sort(0).values
            middle = ((counted.sum(0) - 1) // 2).clamp(min=0)
            limits = ranked.index_select(0, middle) * steps
            clip = torch.where(norms > limits, limits / norms, 1.0)
        shares = weights * self.workers / weights.sum().clamp(min=1e-30)
        return torch.where(shares > 0, shares * clip, 0.0)

    def arrived(self, index: int, gathered: Tensor) -> None:
        """Learn the others' speeds from an exchange.

        Args:
            index: of the fragment.
            gathered: as ``contribute`` has returned it.
        """
        weights, steps, pace = gathered[:, :_OWN].double().T.tolist()
        self.figures = {"workers_on_time": sum(weight > 0 for weight in weights)}
        self.figures |= {"least_steps": min(steps), "most_steps": max(steps)}
        if index == len(self._steps) - 1:
            if self.settings.pace == "measured":
                self._follow(pace)
            self.most = None
            if self.late and self._each:
                self.most = max(0, math.floor(self.clock.spare(self.worker) / self._each + 1e-6))
            self._timed = 0
            self._begin_timing()

    def _follow(self, pace: Sequence[float]) -> None:
        """Set speeds by the seconds of each worker's step; 0 of one that has made none."""
        known = [1 / seconds for seconds in pace if seconds > 0]
        if known:
            before = [speed * max(known) for speed in self.speeds]
            now = [1 / each if each > 0 else old for each, old in zip(pace, before, strict=True)]
            self.speeds = [speed / max(now) for speed in now]

    def astray(self, gathered: Tensor) -> bool:
        """Return whether the exchange has left this worker out, as its Δ was not finite."""
        own = gathered[self.worker, _OWN:]
        return self.settings.median_clip and not bool(own.isfinite().all())

    def common_state(self) -> Tree:
        return {"speeds": list(self.speeds), "times": self.clock.times()}

    def own_state(self) -> Tree:
        spent = self.clock.now(self.worker) - self._mark if self._measures else 0.0
        return {
            "steps": list(self._steps),
            "tokens": list(self._tokens),
            "timed": self._timed,
            "seconds": spent,
            "each": self._each,
            "most": self.most,
        }

    def load_common_state(self, state: Any) -> None:
        """Resume from ``common_state()``; another number of workers begins with equal speeds."""
        self.restart()
        if len(state["speeds"]) == self.workers:
            if self.settings.pace == "measured":
                self.speeds = list(state["speeds"])
            self.clock.resume(state["times"])
        self._begin_timing()

    def load_own_state(self, state: Any) -> None:
        """Resume from ``own_state()``."""
        if len(state["steps"]) == len(self._steps):
            self._steps, self._tokens = list(state["steps"]), list(state["tokens"])
            self._timed, self._each, self.most = state["timed"], state["each"], state["most"]
            self._begin_timing(state["seconds"])
