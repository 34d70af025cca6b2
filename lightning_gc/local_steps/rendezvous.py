"""Rendezvous and Line: a TCPStore with the keeper of an elastic run, and a worker's line to it."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import hashlib
import hmac
import ipaddress
import json
import logging
import queue
import re
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

from lightning_gc.local_steps.roll import (
    BEAT,
    Ended,
    Entry,
    Keeper,
    Report,
    Round,
    Verdict,
    check_roll,
    entry_of,
    in_words,
)
from lightning_gc.local_steps.roll_file import BusyError, RollFile

_log = logging.getLogger(__name__)
KEPT = 4096
"""Number of entries of the log that the store keeps."""
_STORE = timedelta(seconds=20)
"""How long the store may take for an answer."""
PAUSE = 3.0
"""Seconds without an answer, after which a worker serves in place of a rendezvous that has died."""
TAKEN = 10.0
"""Seconds in which ``lightning-gc rendezvous`` takes a port over from a worker."""
_LAST_READ = 0.5
"""Seconds in which others read what a rendezvous has decided last, before it ends."""
_IN_FILE, _WANTED = "in file", "wanted"
"""Places of the last round in the roll's file, and of a wish to take the port over."""


class Seal:
    """Signs texts with a shared secret, so that no stranger is believed.

    HMAC-SHA256 over the place and the text. It hides nothing. Without a secret it finds damage.

    Args:
        secret: equal on all workers and the rendezvous.

    Example:
        >>> sealed = Seal("a secret").closed("report/0", "hello")
        >>> Seal("a secret").opened("report/0", sealed.encode())
        'hello'
    """

    def __init__(self, secret: str | None) -> None:
        self._key = hashlib.sha256((secret or "").encode()).digest()

    def sign(self, *parts: bytes | bytearray) -> bytes:
        """Return 32 bytes that only those who have the secret can make."""
        made = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in parts:
            made.update(len(part).to_bytes(8, "big"))
            made.update(part)
        return made.digest()

    def closed(self, place: str, text: str) -> str:
        """Return a signed text."""
        return self.sign(place.encode(), text.encode()).hex() + text

    def opened(self, place: str, data: bytes) -> str:
        """Return the text; ValueError if it was not signed, for this place, with the secret."""
        sign, text = bytes(data[:64]), bytes(data[64:])
        expected = self.sign(place.encode(), text).hex().encode()
        if not hmac.compare_digest(sign, expected):
            raise ValueError(f"{place} is not signed with this secret.")
        return text.decode()


def host_and_port(address: Any, owner: str, name: str = "address") -> tuple[str, int]:
    """Return the parts of ``"host:port"``; ValueError, which names the setting, if it is none."""
    host, _, port = str(address).rpartition(":")
    known = isinstance(address, str) and is_host(host) and port.isascii() and port.isdecimal()
    if not known or not 0 < int(port) < 1 << 16:
        raise ValueError(
            f"{owner}({name}={address!r}): give host and port, such as '10.0.0.1:29400', without "
            f"a scheme or a path. A port is a number from 1 to 65535."
        )
    return host.strip("[]"), int(port)


def is_host(host: str) -> bool:
    """Return whether this may be a machine's name or address. An IPv6 one may be in brackets."""
    if re.fullmatch(r"\w([\w.-]*[\w.])?", host):
        return True
    try:
        return bool(ipaddress.IPv6Address(re.sub(r"\[(.*)\]", r"\1", host)))
    except ValueError:
        return False


def check_secret(secret: Any, owner: str) -> None:
    """Raise ValueError if a secret is neither None nor a text that all can have equally."""
    if secret is None or (isinstance(secret, str) and secret and secret == secret.strip()):
        return
    found = "is empty" if isinstance(secret, str) else f"is of type {type(secret).__name__}"
    if isinstance(secret, str) and secret.strip():
        found = "begins or ends with white space; use its strip()"
    raise ValueError(
        f"{owner}(secret=...): the secret {found}. Give a long random text, or leave it out if "
        f"everyone who reaches the port may take part."
    )


