"""Error feedback with a threshold, in NumPy, while gradients and learning rates move."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from lightning_gc.controllers import Controller, Observation

Course = Callable[[float], float]
"""Of the finished share of a run, in [0, 1]."""

SCALES: dict[str, Course] = {
    "constant": lambda t: 1.0,
    "rises": lambda t: 10 ** (t - 1),
    "falls": lambda t: 10**-t,
    "warm-up and steps": lambda t: min(1.0, 0.2 + 8 * t) * 0.3 ** (t > 0.6) * 0.5 ** (t > 0.85),
    "high at first": lambda t: 10 * math.exp(-60 * t) + 1,
    "swings": lambda t: 1 + 0.5 * math.sin(2 * math.pi * t),
}
RATES: dict[str, Course] = {
    "constant": lambda t: 1.0,
    "steps": lambda t: 0.1 ** (t >= 0.5) * 0.1 ** (t >= 0.8),
    "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
}


class Feedback:
    """One worker's error over a run: noise of unequal scales around a mean, both times ``scale``.

    Args:
        scale: of the gradients.
        rate: the learning rate.
        ratio: of the mean's size to the noise's.
        steps: of the run.
        numel: elements.
    """

    def __init__(
        self, scale: Course, rate: Course, ratio: float, steps: int, numel: int = 1000
    ) -> None:
        self.draw = np.random.default_rng(0)
        self.noise = np.exp(self.draw.standard_normal(numel))
        self.mean = ratio * self.noise * self.draw.standard_normal(numel)
        self.scale, self.rate, self.steps, self.numel = scale, rate, steps, numel
        self.error = np.zeros(numel)
        self.done = self.sent = 0
        self.sent_in_steps: list[int] = []
        self.squares = 0.0  # of gradients
        self.total_error = 0.0  # in units of the update

    def step(self, threshold: float | None = None, most: int = 0) -> None:
        """Send what reaches the threshold, or the ``most`` largest if there is none."""
        now = self.done / self.steps
        grad = self.mean + self.noise * self.draw.standard_normal(self.numel)
        self.error += grad * self.scale(now)
        size = np.abs(self.error)
        sent = size >= (np.partition(size, -most)[-most] if threshold is None else threshold)
        self.error[sent] = 0
        self.done += 1
        self.sent_in_steps.append(int(sent.sum()))
        self.sent += self.sent_in_steps[-1]
        self.squares += float(grad @ grad) * self.scale(now) ** 2
        self.total_error += self.rate(now) ** 2 * float(self.error @ self.error)

    @property
    def density(self) -> float:
        """Mean density of the whole run, so far."""
        return self.sent / self.steps / self.numel

    def to_come(self) -> tuple[float, ...]:
        """Mean rate of each of up to 100 parts of the rest."""
        rates = [self.rate(step / self.steps) for step in range(self.done, self.steps)]
        parts = np.array_split(rates, min(100, len(rates))) if rates else []
        return tuple(float(part.mean()) for part in parts)


def controlled(controller: Controller, run: Feedback, epochs: int) -> dict[str, float]:
    """Run to the end with a controller that sets the threshold; return its last figures."""
    state = controller.init()
    first = Observation(-1, progress=0.0, num_elements=run.numel, num_compressed=run.numel)
    decision, state = controller.decide(first, state)
    last, squares, sent = 0, 0.0, 0
    for step in turns(run.steps, epochs, controller.turns(0)):
        for _ in range(last, step):
            run.step(decision.level)
        mean = (run.squares - squares) / (step - last) / run.numel
        now = replace(
            first,
            epoch=step * epochs // run.steps - 1,
            progress=step / run.steps,
            steps=step - last,
            sent_elements=float(run.sent - sent),
            gradient_scale=math.sqrt(mean),
            rates_ahead=run.to_come(),
            ended=step % (run.steps // epochs) == 0,
        )
        decision, state = controller.decide(now, state)
        last, squares, sent = step, run.squares, run.sent
    return dict(decision.figures)


def turns(steps: int, epochs: int, per_run: int) -> list[int]:
    """Steps before which there is a turn, written slowly: doubling, regular, ends of epochs."""
    pause, last, found = max(steps // per_run, 1), 0, []
    for step in range(1, steps + 1):
        if step % (steps // epochs) == 0 or step - last >= max(min(last, pause), 1):
            found.append(step)
            last = step
    return found


def in_hindsight(make: Callable[[], Feedback], course: Course, density: float) -> float:
    """Return the total error of λ proportional to ``course``, its scale found by bisection."""
    low, high = 1e-2, 1e4
    for _ in range(18):
        middle, run = math.sqrt(low * high), make()
        for step in range(run.steps):
            run.step(middle * course(step / run.steps))
        low, high = (middle, high) if run.density > density else (low, middle)
    return run.total_error


def of_top_k(run: Feedback, density: float) -> float:
    """Return the total error of Top-k."""
    for _ in range(run.steps):
        run.step(most=max(1, round(density * run.numel)))
    return run.total_error
