"""TotalErrorBudget keeps its budget, and leaves about the least total error that it can."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from lightning_gc import HardThreshold
from lightning_gc.controllers import Observation, TotalErrorBudget
from lightning_gc.controllers.threshold_budget import NOTHING, Stretch, constant
from lightning_gc.testing import Lockstep
from tests.support.error_feedback import (
    RATES,
    SCALES,
    Course,
    Feedback,
    controlled,
    in_hindsight,
    of_top_k,
    turns,
)
from tests.support.replay import levels, replay

RESNET18 = 11_173_962
BUDGET = 0.01
STEPS, EPOCHS = 400, 4


KINDS = [(400, 20, 0.003, 0.05), (150, 3, BUDGET, 0.05), (400, 1, BUDGET, 0.5)]
"""Steps, epochs, budget, and the size of the gradient's mean to that of its noise."""


@pytest.mark.parametrize(
    "kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS[1:])]
)
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("scale", SCALES)
def test_the_budget_is_kept_under_error_feedback(
    scale: str, rate: str, kind: tuple[int, int, float, float]
) -> None:
    """However gradients and rates move: never above 1.02, and little is left over."""
    steps, epochs, budget, ratio = kind
    run = Feedback(SCALES[scale], RATES[rate], ratio, steps)
    figures = controlled(TotalErrorBudget(budget), run, epochs)
    spent = run.density / budget
    assert 0.9 <= spent <= 1.02
    assert figures["budget_spent"] == pytest.approx(spent)


def best(scale: Course, rate: Course, t: float) -> float:
    """√(s/γ): what the rule would be if all of the course were known."""
    return math.sqrt(scale(t) / max(rate(t), 0.02))


@pytest.mark.parametrize(
    ("scale", "rate"),
    [
        ("constant", "steps"),
        ("swings", "cosine"),
        *(
            pytest.param(scale, rate, marks=pytest.mark.nightly)
            for scale in ("rises", "falls", "warm-up and steps")
            for rate in ("steps", "cosine")
        ),
    ],
)
def test_the_total_error_is_near_the_best_in_hindsight(scale: str, rate: str) -> None:
    """In units of the update: near that of λ ∝ √(s/γ), below those of Top-k and one λ."""
    s, r = SCALES[scale], RATES[rate]
    make = partial(Feedback, s, r, 0.05, STEPS)
    run = make()
    controlled(TotalErrorBudget(BUDGET), run, EPOCHS)
    assert run.total_error < 1.3 * in_hindsight(make, partial(best, s, r), run.density)
    assert run.total_error < 1.2 * in_hindsight(make, lambda t: 1.0, run.density)
    assert run.total_error < 0.9 * of_top_k(make(), BUDGET)


def test_single_large_gradients_in_the_first_steps_do_not_hold_the_threshold_up() -> None:
    """As in a language model: their squares would outweigh 20 others, while errors grow."""
    spikes, steps = {5: 13.0, 16: 8.0, 24: 5.0}, 180

    def scale(t: float) -> float:
        return spikes.get(round(t * steps), 1.0)

    def rate(t: float) -> float:
        return 1 - t

    make = partial(Feedback, scale, rate, 0.15, steps, 3000)
    run = make()
    controlled(TotalErrorBudget(BUDGET), run, 3)
    assert run.total_error < 1.15 * in_hindsight(
        make, partial(best, lambda t: 1.0, rate), run.density
    )
    assert run.density <= 1.02 * BUDGET


def test_a_step_whose_gradients_are_ten_thresholds_large_sends_each_element_once() -> None:
    """All were sent, so c is still 1: that it was not 100 times as many says nothing of it."""
    past = [Stretch(threshold=1.0, density=1.0, share=0.5, scale=10.0, steps=10)]
    assert constant(past, 0.5, BUDGET) == pytest.approx(1, abs=0.02)


def test_densities_follow_gradient_scale_times_learning_rate() -> None:
    """The rate falls to a tenth at half of the run: nine tenths have been sent by then."""
    run = Feedback(lambda t: 1.0, lambda t: 0.1 ** (t >= 0.5), 0.05, 1000)
    controlled(TotalErrorBudget(BUDGET), run, 10)
    assert sum(run.sent_in_steps[:500]) / run.sent == pytest.approx(10 / 11, abs=0.03)


def test_the_budget_of_the_librarys_own_error_feedback() -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.randn(2000, generator=generator).exp()
    alone = Lockstep(1, HardThreshold(15.0))
    (engine,) = alone.engines

    class Library(Feedback):
        def step(self, threshold: float | None = None, most: int = 0) -> None:
            engine.levels.set(threshold)
            before = engine.statistics.tally.sent
            grad = scale * torch.randn(2000, generator=generator)
            alone.step([{"w": grad}])
            self.done += 1
            self.sent += int(engine.statistics.tally.sent - before)
            self.squares += float(grad @ grad)

    run = Library(lambda t: 1.0, lambda t: 1.0, 0.0, STEPS, 2000)
    controlled(TotalErrorBudget(BUDGET), run, EPOCHS)
    assert 0.9 <= run.density / BUDGET <= 1.02


@pytest.mark.parametrize("scale", [1e4, 1e-4])
def test_gradients_of_any_size(scale: float) -> None:
    """As of a loss that is summed, not averaged, over a large batch."""
    run = Feedback(lambda t: scale, lambda t: 1.0, 0.0, STEPS)
    controlled(TotalErrorBudget(BUDGET), run, EPOCHS)
    assert 0.9 <= run.density / BUDGET <= 1.02