class Rendezvous:
    """Serves a TCPStore, and decides on rounds in a thread of this process.

    It may be stopped and started again: the file and the members' reports hold all that it needs to
    know.

    Args:
        port: on which it listens, on all interfaces. 0: any free one.
        secret: that members share; None: everybody may take part.
        roll: file to which a line is added for every committed round, before members are told, as
            by ``RollFile``. A rendezvous that starts with it again continues its run. None: no
            file. A rendezvous that starts again then knows only the commits that a living member
            has read.

    Attributes:
        port: on which it listens.

    Raises:
        RuntimeError: the port cannot be used, or another process writes the file.
        ValueError: the file is not a roll.
    """

    def __init__(self, port: int, secret: str | None = None, roll: Path | None = None) -> None:
        check_secret(secret, "Rendezvous")
        self._seal, self._roll = Seal(secret), None
        self._store = TCPStore(
            "0.0.0.0", port, is_master=True, wait_for_workers=False, timeout=_STORE
        )
        self.port = int(self._store.port)
        self._term, self._said = secrets.token_hex(4), 0
        self._ended = threading.Event()
        self._strangers = 0
        try:
            self._roll = None if roll is None else RollFile(roll)
        except BaseException:
            del self._store  # and its port
            raise
        if self._roll is not None:
            self._store.set(_IN_FILE, self._seal.closed(_IN_FILE, self._roll.end))
        keeper = Keeper(time.monotonic(), file=() if self._roll is None else self._roll.found)
        self._thread = threading.Thread(
            target=self._keep, args=(keeper,), name="rendezvous", daemon=True
        )
        self._store.set("head", self._seal.closed("head", f"{self._term} 0"))
        self._thread.start()
        atexit.register(self.close)  # a thread in torch's store would abort the process

    def close(self) -> None:
        """Stop the keeper and the store; again does nothing."""
        atexit.unregister(self.close)
        self._ended.set()
        self._thread.join()
        if self.__dict__.pop("_store", None) is not None and self._roll is not None:
            self._roll.close()

    def _keep(self, keeper: Keeper) -> None:
        known: dict[str, bytes] = {}
        while not self._ended.wait(0.005):
            for slot in range(self._store.add("slots", 0)):
                place = f"report/{slot}"
                if place not in known and not self._store.check([place]):
                    continue
                data = self._store.get(place)
                if known.get(place) != data:
                    known[place] = data
                    self._hear(keeper, place, data)
            for entry in keeper.tick(time.monotonic()):
                self._say(entry)

    def _hear(self, keeper: Keeper, place: str, data: bytes) -> None:
        try:
            keeper.hear(Report.read(self._seal.opened(place, data)), time.monotonic())
        except (ValueError, TypeError) as error:
            self._strangers += 1
            if self._strangers in (1, 10, 100, 1000):
                _log.warning("The rendezvous has ignored a report: %s", error)

    def _say(self, entry: Entry) -> None:
        decided = entry.record if isinstance(entry, Verdict) else entry
        if isinstance(decided, Round | Ended) and self._roll is not None:
            self._roll.append(decided, self._rounds_of_members)
        _log.info("%s", entry)
        place = f"log/{self._term}/{self._said}"
        self._store.set(place, self._seal.closed(place, in_words(entry)))
        self._said += 1
        self._store.set("head", self._seal.closed("head", f"{self._term} {self._said}"))
        if self._said > KEPT:
            self._store.delete_key(f"log/{self._term}/{self._said - KEPT}")

    def _rounds_of_members(self) -> Iterator[Round]:
        """Yield the rounds of other rendezvous that members know."""
        for slot in range(self._store.add("slots", 0)):
            place = f"rounds/{slot}"
            if self._store.check([place]):
                try:
                    said = self._seal.opened(place, self._store.get(place))
                    yield from map(Round.of, json.loads(said))
                except (ValueError, TypeError) as error:
                    _log.warning("The rendezvous has ignored the rounds of a member: %s", error)


