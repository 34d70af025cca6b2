"""Hands a controller one observation after the other, as a run would."""

import copy
import io
import json
from collections.abc import Iterable
from typing import Any

import torch
from hypothesis import HealthCheck, settings

from lightning_gc.controllers import Controller, Decision, Observation
from lightning_gc.controllers.base import State

patient = settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
"""For machines that are busy with something else; controllers themselves take microseconds."""


def replay(controller: Controller, observations: Iterable[Observation]) -> list[Decision]:
    """Return the decisions, the first of which comes before the first epoch."""
    state, decisions = controller.init(), []
    for observation in observations:
        decision, state = controller.decide(observation, state)
        decisions.append(decision)
    return decisions


def levels(controller: Controller, observations: Iterable[Observation]) -> list[float | None]:
    """Return the level of each epoch."""
    return [decision.level for decision in replay(controller, observations)]


def through_json(state: State) -> State:
    """The way of the broadcast."""
    return json.loads(json.dumps(state))


def through_a_checkpoint(state: State) -> State:
    """The way of ``torch.load(weights_only=True)``."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def outcome(controller: Controller, observation: Observation, state: State) -> tuple[Any, State]:
    """Return all that a turn shows, or the words of its error, and the new state; no NaN differs.

    The inputs must be left as they were.
    """
    before = repr((observation, state))
    try:
        decision, new = controller.decide(observation, state)
        shown: Any = repr((decision, json.dumps(new)))
    except ValueError as error:
        shown, new = str(error), copy.deepcopy(state)
    assert repr((observation, state)) == before
    return shown, new
