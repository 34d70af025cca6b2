"""A worker that is interrupted before it has read a verdict obeys the verdict all the same."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_gc.elastic.elastic_exchange import ElasticExchange
from lightning_gc.elastic.membership import Membership, Status
from lightning_gc.elastic.roll import Entry, Member, Report, Round, Verdict
from lightning_gc.transports.island import ALONE


class Interrupted(BaseException):
    """A signal."""


def raises() -> None:
    raise Interrupted


@pytest.mark.parametrize(("record", "expected"), [(Round(0, (0,)), "ended"), (None, "undone")])
def test_a_verdict_is_obeyed_after_a_signal(record: Round | None, expected: str) -> None:
    happened: list[str] = []
    entries: list[Entry] = [Verdict("run", 0, 0, record)]
    elastic: Any = SimpleNamespace(patience=9.0, timeout=0.2, min_workers=1)
    membership: Any = Membership(elastic, ALONE)
    membership.member = Member(Report("token", phase="done", run="run", number=0))
    membership.heed = raises
    membership._carrier = SimpleNamespace(
        hear=lambda _: entries.pop() if entries else None,
        report=lambda _: None,
        status=Status(),
    )
    exchange: Any = ElasticExchange.__new__(ElasticExchange)
    exchange._membership = membership
    exchange._workers = SimpleNamespace(
        engines=[1],
        first=SimpleNamespace(torn=False),
        end_round=lambda _: happened.append("ended"),
    )
    exchange._attempt = SimpleNamespace(undo=lambda: happened.append("undone"))
    with pytest.raises(Interrupted):
        membership.until("commit")
    exchange._settle()
    assert happened == [expected]