def test_the_first_step_sends_nothing_unless_a_threshold_is_given() -> None:
    seen = [Observation(-1, num_elements=RESNET18, num_compressed=RESNET18, progress=0.0)]
    assert levels(TotalErrorBudget(0.001), seen) == [NOTHING]
    assert levels(TotalErrorBudget(0.001, initial=0.3), seen) == [0.3]


def budget_run(*rows: tuple[float, float]) -> list[Observation]:
    """Turns of (progress, density), with gradients of scale 0.1."""
    first = Observation(0, num_elements=1, num_compressed=1, steps=1, gradient_scale=0.1)
    return [replace(first, progress=t, sent_elements=density) for t, density in rows]


def test_the_first_measured_threshold_by_hand() -> None:
    """Of 0.997 · 0.01 over 0.9 of the run, ``0.1²/λ²`` is to be 0.01108: λ = 0.1/√0.01108."""
    *_, last = replay(TotalErrorBudget(BUDGET), budget_run((0, 0), (0.1, 0.0)))
    assert last.level == pytest.approx(0.1 / math.sqrt(0.00997 / 0.9))
    assert last.reason == "0% of the budget is spent after 10% of the run."


def test_what_is_sent_too_much_raises_the_threshold_and_a_spent_budget_sends_nothing() -> None:
    for density, sends in ((0.02, True), (0.2, False)):
        *_, before, last = replay(
            TotalErrorBudget(BUDGET), budget_run((0, 0), (0.1, 0.0), (0.2, density))
        )
        assert last.level is not None
        assert before.level is not None
        assert last.level > before.level
        assert (last.level < NOTHING) is sends


def test_what_cannot_be_used_keeps_the_threshold() -> None:
    """A density that is not a number, and the end of the run."""
    controller = TotalErrorBudget(BUDGET, initial=1.0)
    for density, over in ((math.nan, 0.2), (0.5, 1.0), (0.5, 0.0)):
        seen = budget_run((0.0, 0.0), (over, density))
        assert replay(controller, seen)[-1].reason.startswith("The threshold is kept.")
        assert levels(controller, seen) == [1.0, 1.0]


def test_what_cannot_be_used_is_not_spent() -> None:
    seen = budget_run((0.0, 0.0), (0.1, math.nan), (0.2, 0.1))
    *_, last = replay(TotalErrorBudget(BUDGET, initial=1.0), seen)
    assert last.figures["budget_spent"] == pytest.approx(0.1 * 0.1 / BUDGET)


def test_gradients_that_vanish_keep_the_threshold() -> None:
    seen = [replace(each, gradient_scale=0.0) for each in budget_run((0, 0), (0.1, 0.0))]
    assert levels(TotalErrorBudget(BUDGET, initial=0.7), seen) == [0.7, 0.7]


def test_a_rest_of_the_run_at_rate_zero_is_spent_evenly() -> None:
    """As under a cosine that ends an epoch early: the weights stand still, whatever is sent."""
    still = [replace(each, rates_ahead=(0.0, 0.0)) for each in budget_run((0, 0), (0.1, 0.0))]
    constant = budget_run((0, 0), (0.1, 0.0))
    assert levels(TotalErrorBudget(BUDGET), still) == levels(TotalErrorBudget(BUDGET), constant)


def test_a_run_without_an_end() -> None:
    with pytest.raises(ValueError, match=r"0\.1.*Trainer\(max_epochs=\.\.\.\)"):
        replay(TotalErrorBudget(0.1), [Observation(-1, num_elements=9, num_compressed=9)])


@pytest.mark.parametrize("whole", [40, 90])  # of 10,000 elements, in tensors sent whole
@pytest.mark.parametrize("scale", ["constant", "falls", "warm-up and steps"])
def test_what_is_sent_whole_is_paid_for_out_of_the_budget(scale: str, whole: int) -> None:
    """The budget is of all elements, so the threshold has only the rest to spend."""
    run = Feedback(SCALES[scale], RATES["constant"], 0.05, 600, 10_000 - whole)
    first = Observation(-1, progress=0.0, num_elements=10_000, num_compressed=10_000 - whole)
    controller = TotalErrorBudget(BUDGET)
    decision, state = controller.decide(first, controller.init())
    total, last = 0, 0
    for step in turns(600, 6, 80):
        before, squares = run.sent, run.squares
        for _ in range(last, step):
            run.step(decision.level)
        sent = run.sent - before + whole * (step - last)
        mean = (run.squares - squares) / (step - last) / 10_000
        now = replace(first, epoch=0, progress=step / 600, steps=step - last, sent_elements=sent)
        decision, state = controller.decide(replace(now, gradient_scale=math.sqrt(mean)), state)
        total, last = total + sent, step
    assert 0.9 <= total / 600 / 10_000 / BUDGET <= 1.02
    assert decision.figures["budget_spent"] == pytest.approx(total / 600 / 10_000 / BUDGET)


def test_a_budget_that_no_threshold_keeps_is_refused_before_the_first_step() -> None:
    first = Observation(-1, progress=0.0, num_elements=1000, num_compressed=985)
    words = r"TotalErrorBudget\(budget=0\.015.*1\.50% of the elements.*PerParameter\(HardThreshold"
    with pytest.raises(ValueError, match=words):
        replay(TotalErrorBudget(0.015), [first])
    assert replay(TotalErrorBudget(0.016), [first])[0].level is not None
