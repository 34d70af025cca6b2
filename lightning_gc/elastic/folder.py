"""Folder: an elastic run through a folder or a bucket, where no process serves anything.

Objects, under the URL of the run:

- ``site``: a random name of the folder, which all signatures contain.
- ``reports/BOX``: what a process says of itself, written again with each beat.
- ``keeper``: the lease of the process that decides, written again by its holder.
- ``log/NUMBER``: entries of the keeper's log, and the report of who has decided them. Who creates a
  number first has decided it, so that a second keeper loses.
- ``rounds/GROUP-PHASE-RANK``: what a member sends in an attempt. Removed after the verdict.
- ``mail/BOX-...``: questions to a worker, and its answers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gc.core import Exchange, Reply, Request
from lightning_gc.core.digest import ReplicaError
from lightning_gc.core.flow import described
from lightning_gc.core.notices import say
from lightning_gc.core.saved_state import Tree
from lightning_gc.elastic.membership import Ask, Carrier, Status
from lightning_gc.elastic.objects import Objects
from lightning_gc.elastic.rendezvous import Chronicle
from lightning_gc.elastic.roll import (
    BEAT,
    NEAR,
    Called,
    Ended,
    Enter,
    Entry,
    Founded,
    Keeper,
    Report,
    Round,
    Verdict,
    attempt_of,
    entry_of,
    in_words,
)
from lightning_gc.elastic.roll_file import RollFile
from lightning_gc.elastic.snapshot import from_bytes, to_bytes
from lightning_gc.local_steps.round_plan import Elastic
from lightning_gc.transports.accounting import human_bytes
from lightning_gc.transports.base import Transport
from lightning_gc.transports.peer_error import PeerError
from lightning_gc.transports.simulated import Simulated

_log = logging.getLogger(__name__)
KEPT = 256
"""Objects of the log that stay. A worker that was away for longer continues at the oldest."""
POLL = 0.02
"""Seconds between two looks while somebody waits, if the store is as fast."""
IN_A_ROW = 11
"""Requests of a round that wait for each other, of a method with one message."""
_SLOWEST = 5.0
"""Most seconds between two beats, however slow the store is."""
_SETTLE, _LEASE = 2, 6
"""Beats that a new keeper listens, and after which a lease that is not renewed is taken over."""
_RECENT = 8
"""Looks at the folder from which the seconds of a request are known."""
_ANSWER = ".answer"
_LATER = "running"
"""The phase that is told with the next beat: the keeper knows whom it has called."""
_BUSY = ("training", "running", "left")
"""Phases in which a worker waits for no decision, so that it looks once in a beat."""


class Folder(Carrier):
    """Carries an elastic run by objects: reports, a log, payloads, questions and answers.

    One thread reports, reads the log, and decides if it holds the lease. Another one answers.

    A worker that joins takes the snapshot of a member, as over sockets, through the folder. Members
    live as long as the run does. Stored snapshots with the payloads of the rounds since would need
    neither, but cost a snapshot every few rounds and all payloads until then; a worker that joins
    would have to compute those rounds.

    Args:
        elastic: as the user has set it.

    Raises:
        ValueError: the folder is not suitable, or has another secret; the roll is not a roll.
    """

    def __init__(self, elastic: Elastic) -> None:
        super().__init__(elastic, Status("the run has no keeper yet"))
        url = str(elastic.rendezvous)
        self._objects = Objects(url, elastic.secret)
        seconds = self._objects.enter()
        self._roll = None if elastic.roll is None else RollFile(Path(elastic.roll))
        self._box = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._seconds, self._slowest = seconds, _SLOWEST  # of a request lately, and of a beat
        self._set_beat()
        # A store that becomes slow makes no worker report so late that it is taken for dead.
        self._slowest = min(max(self._beat, BEAT / NEAR * elastic.timeout), _SLOWEST)
        least = NEAR / BEAT * self._beat
        if elastic.timeout < least:
            _log.warning(
                "A request to %s takes %.2g s, so workers report every %.2g s. With "
                "Elastic(timeout=%g) they are taken for dead; give %.0f or more.",
                *(url, seconds, self._beat, elastic.timeout, least),
            )
        self._poll = max(POLL, 2 * seconds)
        self._due, self._since = 0.0, time.monotonic()  # of the next report, of the last news
        self._called: Called | None = None  # without a verdict, as far as it has read
        self._decided: list[Round | Ended] = []  # as far as it has read
        self._deciders: dict[str, Report] = {}  # token -> what they said when they decided
        self._next = 0  # of the log
        self._lease: tuple[bytes | None, float] = None, time.monotonic()  # as seen last, and since
        self._lease_due, self._lease_beat, self._renewed = 0.0, 0.0, 0
        self._desk: _Desk | None = None  # of the keeper, if this process holds the lease
        self._payloads: dict[str, str] | None = None  # as listed last; None: perhaps some more
        self._rounds, self._began = 0, time.monotonic()
        self._failed_from: float | None = None  # time since which the store fails
        self._woken, self._asked = threading.Event(), threading.Event()
        self._visited = -math.inf  # when the log has sent somebody to this worker
        self._mail: threading.Thread | None = None
        log = sorted(self._objects.names("log"))
        for name, body in zip(log, self._objects.get_all(f"log/{n}" for n in log), strict=True):
            if body is not None:
                self._next = int(name)
                self._take(body)
        self._begin(open_to_all=True)

    def _set_beat(self) -> None:
        # A beat costs a request, and finds a death that much earlier.
        least = max(BEAT, self._elastic.timeout / 12)
        self._beat = min(max(least, 10 * self._seconds), self._slowest)

    def _wake(self) -> None:
        if self._closed.is_set() or self._is_urgent(self._report):
            self._woken.set()

    def _is_urgent(self, report: Report | None) -> bool:
        return report is not self._sent and report is not None and report.phase != _LATER

    @contextlib.contextmanager
    def propose(self, group: str, rank: int, size: int) -> Iterator[Transport]:
        """Yield the transport of an attempt."""
        yield _Round(self, group, rank, size)

    def wait(self, group: str, began: float, whom: str) -> None:
        """Wait a moment for others of a group; PeerError if they will not come."""
        called = self._called
        if called is None or called.group != group:
            raise PeerError(f"The round was ended while this worker waited for {whom}.")
        if time.monotonic() > began + self._elastic.timeout:
            raise PeerError(
                f"Nothing has come from {whom} in {self._elastic.timeout:g} s. It has died, or "
                f"{self._objects.url} is slow; see Elastic(timeout=...)."
            )
        time.sleep(self._pause(began))

    def _pause(self, since: float) -> float:
        """Return seconds until the next look; more, the longer nothing has come."""
        return min(max(self._poll, (time.monotonic() - since) / 4), self._beat)

    def serve(self, answer: Callable[[Any], Tree]) -> str:
        """Answer what is asked in this worker's box."""
        self._mail = threading.Thread(target=self._serve, args=(answer,), name="mail", daemon=True)
        self._mail.start()
        return self._box

    def _serve(self, answer: Callable[[Any], Tree]) -> None:
        while not self._closed.is_set():
            near = time.monotonic() < self._visited + self._elastic.timeout
            self._asked.wait(self._beat / 4 if near else 4 * self._beat)
            self._asked.clear()
            with contextlib.suppress(OSError):
                mail = [n for n in self._objects.names("mail") if n.startswith(f"{self._box}-")]
                for name in sorted(f"mail/{each}" for each in mail if not each.endswith(_ANSWER)):
                    question = self._objects.get(name)
                    self._objects.remove([name])
                    try:
                        made = to_bytes(answer(from_bytes(question or b"")))
                    except Exception as error:  # this thread answers others, too
                        _log.warning("A question was not answered: %s", error)
                        made = b""
                    self._objects.put(name + _ANSWER, made)

    @contextlib.contextmanager
    def visit(self, address: str) -> Iterator[Ask]:
        """Yield what writes questions into a worker's box, and waits for its answers."""

        def ask(tree: Tree) -> Any:
            name = f"mail/{address}-{secrets.token_hex(8)}"
            # It answers after an exchange that it is in, which may take as long as one wait.
            began, limit = time.monotonic(), 2 * self._elastic.timeout
            self._objects.put(name, to_bytes(tree))
            while (answer := self._objects.get(name + _ANSWER)) is None:
                if name + _ANSWER in self._objects.refused:
                    self._objects.remove([name + _ANSWER])
                    raise ValueError(f"the answer of the worker at {address} is damaged")
                if time.monotonic() > began + limit or self._closed.is_set():
                    self._objects.remove([name])
                    raise TimeoutError(f"the worker at {address} has not answered in {limit:g} s")
                time.sleep(self._pause(began))
            self._objects.remove([name + _ANSWER])
            return from_bytes(answer)

        yield ask

    def close(self, wait: float = 2.0) -> None:
        """Write the last report, give the lease back, and tell what the folder has cost."""
        super().close(max(wait, 4 * self._beat))

    def _leave(self) -> None:
        self._asked.set()
        if self._mail is not None:
            self._mail.join(4 * self._beat)
        self._objects.close()
        if self._roll is not None:
            self._roll.close()
        known, took = self._objects, time.monotonic() - self._began
        say(
            "The folder %s took %d requests, %s sent and %s received in %d rounds and %.0f s.",
            *(known.url, known.requests, human_bytes(known.sent), human_bytes(known.received)),
            *(self._rounds, took),
        )

    # ------------------------------------------------------------------ the thread's work

    def _work(self) -> None:
        super()._work()
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            self._give_back()

    def _turn(self) -> None:
        self.look(time.monotonic())
        pause = self._pause(self._since) if self._waits else self._beat
        self._woken.wait(min(pause, max(0.0, self._due - time.monotonic())))
        self._woken.clear()

    @property
    def _waits(self) -> bool:
        """Whether this worker waits for a decision."""
        return self._report is not None and self._report.phase not in _BUSY

    def look(self, now: float) -> None:
        """Report, read the log, and decide if this process holds the lease; each once."""
        body, before = None, self._objects.requests
        news, due = self._say(now), now >= self._lease_due
        if self._desk is None and not news:  # nobody has answered at once
            body = self._objects.get(f"log/{self._next:08d}")
            if body is not None:
                self._take(body)
        if due:
            self._see_lease(now, behind=body is not None)
        if self._desk is not None:
            if self._failed_from is not None and now > self._failed_from + 4 * self._beat:
                # Others have been silent, too.
                self._desk.keeper.listen(now + _SETTLE * self._beat)
            news = self._desk.hear(self._report, now, beats=due or self._waits) or news
            news = self._decide() or news
        self._failed_from = None
        if news or body is not None:
            self._since = now
        if self.status.trouble:
            self.status = self.status._replace(trouble="")
        if (asked := self._objects.requests - before) > 0:
            seconds = (time.monotonic() - now) / asked
            self._seconds += (seconds - self._seconds) / _RECENT
            self._set_beat()

    def _fail(self, error: Exception) -> None:
        now = time.monotonic()
        self.status = self.status._replace(trouble=str(error))
        self._failed_from = now if self._failed_from is None else self._failed_from
        self._due = now + self._beat
        self._woken.wait(self._beat)
        self._woken.clear()

    def _say(self, now: float) -> bool:
        """Write the report, if there is something new or a beat is due; return the former."""
        report = self._report
        urgent = self._is_urgent(report)
        if report is None or not (urgent or now >= self._due):
            return False
        if self._desk is None:  # or else the log has it
            said = {"report": self._next_report(report).in_words(), "beat": self._beat}
            self._objects.put(f"reports/{self._box}", json.dumps(said).encode())
        self._sent, self._due = report, now + self._beat
        return urgent

    def _take(self, body: bytes) -> None:
        """Read the next object of the log."""
        self._next += 1
        told = json.loads(body)
        if told["by"] is not None:
            report = Report.read(told["by"])
            self._deciders[report.token] = report
        for entry in map(entry_of, told["said"]):
            if isinstance(entry, Called):
                self._called = entry
            elif isinstance(entry, Verdict):
                # A new keeper says the last verdict again, while members may be in a later attempt.
                called = self._called
                if called is not None and attempt_of(entry) == attempt_of(called):
                    self._called = None
            elif isinstance(entry, Founded | Enter) and entry.address == self._box:
                self._visited = time.monotonic()
                self._asked.set()
            decided = entry.record if isinstance(entry, Verdict) else entry
            if isinstance(decided, Round | Ended):
                self._rounds += 1
                self._decided = [*self._decided[-KEPT:], decided]
                if self._roll is not None:
                    self._roll.append(decided)
            self._put(entry)

    def _see_lease(self, now: float, behind: bool) -> None:
        """Renew the lease; or look at it, and take one over that nobody renews.

        Args:
            now: the time.
            behind: whether the log may have more than this worker has read.
        """
        self._lease_due = now + _LEASE * self._beat / 3
        body = self._objects.get("keeper")
        if self._desk is not None and body != self._lease[0]:
            self._retire("another worker has taken it over")
        if self._desk is not None:
            self._hold(now)
            return
        if body != self._lease[0]:
            self._lease = body, now
        if body is not None:
            told = json.loads(body)
            self.status = Status(awaited=str(told["awaited"]))
            self._lease_beat = float(told["beat"])  # of who holds it
            oldest = told["next"] - KEPT
            self._next = max(self._next, oldest)  # what it has not read is gone
        late = now > self._lease[1] + _LEASE * max(self._beat, self._lease_beat)
        if behind:  # who decides has read all
            return
        if (body is None and self._objects.create("keeper", self._claim())) or late:
            self._hold(now)
            self._desk = _Desk(self, now)
            self.status = Status()

    def _claim(self) -> bytes:
        """Return the next content of the lease."""
        self._renewed += 1
        awaited = "" if self._desk is None else self._desk.awaited
        said = {"box": self._box, "count": self._renewed, "next": self._next, "awaited": awaited}
        return json.dumps(said | {"beat": self._beat}).encode()

    def _hold(self, now: float) -> None:
        claim = self._claim()
        self._objects.put("keeper", claim)
        self._lease = claim, now

    def _retire(self, why: str) -> None:
        """Decide no more; what was not written was never decided."""
        _log.warning("This worker does not decide in %s any more: %s.", self._objects.url, why)
        self._desk, self._lease, self._due = None, (None, time.monotonic()), 0.0

    def _decide(self) -> bool:
        """Write what is decided now, if it is the first to do so; return whether it has."""
        desk = self._desk
        assert desk is not None
        began = time.monotonic()
        desk.unwritten += desk.keeper.tick(began)  # and what the store has not taken before
        entries = desk.unwritten
        if not entries:
            return False
        own = self._report
        by = None if own is None else replace(own, beat=self._beats).in_words()
        said = {"by": by, "said": [in_words(each) for each in entries]}
        number, body = self._next, json.dumps(said).encode()
        if not self._objects.create(f"log/{number:08d}", body):
            self._retire("another worker has decided")
            return False
        # Was it away so long that its number has been decided, and removed?
        slow = time.monotonic() > began + _LEASE * self._beat / 2
        if slow and any(int(each) > number for each in self._objects.names("log")):
            self._objects.remove([f"log/{number:08d}"])
            self._retire("it was away, and another worker has decided")
            return False
        self._take(body)
        desk.unwritten = []
        desk.tell(entries, began)
        return True

    def _give_back(self) -> None:
        """Let the keeper of this process hear the last report; remove what nobody reads."""
        desk, self._desk = self._desk, None
        if desk is None:
            return
        self._say(math.inf)  # for the next one who decides
        self._desk = desk
        desk.hear(self._report, time.monotonic(), beats=True)
        while self._desk is not None and self._decide():
            pass
        if self._desk is not None:
            self._objects.remove(["keeper"])