class Line:
    """Sends a worker's reports to the keeper, and brings the entries of its log.

    A thread does it, so that no silent machine can hold up the training thread for longer than it
    wants to wait. If the rendezvous is gone the thread connects again, for as long as it takes. If
    the address is this machine's and nobody answers there, this process serves the rendezvous until
    ``lightning-gc rendezvous`` asks for the port. A new rendezvous is told the rounds that are not
    in its file.

    Args:
        host, port: of the rendezvous.
        secret: that all share.
        roll: file of the roll, if this process serves the rendezvous.

    Raises:
        ValueError: the file is not a roll.
    """

    def __init__(
        self, host: str, port: int, secret: str | None = None, roll: Path | None = None
    ) -> None:
        if roll is not None:
            check_roll(roll)
        self.host, self.port = host, port
        self._secret, self._seal, self._roll = secret, Seal(secret), roll
        self._report: Report | None = None
        self._sent: Report | None = None
        self._beat = 0
        self._entries: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        self._awaited = threading.Event()  # the training thread waits
        self._closed = threading.Event()
        self._term, self._cursor = "", 0
        self._rounds: deque[Round] = deque(maxlen=KEPT)  # committed, as far as it has read
        self._serving: Rendezvous | None = None
        self._serves_from: float | None = None  # if nobody answers by then
        self.trouble = f"nobody answers at {host}:{port}"
        self._thread = threading.Thread(target=self._work, name="elastic", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def say(self, report: Report) -> None:
        """Send this report from now on."""
        self._report = report

    def next(self, seconds: float) -> Entry | None:
        """Return the next entry; None if none has come in this time."""
        self._awaited.set()
        try:
            return self._entries.get(timeout=seconds)
        except queue.Empty:
            return None
        finally:
            self._awaited.clear()

    def store(self, timeout: timedelta) -> Store:
        """Return a new connection to the store; RuntimeError if nobody answers."""
        return TCPStore(self.host, self.port, is_master=False, timeout=timeout)

    def close(self, wait: float = 2.0) -> None:
        """Send the last report, and hang up. A rendezvous of this process ends, too.

        Args:
            wait: seconds that it may take to send it.
        """
        atexit.unregister(self.close)
        limit = time.monotonic() + wait
        while self._sent is not self._report and time.monotonic() < limit:
            time.sleep(0.005)
        if self._serving is not None:
            time.sleep(_LAST_READ)
        self._closed.set()
        self._thread.join(wait)
        if self._serving is not None:
            self._serving.close()

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                self._serve_if_nobody_does()
                store = self.store(_STORE)
                self._talk(store, store.add("slots", 1) - 1)
            except (RuntimeError, OSError, ValueError) as error:
                self.trouble = f"{type(error).__name__}: {error}".partition("\n")[0]
                self._closed.wait(0.2)

    def _serve_if_nobody_does(self) -> None:
        try:
            socket.create_connection((self.host, self.port), 5.0).close()
            self._serves_from = None
        except OSError as error:
            self.trouble = f"nobody answers at {self.host}:{self.port} ({error})"
            if not _is_here(self.host):
                raise
            if self._serves_from is None:  # a restarted rendezvous comes first
                self._serves_from = time.monotonic() + (PAUSE if self._term else 0.0)
            if time.monotonic() < self._serves_from:
                raise
            # Another process of this machine may be quicker. Then this one fails, and connects.
            self._serving = Rendezvous(self.port, self._secret, self._roll)
            _log.log(
                logging.WARNING if self._term else logging.INFO,
                "Nobody answers at %s:%d, so this worker serves the rendezvous, and %s. "
                "lightning-gc rendezvous takes its port over at any time.",
                *(self.host, self.port),
                f"continues {self._roll}" if self._roll else "keeps no roll",
            )

    def _gives_back(self, store: Store) -> bool:
        """Return whether ``lightning-gc rendezvous`` wants the port, and close the rendezvous."""
        if self._serving is None or not store.check([_WANTED]):
            return False
        try:
            wanted = self._seal.opened(_WANTED, store.get(_WANTED)) == self._term
        except ValueError:
            wanted = False
        if wanted:
            time.sleep(_LAST_READ)
            self._serving.close()
            self._serving = None
            self._serves_from = time.monotonic() + TAKEN
            _log.warning("This worker gives port %d to lightning-gc rendezvous.", self.port)
        return wanted

    def _talk(self, store: Store, slot: int) -> None:
        """Send and receive until the store is gone."""
        place, due = f"report/{slot}", 0.0
        self._catch_up(store)
        self._tell_rounds(store, slot)
        self.trouble = ""
        while not self._closed.is_set() and not self._gives_back(store):
            report, now = self._report, time.monotonic()
            if report is not None and (report is not self._sent or now >= due):
                self._beat += 1
                text = replace(report, beat=self._beat).in_words()
                store.set(place, self._seal.closed(place, text))
                self._sent, due = report, now + BEAT
            self._receive(store)
            self._awaited.wait(0.02)
            self._closed.wait(0.004)

    def _catch_up(self, store: Store) -> None:
        """Go on in the same log, or begin in a new one."""
        term, _, said = self._seal.opened("head", store.get("head")).partition(" ")
        oldest = max(0, int(said) - KEPT + 1)
        if term != self._term:
            # A restarted keeper speaks to those who were there before.
            self._cursor = 0 if self._term else int(said)
        self._term, self._cursor = term, max(self._cursor, oldest)

    def _tell_rounds(self, store: Store, slot: int) -> None:
        """Tell a rendezvous with a file the rounds that it lacks, as far as this worker knows."""
        if self._rounds and store.check([_IN_FILE]):
            place = f"rounds/{slot}"
            run, _, last = self._seal.opened(_IN_FILE, store.get(_IN_FILE)).rpartition(" ")
            lacks = [each for each in self._rounds if each.run != run or each.round > int(last)]
            said = json.dumps([dataclasses.asdict(each) for each in lacks])
            store.set(place, self._seal.closed(place, said))

    def _receive(self, store: Store) -> None:
        while True:
            place = f"log/{self._term}/{self._cursor}"
            if not store.check([place]):
                return
            try:
                entry = entry_of(self._seal.opened(place, store.get(place)))
                if isinstance(entry, Verdict) and entry.record is not None:
                    self._rounds.append(entry.record)
                self._entries.put(entry)
            except ValueError as error:
                _log.warning("An entry of the rendezvous is ignored: %s", error)
            self._cursor += 1


def _is_here(host: str) -> bool:
    """Return whether a host's address is one of this machine's."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the way to another one."""
    family, _, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])


