"""Write a controller's observations, states and decisions to a file, and replay them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .base import (
    Candidate,
    Controller,
    Curve,
    Decision,
    ExchangeRecord,
    Observation,
    Point,
    State,
    Weighed,
)


def append(path: str | Path, observation: Observation, state: State, decision: Decision) -> None:
    """Append one decision to a trace, a line of JSON.

    Args:
        path: of the file; made if it is missing, with its folder.
        observation: on which the controller decided.
        state: before the decision.
        decision: what it decided.
    """
    line = {
        "observation": dataclasses.asdict(observation),
        "state": state,
        "decision": dataclasses.asdict(decision),
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def replay(
    controller: Controller, path: str | Path, another: bool = False
) -> Iterator[tuple[Decision, Decision]]:
    """Yield each decision of a trace, and what the controller decides on the same observation.

    A trace of the same controller gives equal pairs, bit for bit: floats are written so that they
    are read back exactly.

    Args:
        controller: the run's controller, or another one to try on the run's observations.
        path: of the file.
        another: it is another one, or has other settings: it begins with its own state and goes on
            with that, not with the states in the file.
    """
    own = controller.init()
    for text in Path(path).read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        state = own if another else line["state"]
        decision, own = controller.decide(_observation(line["observation"]), state)
        yield Decision(**line["decision"]), decision


def _observation(saved: dict[str, Any]) -> Observation:
    """Return what JSON has made lists of as it was."""
    curves = {
        name: Curve(norm, tuple(Point(*point) for point in points))
        for name, (norm, points) in saved["error_curves"].items()
    }
    weighed = saved.get("weighed")
    if weighed is not None:
        seconds, candidates, *rest = weighed
        weighed = Weighed(seconds, tuple(Candidate(*each) for each in candidates), *rest)
    changed = {
        "each_step": tuple(saved.get("each_step", ())),
        "weighed": weighed,
        "optimizers": tuple(saved.get("optimizers", ())),
        "step_metrics": tuple(saved["step_metrics"]),
        "rates_ahead": tuple(saved["rates_ahead"]),
        "error_curves": curves,
        "exchanges": tuple(ExchangeRecord(*each) for each in saved["exchanges"]),
    }
    return Observation(**{**saved, **changed})
