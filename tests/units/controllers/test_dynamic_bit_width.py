"""DynamicBitWidth follows its three rules, written again in plain Python."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gc import QSGD, HardThreshold, TopK
from lightning_gc.controllers import (
    DynamicBitWidth,
    Needs,
    Observation,
)
from tests.support.replay import levels, patient, replay

STEPS = ((0.0, 4), (0.6, 8), (0.8, 16))
STEADY = DynamicBitWidth(STEPS, loss_delta=None, patience=99)  # only the metric counts


def by_the_rules(metrics: list[float], losses: list[float], **rules) -> list[float | None]:
    """The bits of every epoch after the first, from bounds that rise.

    The rules are the paper's: a step function of the metric; the next step where the loss has
    hardly changed; compression removed for a while after too long on one step. Which of them goes
    first, and that a move ends a removal, is our reading.
    """
    bounds, bits = [b for b, _ in STEPS], [n for _, n in STEPS]
    step = age = pause = 0
    last_loss = None
    chosen: list[float | None] = []
    for metric, loss in zip(metrics, losses, strict=True):
        target = step
        if not math.isnan(metric):
            reached = max([0, *(i for i in range(1, len(bounds)) if metric >= bounds[i])])
            if reached > step or rules["allow_decrease"]:
                target = reached
            flat = (
                last_loss is not None
                and rules["loss_delta"] is not None
                and abs(loss - last_loss) < rules["loss_delta"]
            )
            if target == step and flat:
                target = min(step + 1, len(bounds) - 1)
        if math.isfinite(loss):
            last_loss = loss
        age = 0 if pause else age + 1
        if target != step:
            step, age, pause = target, 0, 0
        elif pause:
            pause -= 1
        elif age >= rules["patience"] and (rules["release_at_last"] or step < len(bounds) - 1):
            pause = rules["release_epochs"]
        chosen.append(None if pause else bits[step])
    return chosen


def seen(metrics: list[float], losses: list[float] | None = None) -> list[Observation]:
    """One observation an epoch; by default the loss falls by 1 each time."""
    losses = losses or [-float(i) for i in range(len(metrics))]
    return [
        Observation(-1),
        *(
            Observation(epoch, metrics={"val_accuracy": metric, "train_loss": loss})
            for epoch, (metric, loss) in enumerate(zip(metrics, losses, strict=True))
        ),
    ]


METRIC = st.sampled_from([0.0, 0.59, 0.6, 0.7, 0.8, 1.0, math.nan]) | st.floats(0, 1)
LOSS = st.sampled_from([1.0, 1.005, 1.01, 1.02, 1.5, 2.0, math.nan, math.inf])


@patient
@given(
    trace=st.lists(st.tuples(METRIC, LOSS), min_size=1, max_size=30),
    loss_delta=st.sampled_from([None, 0.01, 0.5]),
    patience=st.integers(1, 5),
    release_epochs=st.integers(1, 3),
    allow_decrease=st.booleans(),
    release_at_last=st.booleans(),
    mode=st.sampled_from(["max", "min"]),
)
def test_as_the_rules_say(trace, mode, **rules) -> None:
    metrics, losses = [m for m, _ in trace], [x for _, x in trace]
    wanted = by_the_rules(metrics, losses, **rules)
    sign = 1 if mode == "max" else -1
    steps = tuple((sign * bound, bits) for bound, bits in STEPS)
    controller = DynamicBitWidth(steps, mode=mode, **rules)
    assert levels(controller, seen([sign * m for m in metrics], losses)) == [4, *wanted]


def test_a_step_function_that_does_not_fall_back() -> None:
    metrics = [0.3, 0.59, 0.6, 0.5, 0.79, 0.8, 0.1, 1.0]
    assert levels(STEADY, seen(metrics)) == [4, 4, 4, 8, 8, 8, 16, 16, 16]
    falling = replace(STEADY, allow_decrease=True)
    assert levels(falling, seen(metrics)) == [4, 4, 4, 8, 4, 8, 16, 4, 16]


def test_a_step_may_be_left_out() -> None:
    assert levels(STEADY, seen([0.9])) == [4, 16]


def test_perplexity_is_to_fall() -> None:
    steps = ((math.inf, 4), (200.0, 8), (100.0, 16))
    controller = DynamicBitWidth(steps, mode="min", loss_delta=None)
    assert levels(controller, seen([500.0, 200.0, 150.0, 99.0])) == [4, 4, 8, 8, 16]


def test_the_loss_stands_still() -> None:
    controller = DynamicBitWidth(STEPS, loss_delta=0.01, patience=99)
    losses = [2.0, 1.5, 1.495, 1.4, 1.405, 1.405]
    decisions = replay(controller, seen([0.1] * 6, losses))
    assert [d.level for d in decisions] == [4, 4, 4, 8, 8, 16, 16]
    assert "train_loss changed by 0.005 only: next step" in decisions[3].reason


def test_the_loss_of_the_whole_epoch_is_preferred() -> None:
    """As Lightning names it where a loss is logged per step and per epoch."""
    rows = [{"val_accuracy": 0.1, "train_loss": x, "train_loss_epoch": 1.0} for x in (5.0, 3.0)]
    observations = [Observation(-1), *(Observation(i, metrics=row) for i, row in enumerate(rows))]
    assert levels(DynamicBitWidth(STEPS), observations) == [4, 4, 8]


def test_without_the_loss_rule_no_loss_is_needed() -> None:
    assert levels(STEADY, [Observation(0, metrics={"val_accuracy": 0.7})]) == [8]


def test_too_long_on_one_step() -> None:
    controller = DynamicBitWidth(STEPS, loss_delta=None, patience=3, release_epochs=2)
    decisions = replay(controller, seen([0.1] * 10))
    assert [d.level for d in decisions] == [4, 4, 4, None, None, 4, 4, 4, None, None, 4]
    assert "released after 3 epochs on one step" in decisions[3].reason
    assert "still released" in decisions[4].reason
    assert "resumed" in decisions[5].reason
    assert all(d.figures == {"step": 0} for d in decisions if d.level is not None)


def test_the_last_step_may_be_left_alone() -> None:
    """The paper excepts no step; at the last one every ninth epoch is uncompressed, for ever."""
    metrics = [0.1] * 9 + [0.9] * 28
    controller = DynamicBitWidth(STEPS, loss_delta=None)
    chosen = levels(controller, seen(metrics))
    assert [i for i, level in enumerate(chosen) if level is None] == [8, 18, 27, 36]
    alone = levels(replace(controller, release_at_last=False), seen(metrics))
    assert [i for i, level in enumerate(alone) if level is None] == [8]
    assert set(alone[10:]) == {16}


@pytest.mark.parametrize(
    ("logged_per_step", "settings", "named"),
    [
        (("train_loss",), {}, ["train_loss"]),
        (("train_loss", "val_accuracy"), {}, ["train_loss", "val_accuracy"]),
        (("train_loss",), {"loss_delta": None}, []),  # not read
        (("train_loss_epoch", "other"), {}, []),
        ((), {}, []),
    ],
)
def test_a_metric_of_the_last_batch_is_warned_of_once(logged_per_step, settings, named) -> None:
    rows = [replace(o, step_metrics=logged_per_step) for o in seen([0.1] * 4)]
    warnings = [d.warning for d in replay(DynamicBitWidth(STEPS, **settings), rows)]
    assert not any(warnings[:1] + warnings[2:])
    assert bool(warnings[1]) == bool(named)
    for name in named:
        assert f"self.log({name!r}, ..., on_epoch=True)" in warnings[1]


def test_where_the_whole_epochs_loss_is_logged_too_nothing_is_wrong() -> None:
    metrics = {"val_accuracy": 0.1, "train_loss": 5.0, "train_loss_epoch": 1.0}
    rows = [Observation(-1), Observation(0, metrics=metrics, step_metrics=("train_loss",))]
    assert not replay(DynamicBitWidth(STEPS), rows)[1].warning


def test_a_metric_that_is_not_a_number_keeps_the_level_and_says_so() -> None:
    decisions = replay(STEADY, seen([0.7, math.nan, 0.9]))
    assert [d.level for d in decisions] == [4, 8, 8, 16]
    assert "val_accuracy is nan, so the level is kept" in decisions[2].reason


def test_a_loss_that_is_not_a_number_moves_nothing_and_says_so() -> None:
    controller = DynamicBitWidth(STEPS, loss_delta=0.5, patience=99)
    decisions = replay(controller, seen([0.1] * 4, [3.0, math.nan, 2.0, 1.9]))
    assert [d.level for d in decisions] == [4, 4, 4, 4, 8]
    assert "train_loss is nan, so the level is kept" in decisions[2].reason


@pytest.mark.parametrize("missing", ["val_accuracy", "train_loss"])
def test_a_metric_that_was_not_logged(missing: str) -> None:
    logged = {"val_accuracy": 0.1, "train_loss": 1.0, "val_f1": 0.2}
    del logged[missing]
    with pytest.raises(ValueError, match=f"needs the metric '{missing}'") as caught:
        replay(DynamicBitWidth(STEPS), [Observation(-1), Observation(0, metrics=logged)])
    for words in (*logged, "epoch 0", f"self.log('{missing}', ...)", "name another one"):
        assert words in str(caught.value)
    with pytest.raises(ValueError, match="logged were: nothing"):
        replay(DynamicBitWidth(STEPS), [Observation(0)])


@pytest.mark.parametrize("missing", ["val_accuracy", "train_loss"])
def test_a_metric_that_a_checkpoint_did_not_have(missing: str) -> None:
    logged = {"val_accuracy": 0.7, "train_loss": 1.0}
    del logged[missing]
    controller = DynamicBitWidth(STEPS)
    state = {"step": 1, "epochs": 3, "released": 1, "loss": 2.0}
    decision, after = controller.decide(Observation(4, metrics=logged, resumed=True), state)
    assert decision.keeps_levels
    assert after == state
    assert f"'{missing}'" in decision.warning
    assert "save_on_train_epoch_end=True" in decision.warning


def test_nothing_is_asked_of_the_gradients() -> None:
    assert DynamicBitWidth().needs == Needs()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "up"}, ["mode='up'", "'max' or 'min'"]),
        ({"steps": ()}, ["steps=()", "at least one"]),
        ({"steps": ((0, 4), (0.5, -8))}, ["-8", "at least 0"]),
        ({"steps": ((0, 4), (0.8, 8), (0.6, 16))}, ["0.8", "mode='max'", "rise"]),
        ({"steps": ((0, 4), (1, 8), (2, 16)), "mode": "min"}, ["mode='min'", "fall"]),
        ({"patience": 0}, ["patience=0", "1 or more"]),
        ({"release_epochs": 0}, ["release_epochs=0", "1 or more"]),
    ],
)
def test_bad_settings_are_named(settings, words: list[str]) -> None:
    with pytest.raises(ValueError, match="DynamicBitWidth") as caught:
        DynamicBitWidth(**settings)
    assert all(word in str(caught.value) for word in words)


def test_steps_lead_to_less_compression_whatever_the_knob() -> None:
    DynamicBitWidth().check(QSGD().knob)
    DynamicBitWidth(((0, 0.01), (0.5, 0.1), (0.9, None))).check(TopK().knob)  # type: ignore[arg-type]
    DynamicBitWidth(((0, 0.1), (0.5, 0.01))).check(HardThreshold().knob)
    with pytest.raises(ValueError, match=r"level 0\.1 compresses harder than 0\.01 before it"):
        DynamicBitWidth(((0, 0.01), (0.5, 0.1))).check(HardThreshold().knob)
    with pytest.raises(ValueError, match="has no level"):
        DynamicBitWidth().check(None)
