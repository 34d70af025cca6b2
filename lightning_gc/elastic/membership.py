"""Membership: a worker among the others, over a carrier of reports, log and snapshots."""

from __future__ import annotations

import atexit
import logging
import queue
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

from lightning_gc.core.notices import say, waiting
from lightning_gc.core.saved_state import Tree
from lightning_gc.elastic.roll import (
    Called,
    Do,
    Entry,
    Member,
    Report,
    Terms,
    Verdict,
    entry_of,
    in_words,
)
from lightning_gc.local_steps.round_plan import Elastic
from lightning_gc.transports.base import Transport
from lightning_gc.transports.island import Island

_log = logging.getLogger(__name__)
TRIES = 3
"""How often a snapshot is fetched from the same donor, and different results are exchanged."""
_WAITS = 8.0
"""Seconds after which a worker says for whom it waits: a rendezvous tells it every 5 s."""
Taken = tuple[int, int, Literal["kept", "zero"]]
"""The round of a snapshot that was taken, the position in it, and whether the own error is kept."""
Ask = Callable[[Tree], Any]
"""Asks another worker with a tree; returns the answer."""


class Status(NamedTuple):
    """State of the keeper, as a carrier knows it.

    Attributes:
        trouble: why the keeper is not there, or does not listen; empty if it does.
        awaited: for whom workers wait, as the keeper has said last; empty if they wait for none.
        strange: whether it will not listen to this worker, however often it is called.
    """

    trouble: str = ""
    awaited: str = ""
    strange: bool = False


class Carrier(ABC):
    """A way of meeting: it carries an elastic run between a worker, the keeper and the others.

    A thread meets them, so that the training thread waits no longer than it wants to.

    Args:
        elastic: as the user has set it.
        status: of the keeper, before it is heard.

    Attributes:
        status: of the keeper.
        committed: run and round of the last commit in the log, which may not be heard yet.

    Laws, for every carrier:
        1. All workers hear the same log, in the same order, each entry once.
        2. An entry that one worker has heard is never taken back. So a heard verdict is a commit.
        3. Bytes of those who do not have the secret, of another run or from an earlier time are
           not believed. Nothing is unpickled.
    """

    def __init__(self, elastic: Elastic, status: Status) -> None:
        self.status, self._elastic = status, elastic
        self._report: Report | None = None
        self._sent: Report | None = None
        self._beats = 0  # reports that were sent
        self.committed = "", -1
        self._entries: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="elastic", daemon=True)

    def _begin(self, open_to_all: bool) -> None:
        """Start the thread; warn if everybody may take part."""
        if self._elastic.secret is None and open_to_all:
            _log.warning(
                "Elastic(secret=None): everyone who reaches %s may take part in this run, and "
                "change its weights. Make a secret for all: openssl rand -base64 32 > secret.txt",
                self._elastic.rendezvous,
            )
        self._thread.start()
        atexit.register(self.close)

    def report(self, report: Report) -> None:
        """Let the keeper know this from now on; do not wait for it."""
        self._report = report
        self._wake()

    def hear(self, seconds: float) -> Entry | None:
        """Return the next entry of the keeper's log; None if none has come in this time."""
        with suppress(queue.Empty):
            return self._entries.get(timeout=seconds)
        return None

    @abstractmethod
    def propose(self, group: str, rank: int, size: int) -> AbstractContextManager[Transport]:
        """Yield a transport between the members of an attempt.

        Args:
            group: name of the attempt.
            rank: of this member.
            size: number of members.

        Raises:
            PeerError: a member is gone; or an error for which ``is_from_backend`` is true.
        """

    @abstractmethod
    def serve(self, answer: Callable[[Any], Tree]) -> str:
        """Let ``answer`` answer the other workers, in any thread; return this worker's address."""

    @abstractmethod
    def visit(self, address: str) -> AbstractContextManager[Ask]:
        """Yield what asks the worker at an address.

        Raises:
            OSError, ValueError: it does not answer, or answers nonsense.
        """

    def close(self, wait: float = 2.0) -> None:
        """Send the last report, and leave; again does nothing.

        Args:
            wait: seconds that it may take to send it.
        """
        atexit.unregister(self.close)
        if self._closed.is_set():
            return
        limit = time.monotonic() + wait
        while self._sent is not self._report and time.monotonic() < limit:
            time.sleep(0.005)
        self._closed.set()
        self._wake()
        self._thread.join(wait)
        self._leave()

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                self._turn()
            except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
                self._fail(error)

    def _put(self, entry: Entry) -> None:
        """Let the worker hear an entry of the log."""
        if isinstance(entry, Verdict) and entry.record is not None:
            self.committed = entry.run, entry.round
        self._entries.put(entry)

    def _next_report(self, report: Report) -> Report:
        self._beats += 1
        return replace(report, beat=self._beats)

    @abstractmethod
    def _wake(self) -> None:
        """End a wait of the thread."""

    @abstractmethod
    def _turn(self) -> None:
        """Report, and read the log; again and again, until the carrier is closed."""

    @abstractmethod
    def _fail(self, error: Exception) -> None:
        """Note what has ended a turn, and wait a moment."""

    @abstractmethod
    def _leave(self) -> None:
        """Clean up; the thread has ended."""


