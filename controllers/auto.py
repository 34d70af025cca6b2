"""Choose the fastest method that the user permits, by trying the few that may pay (Auto)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lightning_gc.core.combinations import judge

from .bandwidth_aware import rate_of
from .base import Controller, Decision, KnobLike, Level, Needs, Observation, State

FIRST = 3
"""First steps of a run, which are not timed: DDP arranges its buckets anew, memory is allocated."""
SETTLING = 1
"""Steps after a change that do not count."""
FEWEST, MOST = 5, 15
"""Timed steps of a choice before it is judged: the fewest if they are alike, the most if not."""
ALIKE = 1.05
"""Steps are alike if their upper quartile is at most this factor above the lower one."""
TRIALS = 3
"""Choices that are tried in one look, at most."""
NEAR = 1.1
"""Factor of the fastest measured time up to which a prediction is worth a trial: it may err."""
GAIN = 0.95
"""A choice must take at most this share of the time without it."""
EQUAL = 0.98
"""Two choices are equally fast if one takes this share of the other's time; the one that sends more
is then taken."""
BAND = 1.3
"""Factor by which seconds or the link's rate must change, for ``WINDOWS`` windows in a row."""
WINDOWS = 3
LEAST_WINDOW, LONGEST_WINDOW = 1.0, 1000
"""Seconds of a window at least, and steps at most: a decision costs about a millisecond."""
LOOK = FIRST + FEWEST + SETTLING + FEWEST
"""Steps of a look with one trial, at least: a shorter run has no use of it."""
BUDGET = 0.01
"""Share of the time so far that looking may have cost before it looks again."""
_WORDS = ("rounding", "feedback")
_SPARSE = ("TopK(0.01)", "TopK(0.01), TwoShot", "ChunkedTopK and BinMeans")
"""Choices that are not tried among more than ``MANY`` workers: they lost most at equal bytes."""
MANY = 8
_COARSE = ("QSGD(4)", "QSGD(6)")
_REFUSING = ("Muon", "SOAP")
"""Optimizers under which ``_COARSE`` methods cost quality at unchanged hyper-parameters. They are
not tried either where no optimizer is known."""


class Spread(NamedTuple):
    """Quartiles of the seconds of steps."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Return the quartiles of one step or more."""
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0])
        return cls(*statistics.quantiles(seconds, n=4, method="inclusive"))

    def beats(self, other: Spread, share: float) -> bool:
        """Whether these steps take at most a share of the others' time, with quartiles apart."""
        return self.median <= share * other.median and self.high < other.low


