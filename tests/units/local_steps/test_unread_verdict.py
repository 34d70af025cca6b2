"""A worker that is interrupted before it has read a verdict obeys the verdict all the same."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_gc.local_steps.elastic import ElasticExchange
from lightning_gc.local_steps.roll import Entry, Member, Report, Round, Verdict
from lightning_gc.transports.island import ALONE


class Interrupted(BaseException):
    """A signal."""


def raises() -> None:
    raise Interrupted


@pytest.mark.parametrize(("record", "expected"), [(Round(0, (0,)), "ended"), (None, "undone")])
def test_a_verdict_is_obeyed_after_a_signal(record: Round | None, expected: str) -> None:
    happened: list[str] = []
    entries: list[Entry] = [Verdict("run", 0, 0, record)]
    exchange: Any = ElasticExchange.__new__(ElasticExchange)
    exchange.__dict__ |= {
        "elastic": SimpleNamespace(patience=9.0, timeout=0.2, min_workers=1),
        "island": ALONE,
        "_unread": None,
        "_fetched": None,
        "_member": Member(Report("token", phase="done", run="run", number=0)),
        "_loop": SimpleNamespace(check=raises),
        "_line": SimpleNamespace(
            next=lambda _: entries.pop() if entries else None,
            say=lambda _: None,
            trouble="",
            awaited="",
            strange=False,
        ),
        "_workers": SimpleNamespace(
            engines=[1],
            first=SimpleNamespace(torn=False),
            end_round=lambda _: happened.append("ended"),
        ),
        "_undo": lambda: happened.append("undone"),
    }
    with pytest.raises(Interrupted):
        exchange._until(("commit",), "others")
    exchange._settle()
    assert happened == [expected]
