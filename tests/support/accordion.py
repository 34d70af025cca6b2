"""Accordion's decisions as the two published programs make them, and runs to replay."""

from dataclasses import replace

from lightning_gc.controllers import Accordion, Decision, Observation

LOW, HIGH = 0.25, 0.01
FLAT = [0.1] * 9
Trace = dict[str, list[float]]  # parameter -> one norm per epoch
Little = list[dict[str, bool]]  # per epoch that follows: parameter -> is it compressed little


def falls(before: float, now: float, decay: float) -> bool:
    """Every fall in the published code; ours may have to be to 1/decay, but for rounding."""
    return now < before and (now == 0 or before / now > decay - 1e-6)


def authors(
    norms: Trace, rates: list[float], interval: int, threshold: float = 0.5, decay: float = 1.0
) -> Little:
    """What the published code does at the end of every epoch; rates[e] is that of epoch e."""
    old = dict.fromkeys(norms, 0.0)
    little = dict.fromkeys(norms, True)
    chosen = []
    for epoch in range(len(rates) - 1):
        if epoch % interval == 0:
            for name, values in norms.items():
                new = values[epoch]
                if epoch == 0:
                    little[name] = True
                else:
                    ratio = 9.0 if old[name] == 0 else abs(old[name] - new) / old[name]
                    little[name] = not ratio < threshold
                old[name] = new
        if falls(rates[epoch], rates[epoch + 1], decay):
            little = dict.fromkeys(norms, True)
        chosen.append(dict(little))
    return chosen


def comparison(norms: Trace, rates: list[float], interval: int, decay: float = 1.0) -> Little:
    """The total-error paper's stand-in: what it has chosen after the first batch of every epoch.

    In its ``AccordionTopKReducer.reduce``, ``epoch_count % switch_freq == 0`` in the first batch of
    a checked epoch only, since ``epoch_count`` is a fraction in all others; ``norms`` are those of
    that batch, ``rates`` the learning rates in it.
    """
    before: dict[str, float] = {}
    rate_before = 0.0
    little = dict.fromkeys(norms, True)
    chosen = []
    for epoch in range(len(rates) - 1):
        if epoch % interval == 0:
            for name, values in norms.items():
                new = values[epoch]
                little[name] = (
                    epoch == 0
                    or falls(rate_before, rates[epoch], decay)
                    or abs(before[name] - new) / before[name] > 0.5
                )
                before[name] = new
            rate_before = rates[epoch]
        chosen.append(dict(little))
    return chosen


def observations(norms: Trace, rates: list[float]) -> list[Observation]:
    seen = [Observation(-1, learning_rate=rates[0], next_learning_rate=rates[0])]
    for epoch in range(len(rates) - 1):
        now = {name: values[epoch] for name, values in norms.items()}
        seen.append(
            Observation(
                epoch,
                learning_rate=rates[epoch],
                next_learning_rate=rates[epoch + 1],
                gradient_norms=now,
            )
        )
    return seen


def first_batches(norms: Trace, rates: list[float], steps: int) -> list[Observation]:
    """Before every epoch of ``steps`` steps, and, if there are more than one, after its first."""
    seen = [Observation(-1, learning_rate=rates[0], next_learning_rate=rates[0])]
    for epoch in range(len(rates) - 1):
        now = {name: values[epoch] for name, values in norms.items()}
        told = Observation(epoch, learning_rate=rates[epoch], gradient_norms=now)
        if steps > 1:
            within = replace(told, epoch=epoch - 1, next_learning_rate=rates[epoch], ended=False)
            seen += [within, replace(within, steps=2)]  # the next one changes nothing
        seen.append(replace(told, next_learning_rate=rates[epoch + 1]))
    return seen


def little(decision: Decision, names: Trace) -> dict[str, bool]:
    return {name: decision.levels.get(name, decision.level) == LOW for name in names}


def accordion(interval: int, **options) -> Accordion:
    return Accordion(low=LOW, high=HIGH, interval=interval, **{"decay": 1.0, **options})