class _Desk:
    """State of a process while it holds the lease.

    Reports that were there before it began count once they change: who has died says nothing new.
    """

    def __init__(self, folder: Folder, now: float) -> None:
        self._folder, self._objects = folder, folder._objects
        settle = _SETTLE * folder._beat
        self.keeper = Keeper(now, settle, file=folder._decided)
        self._seen = self._objects.names("reports")
        bodies = self._objects.get_all(f"reports/{name}" for name in self._seen)
        told = [Report.read(json.loads(body)["report"]) for body in bodies if body is not None]
        told += folder._deciders.values()  # who said nothing else meanwhile
        for report in sorted(told, key=lambda report: report.beat):
            self.keeper.remember(report, now)
        self._beats = dict.fromkeys(self._seen, folder._beat)
        self._changed = dict.fromkeys(self._seen, now)
        self._told: dict[str, Report] = {}  # without their beats
        self._turns = 0
        self.unwritten: list[Entry] = []
        self._chronicle = Chronicle()
        self.awaited = ""
        folder._payloads = None
        self._remove_rounds()

    def hear(self, own: Report | None, now: float, beats: bool) -> bool:
        """Take reports, and this process's own; return whether one says something new.

        Args:
            own: of this process.
            now: the time.
            beats: whether those are read, too, that may only be a sign of life.
        """
        box, found = self._folder._box, self._objects.names("reports")
        changed = [name for name in found if found[name] != self._seen.get(name) and name != box]
        if not beats:
            changed = [name for name in changed if name not in self._seen]
        unread = {name: text for name, text in self._seen.items() if name not in changed}
        self._seen = found = {name: unread.get(name, text) for name, text in found.items()}
        reports, news = self._objects.get_all(f"reports/{name}" for name in changed), False
        for name, body in zip(changed, reports, strict=True):
            if body is None:
                del found[name]  # looked at again: a listing may be ahead of its object
                continue
            said = json.loads(body)
            report = Report.read(said["report"])
            self.keeper.hear(report, now)
            self._beats[name], self._changed[name] = float(said["beat"]), now
            report = replace(report, beat=0)
            news = news or self._told.get(name) != report
            self._told[name] = report
        if own is not None:
            self._turns += 1
            self.keeper.hear(replace(own, beat=self._turns), now)
        here = [name for name in found if name in self._beats] or [box]
        slowest = max(self._beats.get(name, BEAT) for name in here)
        self.keeper.rounds.near = NEAR / BEAT * max(slowest, self._folder._beat)
        gone = [n for n in found if n != box and self._forgotten(n, now)]
        self._objects.remove([f"reports/{name}" for name in gone])
        self.awaited = self.keeper.awaited(now)
        for sentence in self._chronicle.wait(self.awaited, now):
            say(sentence)
        status = self._folder.status
        self._folder.status = status._replace(awaited=self.awaited)
        return news

    def _forgotten(self, name: str, now: float) -> bool:
        return now > self._changed.setdefault(name, now) + max(60.0, 40 * self._folder._beat)

    def tell(self, entries: list[Entry], now: float) -> None:
        """Say what was decided; remove what is over."""
        for entry in entries:
            for sentence in self._chronicle.tell(entry, now):
                say(sentence)
        number = self._folder._next
        if any(isinstance(entry, Verdict) for entry in entries):
            self._remove_rounds()
        if number % 64 == 0 and number > KEPT:
            old = [n for n in self._objects.names("log") if int(n) < number - KEPT]
            self._objects.remove([f"log/{name}" for name in old])

    def _remove_rounds(self) -> None:
        """Remove what members have sent in attempts that are over, as far as it was listed."""
        called, there = self._folder._called, self._folder._payloads
        if there is None:
            there = self._objects.names("rounds")
        over = [name for name in there if called is None or f"{called.group}-" not in name]
        self._objects.remove([f"rounds/{name}" for name in over])
        self._folder._payloads = None


