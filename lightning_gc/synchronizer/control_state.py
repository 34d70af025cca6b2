"""What a control loop keeps in a checkpoint."""

from __future__ import annotations

from lightning_gc.state_structure import (
    ANYTHING,
    COUNT,
    FINITE,
    FLAG,
    INTEGER,
    LEVEL,
    NUMBER,
    TEXT,
    WHOLE,
    Each,
    Listed,
    Optional,
    Pair,
    Record,
)

CONTROL_STATE = Record(
    {
        "state": Record(others=ANYTHING),  # the controller's own
        "decision": Optional(
            Record(
                {"level": LEVEL, "levels": Each(LEVEL)},
                {
                    "reason": TEXT,
                    "figures": Each(NUMBER),
                    "warning": TEXT,
                    "keeps_levels": FLAG,
                    "every": Optional(COUNT),
                },
            )
        ),
        "ended": FLAG,
        "epoch": Optional(WHOLE),
        "pause": WHOLE,
        "rate": FINITE,
        "steps": INTEGER,
        "epoch_steps": INTEGER,
        "metrics": Each(NUMBER),
    },
    {  # not in states of before
        "levels": Optional(Pair(LEVEL, Each(LEVEL))),  # in force; a decision may keep what was
        "every": Optional(COUNT),
        "due": Listed(TEXT),
        "first_steps": INTEGER,
    },
)
"""What ``ControlLoop.state_dict`` returns."""
