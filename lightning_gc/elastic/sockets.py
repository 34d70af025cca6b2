"""Sockets: an elastic run over TCP, with a line to the rendezvous and a door for other workers."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import itertools
import json
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper, _world

from lightning_gc.core.saved_state import Tree
from lightning_gc.elastic.channel import (
    HandshakeError,
    Link,
    Listener,
    Seal,
    StrangerError,
    Waker,
    calling,
)
from lightning_gc.elastic.membership import Ask, Carrier, Status
from lightning_gc.elastic.rendezvous import KEPT, MOST, PLACE, Deputy
from lightning_gc.elastic.roll import BEAT, Round, Verdict, check_roll, entry_of
from lightning_gc.elastic.snapshot import from_bytes, to_bytes
from lightning_gc.exchange.synchronizer import leave
from lightning_gc.local_steps.round_plan import Elastic
from lightning_gc.transports.base import Transport
from lightning_gc.transports.distributed import Distributed
from lightning_gc.transports.interfaces import address_towards, host_and_port, named_interface

_log = logging.getLogger(__name__)
SILENCE = 20.0
"""Seconds after which a worker calls a rendezvous again that says nothing."""
_HOST = torch.device("cpu")


class MeetingStore(Store):
    """A store of torch by which the members of a group find each other, at the rendezvous.

    Args:
        link: to the rendezvous, for this store alone.
        group: name of the group.
        timeout: seconds that a key is waited for.

    Raises:
        DistStoreError: from a method: the rendezvous is gone, or a key was not set in time.
    """

    def __init__(self, link: Link, group: str, timeout: float) -> None:
        super().__init__()
        self._link, self._group, self._timeout = link, group, timeout
        self._lock = threading.Lock()  # NCCL's threads ask, too

    def close(self) -> None:
        """Hang up."""
        self._link.link.close()

    def set(self, key: str, value: Any) -> None:
        self._ask("set", [key], values=[bytes(value).hex()])

    def get(self, key: str) -> bytes:
        return bytes.fromhex(self._ask("get", [key])[0])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._timeout if timeout is None else timeout.total_seconds()
        self._ask("get", keys, max(0.001, seconds))

    def check(self, keys: list[str]) -> bool:
        return all(self._ask("check", keys))

    def add(self, key: str, number: int) -> int:
        return int(self._ask("add", [key], number=number)[0])

    def compare_set(self, key: str, expected: Any, wanted: Any) -> bytes:
        values = [bytes(each).hex() for each in (expected, wanted)]
        return bytes.fromhex(self._ask("swap", [key], values=values)[0])

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("drop", [key])[0])

    def _ask(self, do: str, keys: list[str], seconds: float = 0.0, **more: Any) -> list[Any]:
        question = {"do": do, "in": self._group, "keys": list(keys), **more}
        with self._lock:
            try:
                self._link.link.settimeout(seconds or self._timeout)
                self._link.send(json.dumps(question).encode())
                answer: list[Any] = json.loads(self._link.receive())
            except (OSError, ValueError) as error:
                self.close()  # an answer that came later would be taken for another one's
                raise dist.DistStoreError(
                    f"The rendezvous has not answered the group {self._group}, about "
                    f"{', '.join(keys)}: {error}"
                ) from error
        return answer


class Sockets(Carrier):
    """Carries an elastic run by TCP, with a rendezvous as keeper and Gloo or NCCL for rounds.

    If the rendezvous is gone the thread connects again, for as long as it takes. If the address is
    this machine's and nobody answers there, this process serves the rendezvous until ``lightning-gc
    rendezvous`` asks for the port. A new rendezvous is told the rounds that are not in its file.

    Args:
        elastic: as the user has set it.
        most: bytes of a message between workers that are accepted.
        device: of the weights.

    Raises:
        ValueError: the file of the roll is not a roll.
    """

    def __init__(self, elastic: Elastic, most: int = MOST, device: torch.device = _HOST) -> None:
        host, port = self._place = host_and_port(elastic.rendezvous, "Elastic", "rendezvous")
        self._name, self._seal = f"{host}:{port}", Seal(elastic.secret)
        super().__init__(elastic, Status(f"nobody answers at {self._name}"))
        roll = None if elastic.roll is None else Path(elastic.roll)
        if roll is not None:
            check_roll(roll)
        self._device = device
        self._wire: Any = {"seal": self._seal, "most": most, "timeout": float(elastic.timeout)}
        self._deputy = Deputy(host, port, elastic.secret, roll)
        self._term, self._cursor, self._pace = "", 0, BEAT
        self._rounds = deque[Round](maxlen=KEPT)  # committed, as far as it has read
        self._waker = Waker()
        self._door: Door | None = None
        self._interface = contextlib.ExitStack()  # Gloo's
        self._begin(open_to_all=not _is_loopback(host))

    @contextlib.contextmanager
    def propose(self, group: str, rank: int, size: int) -> Iterator[Transport]:
        """Yield the transport of a process group, whose members meet at the rendezvous.

        Raises:
            DistStoreError: the rendezvous is gone.
        """
        backend = "nccl" if self._device.type == "cuda" and dist.is_nccl_available() else "gloo"
        seconds, name = self._elastic.timeout, GroupName(group)
        with self._store(group, seconds) as store:  # torch's group does not keep it alive
            timeout = timedelta(seconds=seconds)
            made, _ = _new_process_group_helper(
                size, rank, [], backend, store, group_name=name, timeout=timeout
            )
            # A job's rank 0 is ``rank`` in the group.
            there = {other: {0: rank, rank: 0}.get(other, other) for other in range(size)}
            _world.pg_group_ranks[made] = dict(sorted(there.items(), key=lambda pair: pair[1]))
            failed = True
            try:
                yield Distributed(made, "an elastic round")
                failed = False
            finally:
                leave(made, failed)

    @contextlib.contextmanager
    def _store(self, group: str, seconds: float) -> Iterator[Store]:
        """Yield where the members of a group find each other."""
        try:
            with self._calling(seconds) as link:
                yield MeetingStore(link, group, seconds)
        except OSError as error:
            raise dist.DistStoreError(str(error)) from error

    def serve(self, answer: Callable[[Any], Tree]) -> str:
        """Open the door by which others reach this worker."""
        own, ports = self._elastic.address, self._elastic.ports
        away = address_towards(*self._place)
        way = named_interface(own or self._place[0], _log.warning)
        self._interface.enter_context(way)
        free = range(ports[0], ports[1] + 1) if ports else ()
        self._door = Door(own or away, free, answer=answer, **self._wire)
        return self._door.address

    def visit(self, address: str) -> contextlib.AbstractContextManager[Ask]:
        """Yield what asks the door at ``"host:port"``; the first question connects."""
        return visiting(address, **self._wire)

    def _calling(self, timeout: float) -> contextlib.AbstractContextManager[Link]:
        name = f"the rendezvous at {self._name}"
        return calling(self._place, self._seal, PLACE, MOST, timeout, name)

    def _wake(self) -> None:
        self._waker.wake()

    def _leave(self) -> None:
        self._deputy.close()
        self._interface.close()
        if self._door is not None:
            self._door.close()
        self._waker.close()

    def _turn(self) -> None:
        self._deputy.step_in(again=bool(self._term))
        with self._calling(SILENCE) as link:
            self._talk(link)

    def _fail(self, error: Exception) -> None:
        trouble = str(error) if self._name in str(error) else f"{self._name}: {error}"
        strange = isinstance(error, StrangerError)
        self.status = self.status._replace(trouble=trouble, strange=strange)
        self._closed.wait(1.0 if isinstance(error, HandshakeError) else 0.2)

    def _talk(self, link: Link) -> None:
        """Send and receive until the rendezvous is gone."""
        self._catch_up(link)
        sent, due, silent = None, 0.0, time.monotonic() + SILENCE
        with selectors.DefaultSelector() as selector:
            for each in (link.link, self._waker.woken):
                selector.register(each, selectors.EVENT_READ)
            while not self._closed.is_set() and not self._deputy.gives_back():
                report, now = self._report, time.monotonic()
                if report is not sent or now >= due:
                    due = now + self._pace
                    if report is not None:
                        words = "" if report is sent else self._next_report(report).in_words()
                        link.send(json.dumps({"report": words}).encode() if words else b"")
                        self._sent = sent = report
                ready = selector.select(0.0 if link.channel.heard else max(0.0, due - now))
                for key, _ in ready:
                    if key.fileobj is link.link:
                        link.read()
                        silent = now + SILENCE
                    else:
                        self._waker.clear()
                for message in link.channel.messages():
                    self._take(json.loads(message))
                if now > silent:
                    raise TimeoutError(f"it has said nothing for {SILENCE:g} s")
            link.hang_up()

    def _catch_up(self, link: Link) -> None:
        """Go on in the log, or begin in a new one; tell the rounds that a roll's file lacks.

        They come before the reports, from which a new keeper takes what was committed last.
        """
        link.send(json.dumps({"term": self._term, "cursor": self._cursor}).encode())
        match json.loads(link.receive()):
            case {"term": str(term), "at": int(at), "file": file, **told}:
                self._take(told)
                self._term, self._cursor = term, at
                self.status = self.status._replace(trouble="")
            case other:
                raise ValueError(f"{str(other)[:60]} is not an answer of a rendezvous")
        match file:
            case [str(run), int(last)]:
                for each in self._rounds:
                    if each.run != run or each.round > last:
                        link.send(json.dumps({"round": dataclasses.asdict(each)}).encode())

    def _take(self, message: Any) -> None:
        """Take a message of the rendezvous."""
        match message:
            case {"pace": float(pace), "awaited": str(awaited)}:
                self._pace, self.status = pace, self.status._replace(awaited=awaited)
            case {"trouble": str(why)}:
                self.status = self.status._replace(trouble=why)
            case {"entry": str(text)}:
                self._cursor += 1
                entry = entry_of(text)
                if isinstance(entry, Verdict) and entry.record is not None:
                    self._rounds.append(entry.record)
                self._put(entry)
            case other:
                raise ValueError(f"{str(other)[:60]} is not a message of a rendezvous")


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    return False


class Door:
    """Answers other workers; the training thread does not wait for them.

    One thread listens, and each worker that asks something gets its own thread. Strangers get
    none.

    Args:
        host: address that others reach this machine by.
        ports: the first free one is taken; empty: any.
        seal: with the shared secret.
        most: bytes of a request that are accepted.
        timeout: seconds of silence after which a visitor is given up.
        answer: returns the answer to a request, from any thread.

    Attributes:
        address: ``"host:port"``.

    Raises:
        OSError: none of the ports is free.
    """

    def __init__(
        self,
        host: str,
        ports: Sequence[int],
        seal: Seal,
        most: int,
        timeout: float,
        answer: Callable[[Any], Tree],
    ) -> None:
        self._timeout, self._answer = timeout, answer
        try:
            self._listener = Listener(ports, seal, most, None, host)
        except OSError as error:
            raise OSError(
                f"No port of {ports and (*ports,)} is free for snapshots ({error}); give "
                f"Elastic(ports=...) one more for each worker of a machine."
            ) from error
        self.address = self._listener.place
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="elastic door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more visitors."""
        self._closed.set()
        self._listener.wake()
        self._thread.join(1.0)

    def _serve(self) -> None:
        while not self._closed.is_set():
            heard = self._listener.wait(time.monotonic() + 60.0)
            for guest in {guest: None for guest, _ in heard}:
                first = [message for whose, message in heard if whose is guest]
                link = self._listener.release(guest, self._timeout)
                visit = threading.Thread(target=self._visit, args=(link, first), daemon=True)
                try:
                    visit.start()
                except RuntimeError as error:  # no thread can be had now
                    self._listener.note("thread", f"sent a worker away: {error}")
                    link.link.close()
        self._listener.close()

    def _visit(self, link: Link, heard: Sequence[bytearray]) -> None:
        with link.link:
            try:
                for message in itertools.chain(heard, iter(link.receive, None)):
                    link.send(to_bytes(self._answer(from_bytes(message))))
            except ConnectionError:
                return
            except (OSError, ValueError) as error:
                _log.warning("A visitor was sent away: %s", error)


@contextlib.contextmanager
def visiting(address: str, seal: Seal, most: int, timeout: float) -> Iterator[Ask]:
    """Yield what asks the door at ``"host:port"``; the first question connects."""
    with contextlib.ExitStack() as stack:
        links: list[Link] = []

        def ask(tree: Tree) -> Any:
            if not links:
                where, name = host_and_port(address, "Worker"), f"the worker at {address}"
                called = calling(where, seal, address, most, timeout, name)
                links.append(stack.enter_context(called))
            links[0].send(to_bytes(tree))
            return from_bytes(links[0].receive())

        yield ask