@dataclass(frozen=True)
class Auto(Controller):
    """Choose among the compressors of a ``Menu`` the one with the fastest steps, or none of them.

    1. *Look*: the first steps are uncompressed. Their seconds are measured.
    2. *Weigh*: between two steps each choice exchanges a part of the gradient a few times, over the
       real link. The timeline of a step, with these seconds for each bucket and the times at which
       buckets were ready, predicts a step.
    3. *Try*: choices that are predicted to take at most 95 % of the present time are tried for a
       few steps, the fastest one first, at most three, and none that is predicted to take 1.1 times
       as long as the fastest one measured. One is kept if the median of its steps is at most 95 %,
       and its upper quartile lies below the other's lower one. Of those within 2 % of the fastest
       the one that sends most is taken. To go back to uncompressed steps, "not slower" is enough.
    4. *Watch*: medians of windows, of ``every`` steps and a second at least. If three in a row, or
       the link's rate in them, are 1.3 times as large or small as in the first, it weighs and tries
       again, unless looking has cost more than 1 % of the time so far. What counts as cost is the
       weighing, and what steps of trials take longer than those before.

    Steps on a busy machine differ much, so that quartiles overlap; then nothing is changed, and the
    log says so. An epoch may end during any part.

    Seconds differ between two runs, and so may choices: a run resumes as it was and does not look
    again for that, but it is not repeated bit for bit. ``trace`` writes down what was seen and
    decided; ``replay`` repeats that.

    Args:
        allow: what you permit, where the strategy's compressor is ``"auto"``. ``"rounding"``:
            ``Cast()``, ``QSGD(8)``, and but under Muon and SOAP ``QSGD(6)`` and ``QSGD(4)``; they
            trained as well as uncompressed gradients at unchanged hyper-parameters, within the
            spread of seeds or 0.03 nats.
            ``"feedback"``: also ``PowerSGD(2)`` and, among at most 8 workers, ``TopK(0.01)`` by an
            all-gather or ``TwoShot()`` and ``Quantised(ChunkedTopK(), BinMeans(2))``, with error
            feedback; they send less, and the learning rate wants tuning for the one that is chosen.
            Or a ``Menu`` of your own.
        every: steps of a window while it watches, at least. Each costs an all-reduce of a few
            numbers and a broadcast.
        trace: path of a file; empty for none.

    Raises:
        ValueError: another ``allow``, ``every`` below 4; a compressor that is not a menu.

    Example:
        >>> from lightning_gc.controllers import Auto, Observation
        >>> auto = Auto()
        >>> decision, state = auto.decide(Observation(-1), auto.init())
        >>> decision.level, decision.after, decision.weigh
        (None, 8, True)
    """

    allow: Literal["rounding", "feedback"] | Any = "rounding"
    every: int = 16
    trace: str = ""
    limits = {"every": f"[{FEWEST - 1}, inf) the number of steps"}

    def __post_init__(self) -> None:
        # A menu is told by what it offers: controllers know no compressors.
        menu = hasattr(self.allow, "names") and hasattr(self.allow, "chosen")
        if not menu and (not isinstance(self.allow, str) or self.allow not in _WORDS):
            raise ValueError(
                f"Auto(allow={self.allow!r}): give 'rounding', 'feedback', or a Menu of your own, "
                f"such as Menu({{'16 bits': Cast(), '4 bits': QSGD(4)}})."
            )

    @property
    def needs(self) -> Needs:
        return Needs(seconds=True, link=True, weighed=True, trace=self.trace)

    def check(self, knob: KnobLike | None) -> None:
        judge("Auto", controller=self, knob=knob, where="controller")

    def every_steps(self, epoch: int) -> int:
        return self.every

    def init(self) -> State:
        return {
            "phase": "look",
            "level": None,
            "name": "uncompressed",
            "skip": FIRST,
            "seen": [],  # seconds of steps with this choice
            "queue": [],  # choices yet to be tried: level, name, predicted seconds
            "tried": [],  # in this look: level, name, and quartiles
            "base": [],  # of the choice before this look: level, name, and quartiles
            "reference": [],  # seconds and rate of the first window
            "outside": 0,  # windows in a row
            "spent": 0.0,  # seconds that looking has cost
            "seconds": 0.0,  # that have passed: of all steps and of weighing
            "short": 0,  # steps of a run that is too short for a look
            "took": 0.0,  # median seconds of a step in the last window
            "dense": 0.0,  # of an uncompressed one
            "sixteen": ["", 0.0],  # name of 16 bits, and predicted or measured seconds with them
            "dense_bytes": 0.0,
            "bytes": 0.0,
            "permitted": [],
        }

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        new: State = {"short": 0, "sixteen": ["", 0.0]} | state  # absent in older checkpoints
        given = observation.each_step
        skipped = min(new["skip"], len(given))
        new["skip"] -= skipped
        # Not the sum of each_step, which keeps the latest steps of a window only.
        new["seconds"] += observation.step_seconds * observation.steps
        fresh = [*given[skipped:]]
        new["seen"] = [*new["seen"], *fresh][-4 * MOST :]
        if observation.steps:
            new["bytes"] = observation.wire_bytes / observation.steps
            new["dense_bytes"] = observation.dense_bytes / observation.steps
        if new["phase"] == "try":
            before = new["base"][2][1]
            new["spent"] += sum(max(each - before, 0.0) for each in given)
            return self._judge(new)
        if new["phase"] == "watch":
            return self._watch(observation, new, fresh)
        left = observation.steps_left
        fresh_run = not new["took"] and (new["short"] or not new["seen"])
        if fresh_run and left is not None and left < LOOK:
            return self._rest(new, left)
        new["short"] = 0
        return self._look(observation, new)

    def ending(self, state: State) -> str:
        cost, whole = state["spent"], max(state["seconds"], state["spent"])
        cost_line = f" Measuring cost {cost:.3g} s of the {whole:.3g} s of this training."
        if state.get("short"):
            return f"auto: uncompressed, since {state['short']} steps are too few to measure."
        if state["phase"] == "try":
            return f"auto: training ended while {state['name']} was tried.{cost_line}"
        if not state["took"]:
            return f"auto: uncompressed, training ended before a method was chosen.{cost_line}"
        name, took, dense = state["name"], state["took"], state["dense"]
        said = f"auto: {name} at the end, {took:.3g} s per step"
        if state["level"] is not None:
            said += (
                f" where uncompressed ones had taken {dense:.3g} s{_beside(name, state)}, and "
                f"{state['bytes'] / 1e6:.3g} MB in place of {state['dense_bytes'] / 1e6:.3g}"
            )
        others = ", ".join(each for each in state["permitted"] if each != name)
        left = f" Other candidates: {others}." if others else ""
        return f"{said}.{left}{cost_line}"

    def resuming(self, state: State, changed: str) -> tuple[State, str]:
        if not changed:
            found = "" if state["took"] else ", and no method is chosen yet"
            return state, f"auto: resumed with {state['name']}{found}."
        kept = {name: state[name] for name in ("seconds", "spent")}
        return self.init() | kept, f"auto: uncompressed, and it measures again, since {changed}."

    def _rest(self, new: State, left: int) -> tuple[Decision, State]:
        """Stay uncompressed in a run that ends before a look would."""
        says = (
            f"auto: uncompressed, since {left} steps are too few to measure: that takes {LOOK} "
            f"steps or more. To compress in a short run, name a method, such as 'qsgd'."
        )
        news, new["short"] = not new["short"], new["short"] or left
        return self._next(new, says, after=LONGEST_WINDOW, says=says if news else "")

    def _look(self, observation: Observation, new: State) -> tuple[Decision, State]:
        """Measure steps with the present choice, then line up what may be faster."""
        if observation.weighed is not None:
            found = [list(each) for each in observation.weighed.candidates]
            known = observation.optimizers
            fine = bool(known) and not any(name in _REFUSING for name in known)
            out: tuple[str, ...] = _COARSE if self.allow == "rounding" and not fine else ()
            if self.allow == "feedback" and observation.weighed.workers > MANY:
                out = _SPARSE
            new["queue"] = [each for each in found if each[1] not in out]
            new["permitted"] = [each[1] for each in new["queue"] if each[0] is not None]
            new["sixteen"] = [observation.weighed.sixteen, 0.0]
            new["spent"] += observation.weighed.seconds
            new["seconds"] += observation.weighed.seconds
        if not _enough(new["seen"]) or not new["queue"]:
            missing = _missing(new)
            reason = f"Steps are timed ({new['name']})."
            return self._next(new, reason, after=missing, weigh=not new["queue"])
        now = Spread.of(new["seen"])
        if new["level"] is None:
            new["dense"] = now.median
        new["base"] = [new["level"], new["name"], list(now)]
        predicted = [[level, name, now.median + more] for level, name, more in new["queue"]]
        half = (each[1:] for each in predicted if each[1] == new["sixteen"][0])
        new["sixteen"] = next(half, ["", 0.0])
        new["queue"] = sorted(
            (
                each
                for each in predicted
                if each[0] != new["level"] and each[2] <= _share(each[0]) * now.median
            ),
            key=lambda each: float(each[2]),
        )
        new["tried"] = []
        return self._try(new)

    def _try(self, new: State) -> tuple[Decision, State]:
        """Try the next choice, if it may be the fastest; else decide."""
        best = min((each[2][1] for each in new["tried"]), default=new["base"][2][1])
        hopeless = bool(new["queue"]) and new["queue"][0][2] > NEAR * best
        if len(new["tried"]) == TRIALS or not new["queue"] or hopeless:
            return self._settle(new)
        (level, name, predicted), *new["queue"] = new["queue"]
        new |= {"phase": "try", "level": level, "name": name, "seen": [], "skip": SETTLING}
        reason = (
            f"{name} is tried, since a step is predicted to take {predicted:.3g} s in place of "
            f"{new['base'][2][1]:.3g} s."
        )
        return self._next(new, reason, after=SETTLING + FEWEST)

    def _judge(self, new: State) -> tuple[Decision, State]:
        """Go on with a trial until its steps say enough."""
        if not _enough(new["seen"]):
            return self._next(new, f"{new['name']} is tried further.", after=_missing(new))
        trial = [new["level"], new["name"], list(Spread.of(new["seen"]))]
        new["tried"] = [*new["tried"], trial]
        if new["level"] is None:
            new["dense"] = trial[2][1]
        elif new["name"] == new["sixteen"][0]:
            new["sixteen"] = [new["name"], trial[2][1]]
        return self._try(new)

    def _settle(self, new: State) -> tuple[Decision, State]:
        """Take the fastest choice that was measured, and say so."""
        level, name, before = new["base"]
        base = Spread(*before)
        faster = [each for each in new["tried"] if Spread(*each[2]).beats(base, _share(each[0]))]
        noisy = [
            each
            for each in new["tried"]
            if each not in faster and each[2][1] <= _share(each[0]) * base.median
        ]
        took = base.median
        if faster:
            fastest = min(each[2][1] for each in faster)
            near = [each for each in faster if EQUAL * each[2][1] <= fastest]
            level, name, spread = max(
                near, key=lambda each: math.inf if each[0] is None else each[0]
            )
            took = spread[1]
            why = f"a step takes {took:.3g} s in place of {base.median:.3g} s ({new['base'][1]})"
            why += _beside(name, new)
        elif noisy:
            why = (
                f"steps differ too much to tell whether {noisy[0][1]} is faster: "
                f"{base.low:.3g} to {base.high:.3g} s, and {noisy[0][2][0]:.3g} to "
                f"{noisy[0][2][2]:.3g} s"
            )
        elif new["tried"]:
            measured = ", ".join(f"{each[1]} {each[2][1]:.3g} s" for each in new["tried"])
            why = f"no choice was faster than {took:.3g} s a step: {measured}"
        else:
            why = f"no choice is predicted to be 5 % faster than {took:.3g} s a step"
        changed = level != new["level"]
        decided = f"auto: {name}, since {why}."
        # A look that has changed nothing is not worth a line in the log.
        news = not new["took"] or level != new["base"][0]
        new |= {
            "phase": "watch",
            "level": level,
            "name": name,
            "took": took,
            "skip": SETTLING if changed else 0,
            "seen": [],
            "queue": [],
            "reference": [],
            "outside": 0,
        }
        return self._next(new, decided, says=decided if news else "")

    def _watch(
        self, observation: Observation, new: State, fresh: list[float]
    ) -> tuple[Decision, State]:
        """Compare a window with the first one."""
        if len(new["seen"]) < FEWEST - 1:
            return self._next(new, f"{new['name']} goes on.")
        new["took"] = statistics.median(new["seen"])
        now, new["seen"] = [new["took"], rate_of(observation)], []
        if not new["reference"]:
            new["reference"] = now
            return self._next(new, f"{new['name']} goes on.")
        outside = any(map(_outside, now, new["reference"]))
        new["outside"] = new["outside"] + 1 if outside else 0
        if new["outside"] >= WINDOWS and new["spent"] <= BUDGET * new["seconds"]:
            new |= {"phase": "look", "seen": fresh, "queue": []}
            what = (
                f"A step takes {now[0]:.3g} s and was {new['reference'][0]:.3g} s; the link has "
                f"{now[1]:.3g} Gbit/s and had {new['reference'][1]:.3g}."
            )
            return self._next(new, f"{what} The choices are weighed again.", after=1, weigh=True)
        return self._next(
            new,
            f"{new['name']} goes on.",
            after=FEWEST - 1 if outside and new["outside"] < WINDOWS else 0,
        )

    def _window(self, took: float) -> int:
        """Return the steps of a window, given the median seconds of a step."""
        few = LEAST_WINDOW / LONGEST_WINDOW
        return max(self.every, int(LEAST_WINDOW / max(took, few)))

    def _next(
        self, new: State, reason: str, *, after: int = 0, weigh: bool = False, says: str = ""
    ) -> tuple[Decision, State]:
        figures = {"choice": _place(new["level"]), "looking_seconds": new["spent"]}
        return (
            Decision(
                new["level"],
                reason=reason,
                figures={name: float(value) for name, value in figures.items()},
                after=after or self._window(new["took"]),
                weigh=weigh,
                says=says,
            ),
            new,
        )


def _enough(seconds: Sequence[float]) -> bool:
    """Return whether there are enough steps to judge, by their number or because they are alike."""
    if len(seconds) < FEWEST:
        return False
    low, _, high = Spread.of(seconds)
    return len(seconds) >= MOST or high <= ALIKE * low


def _beside(name: str, state: State) -> str:
    """Return what a step with 16 bits takes, unless they are the choice or were not weighed."""
    half, seconds = state.get("sixteen", ("", 0.0))
    return f" or {seconds:.3g} s ({half}, 16 bits)" if half not in ("", name) else ""


def _missing(state: State) -> int:
    """Return the number of steps until it may be enough."""
    few: int = FEWEST - len(state["seen"])
    return int(state["skip"]) + (few if few > 0 else FEWEST)


def _share(level: Level) -> float:
    """Return the share of the present time that a choice may take: uncompressed steps, all."""
    return 1.0 if level is None else GAIN


def _place(level: Level) -> float:
    """Return a choice's place in the order of bytes, from 1; uncompressed is 0."""
    return 0.0 if level is None else float(level)


def _outside(now: float, reference: float) -> bool:
    """Whether a figure has left its band; one that was not measured has not."""
    return reference > 0 and now > 0 and not 1 / BAND <= now / reference <= BAND