class _Round(Transport):
    """Exchanges requests by objects; each member computes every reply from all of them.

    ``Simulated`` computes it, in the order of members. So all members have the bits of a replay.
    """

    def __init__(self, folder: Folder, group: str, rank: int, size: int) -> None:
        self.worker, self.workers, self.sent_bytes = rank, size, 0
        self._folder, self._group, self._phase = folder, group, 0

    def fulfil(self, request: Request) -> Reply:
        """Write this worker's tensors, read the others', and compute the reply."""
        objects, place = self._folder._objects, f"{self._group}-{self._phase}"
        self._phase += 1
        rows = request.payloads if isinstance(request, Exchange) else (request.tensors,)
        device = rows[0][0].device
        sent = [[tensor.detach().cpu().clone() for tensor in row] for row in rows]
        body = to_bytes({"rows": sent})
        began = time.monotonic()
        self._patiently(began, objects.put, f"rounds/{place}-{self.worker}", body)
        self.sent_bytes += len(body)
        asked: dict[int, Request] = {self.worker: request}
        missing = [r for r in range(self.workers) if r != self.worker]
        while missing:
            there = self._folder._payloads = self._patiently(began, objects.names, "rounds")
            come = [rank for rank in missing if f"{place}-{rank}" in there]
            names = [f"rounds/{place}-{rank}" for rank in come]
            bodies = self._patiently(began, objects.get_all, names)
            for rank, each in zip(come, bodies, strict=True):
                if each is not None:
                    asked[rank] = _like(request, from_bytes(each)["rows"], device)
                    missing.remove(rank)
                    if described(asked[rank]) != described(request):
                        raise ReplicaError(
                            f"Member {rank} asks for {described(asked[rank])}, and this worker for "
                            f"{described(request)}. Give all workers the same settings and model."
                        )
            if missing:
                self._folder.wait(self._group, began, f"members {', '.join(map(str, missing))}")
        in_order = [asked[rank] for rank in range(self.workers)]
        return Simulated(self.workers).fulfil(in_order)[self.worker]

    def _patiently(self, began: float, act: Callable[..., Any], *arguments: Any) -> Any:
        """Ask the store again while it fails; PeerError if it does so for too long."""
        while True:
            try:
                return act(*arguments)
            except OSError as error:
                self._folder.wait(self._group, began, f"a store that fails ({error})")


def _like(request: Request, rows: list[list[Tensor]], device: torch.device) -> Request:
    """Return a request with other tensors."""
    payloads = tuple(tuple(tensor.to(device) for tensor in row) for row in rows)
    if isinstance(request, Exchange):
        return request._replace(payloads=payloads, into=None)
    return request._replace(tensors=payloads[0])