class Membership:
    """A worker among the others: it reads the keeper's log, and reports.

    In an island, rank 0 has the carrier. All ranks read the same entries of the log, and do the
    same.

    Attributes:
        member: the worker's part of the protocol.
        neighbours: number -> address of the members of the last round that it was called to.
        heed: raises what ends the loop, such as a signal.
        take: begins at the snapshot at an address.
    """

    take: Callable[[str], Taken]

    def __init__(self, elastic: Elastic, island: Island) -> None:
        self.member = Member(Report(""))
        self.neighbours: dict[int, str] = {}
        self.heed: Callable[[], None] = lambda: None
        self.elastic, self.island = elastic, island
        self._carrier: Carrier | None = None
        self._unread: Entry | None = None  # of the log
        self._fetching: Do | None = None  # the snapshot that is under way
        self._failures = 0

    def open(
        self, terms: Terms, carrier: Callable[[], Carrier], answer: Callable[[Any], Tree]
    ) -> None:
        """Meet the others, and get a number.

        Args:
            terms: all but the address.
            carrier: returns what carries the run; called on rank 0.
            answer: answers other workers.
        """

        def first_report() -> str:
            self._carrier = carrier()
            told = replace(terms, address=self._carrier.serve(answer))
            return Report(secrets.token_hex(8), terms=told).in_words()

        self.member = Member(Report.read(self.island.say(first_report)))
        self.until("number", whom=self._keeper)

    def until(self, *wanted: str, whom: str = "other workers") -> Do:
        """Read the log until one of these is to be done, and take snapshots on the way.

        Args:
            wanted: as ``Do.what``; ``"fetched"``: a snapshot has been taken.
            whom: the worker waits for, if the rendezvous has not told.
        """
        limit = time.monotonic() + self.elastic.patience
        with self.saying(lambda: self._waits(whom), _WAITS):
            while True:
                self.report()
                text = self.island.say(partial(self._next, limit, whom))
                done = self._read(entry_of(text)) if text else None
                if done is not None and done.what == "fetch":
                    done = self._fetch(done)
                    self.report()
                if done is not None and done.what in wanted:
                    return done

    @property
    def _keeper(self) -> str:
        return "a keeper" if self.elastic.in_folder else "a rendezvous"

    def verdict(self) -> Do | None:
        """Return what the verdict on the worker's attempt demands, if one comes in time."""
        if self.member.report.phase != "done" or self._carrier is None:
            return None
        done, limit = None, time.monotonic() + self.elastic.timeout
        with self.saying(f"hears how round {self.member.report.round} has ended"):
            while done is None and time.monotonic() < limit:
                entry = self._unread or self._carrier.hear(0.1)
                done = None if entry is None else self._read(entry)
        return done

    def report(self) -> None:
        """Let the keeper know where this worker is."""
        if self._carrier is not None:
            self._carrier.report(self.member.report)

    @property
    def carrier(self) -> Carrier:
        """The carrier of the run, on rank 0."""
        assert self._carrier is not None
        return self._carrier

    def visit(self, address: str) -> AbstractContextManager[Ask]:
        """Yield what asks another worker, on rank 0; on other ranks it is not called."""
        return nullcontext(_not_asked) if self._carrier is None else self._carrier.visit(address)

    def is_over(self, number: int) -> bool:
        """Return whether a round of the run that this worker comes into has been committed."""
        run, last = self.carrier.committed
        return run == self.member.report.sought and number <= last

    def saying(
        self, what: str | Callable[[], str], first: float | None = None
    ) -> AbstractContextManager[None]:
        """Say what this worker does, if it takes long; one rank of an island says it."""
        if self._carrier is None:
            return nullcontext()

        def sentence() -> str:
            number = self.member.report.number
            who = "This worker" if number is None else f"Worker {number}"
            return f"{who} {what if isinstance(what, str) else what()}"

        return waiting(sentence, first)

    def close(self) -> None:
        """Say goodbye, and hang up."""
        if self._carrier is not None:
            self.member.leaves()
            self.report()
            self._carrier.close()

    def _waits(self, whom: str) -> str:
        """Return for whom or what this worker waits."""
        report, fetching, status = self.member.report, self._fetching, self.carrier.status
        if fetching is not None:
            return f"takes the snapshot of worker {fetching.donor} at {fetching.address}"
        place = f" in round {report.round}" if report.phase in ("asking", "done", "failed") else ""
        if status.trouble:
            return f"waits{place} for {whom}: {status.trouble}"
        return f"waits{place} for {status.awaited or whom}"

    def _next(self, limit: float, whom: str) -> str:
        """Return the next entry of the log as text, empty if the log has no new one."""
        status = self.carrier.status
        if status.strange and self.member.report.number is None:
            raise ValueError(
                f"This worker cannot take part: {status.trouble}. Give all workers and the "
                f"rendezvous the same address, secret and version."
            )
        if time.monotonic() > limit:
            raise RuntimeError(
                f"This worker has waited {self.elastic.patience:g} s for {whom}, with "
                f"min_workers={self.elastic.min_workers}. The {self._keeper.partition(' ')[2]}: "
                f"{status.trouble or 'it answers'}. Start it, or more workers, or raise "
                f"Elastic(patience=...)."
            )
        # Kept until it is read: what follows may raise, and a commit must not be lost.
        self._unread = self._unread or self.carrier.hear(0.1)
        self.heed()
        return "" if self._unread is None else in_words(self._unread)

    def _read(self, entry: Entry) -> Do | None:
        self._unread = None
        done = self.member.read(entry)
        self.report()
        if done is not None and done.what == "refused":
            raise ValueError(f"This worker cannot take part: {done.why}.")
        if isinstance(entry, Called) and done is not None:
            self.neighbours = dict(zip(entry.members, entry.addresses, strict=False))
        if isinstance(entry, Verdict) and entry.record is not None:
            for number, norm in entry.record.lost.items():
                if number != self.member.report.number:
                    error = f"its error of norm {norm:.6g} is lost" if norm else "no error is lost"
                    _log.warning(
                        "Worker %d is silent: round %d is made without it. If it has died, %s. If "
                        "it comes back, it keeps its error.",
                        *(number, entry.record.round, error),
                    )
            for number in entry.record.left:
                say("Worker %d has left, before round %d.", number, entry.record.round)
        return done

    def _fetch(self, done: Do) -> Do | None:
        """Take the snapshot of a member; if it cannot be had, ask for another one."""
        self._fetching = done
        for attempt in range(TRIES):
            try:
                self.member.fetched(*self.take(done.address))
            except (OSError, ValueError) as error:
                self._failures += 1
                _log.warning(
                    "Worker %d could not take a snapshot of worker %d: %s",
                    *(self.member.number, done.donor, error),
                )
                if self._failures > 10 * TRIES:
                    raise RuntimeError(
                        f"No snapshot could be had in {self._failures} tries. {error}"
                    ) from error
                time.sleep(0.1 * (attempt + 1))
            else:
                self._failures, self._fetching = 0, None
                return replace(done, what="fetched")
        self._fetching = None
        self.member.not_fetched()
        return None


def _not_asked(tree: Tree) -> Any:
    raise AssertionError(f"rank 0 asks: {str(tree)[:60]}")