def serve(
    port: int,
    secret: str | None,
    roll: Path | None,
    until: Callable[[], bool] = lambda: False,
    began: Callable[[int], None] = lambda _: None,
) -> None:
    """Serve a rendezvous until ``until`` is true, or Ctrl-C.

    Args:
        port: as for ``Rendezvous``. A worker that serves there gives it back.
        secret: that members share, or None.
        roll: as for ``Rendezvous``.
        until: when it ends.
        began: called with the port once it listens.

    Raises:
        BusyError: another program listens at the port.
    """
    _claim(port, Seal(secret))
    served = Rendezvous(port, secret, roll)
    began(served.port)
    try:
        while not until():
            time.sleep(0.2)
    finally:
        served.close()


def _claim(port: int, seal: Seal) -> None:
    """Return once the port is free; ask a worker that serves there for it."""
    limit = time.monotonic() + TAKEN
    while not _is_free(port):
        if time.monotonic() > limit:
            raise BusyError(
                f"Port {port} is in use by {_holder(port)}. Stop it, or give another --port. "
                f"A worker gives the port back only to a rendezvous with its secret."
            )
        # A program that is no store may keep a connection waiting for ever.
        asking = threading.Thread(target=_ask_for, args=(port, seal), daemon=True)
        asking.start()
        asking.join(2.0)
        time.sleep(0.2)


def _ask_for(port: int, seal: Seal) -> None:
    with contextlib.suppress(RuntimeError, ValueError):  # no store, or with another secret
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
        term, _, _ = seal.opened("head", store.get("head")).partition(" ")
        store.set(_WANTED, seal.closed(_WANTED, term))


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
            probe.listen()  # SO_REUSEADDR lets two sockets bind, but only one listen
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise BusyError(f"Port {port} cannot be used: {error.strerror}.") from error
            return False
    return True


def _holder(port: int) -> str:
    """Return the process that listens at a port, as far as the system tells it."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if str(link.readlink()) in sockets:
                words = (link.parents[1] / "cmdline").read_text().split("\0")
                return f"process {link.parts[2]} ({' '.join(words)[:80].strip()})"
    return "another program"
