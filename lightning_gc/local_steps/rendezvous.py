"""Rendezvous and Line: a TCPStore with the keeper of an elastic run, and a worker's line to it."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import hmac
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store, TCPStore

from lightning_gc.local_steps.roll import (
    BEAT,
    Ended,
    Entry,
    Keeper,
    Report,
    Round,
    Verdict,
    entry_of,
    in_words,
    line_of,
    read_lines,
)
from lightning_gc.transports.interfaces import is_bindable

_log = logging.getLogger(__name__)
KEPT = 4096
"""Number of entries of the log that the store keeps."""
_STORE = timedelta(seconds=20)
"""How long the store may take for an answer."""


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


def host_and_port(address: str, owner: str) -> tuple[str, int]:
    """Return the parts of ``"host:port"``; ValueError if it is none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) < 1 << 16:
        raise ValueError(
            f"{owner}={address!r}: give host and port, such as '10.0.0.1:29400'; a port is a "
            f"number up to 65535."
        )
    return host.strip("[]"), int(port)


class Rendezvous:
    """Serves a TCPStore, and decides on rounds in a thread of this process.

    It may be stopped and started again: the file and the members' reports hold all that it needs to
    know.

    Args:
        port: on which it listens, on all interfaces. 0: any free one.
        secret: that members share; None: everybody may take part.
        roll: file to which a line is added for every committed round, before members are told. A
            rendezvous that starts with it again continues its run. None: no file. A rendezvous that
            starts again then knows only the commits that a living member has read.

    Attributes:
        port: on which it listens.

    Raises:
        RuntimeError: the port cannot be used.
        ValueError: a line of the file is not a round.
    """

    def __init__(self, port: int, secret: str | None = None, roll: Path | None = None) -> None:
        self._seal, self._file = Seal(secret), roll
        self._store = TCPStore(
            "0.0.0.0", port, is_master=True, wait_for_workers=False, timeout=_STORE
        )
        self.port = int(self._store.port)
        self._term, self._said = secrets.token_hex(4), 0
        self._written: list[Round | Ended] = []  # the last one counts
        self._ended = threading.Event()
        self._strangers = 0
        keeper = Keeper(time.monotonic(), file=self._lines_of_file())
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
        self.__dict__.pop("_store", None)

    def _lines_of_file(self) -> list[Round | Ended]:
        if self._file is None or not self._file.exists():
            return []
        text = self._file.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:  # the rendezvous died while it wrote
            os.truncate(self._file, len(whole))
        self._written = list(read_lines(whole.decode(), str(self._file)))
        return self._written

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
        if isinstance(decided, Round | Ended) and decided not in self._written[-1:]:
            self._write(decided)
        _log.info("%s", entry)
        place = f"log/{self._term}/{self._said}"
        self._store.set(place, self._seal.closed(place, in_words(entry)))
        self._said += 1
        self._store.set("head", self._seal.closed("head", f"{self._term} {self._said}"))
        if self._said > KEPT:
            self._store.delete_key(f"log/{self._term}/{self._said - KEPT}")

    def _write(self, decided: Round | Ended) -> None:
        """Add a line to the file. Members are told afterwards, so a restart knows what they do."""
        self._written = [decided]
        if self._file is None:
            return
        before = self._file.stat().st_size if self._file.exists() else 0
        try:
            with self._file.open("a") as file:
                file.write(line_of(decided))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):  # else the next line would follow a half one
                os.truncate(self._file, before)
            _log.warning(
                "The rendezvous cannot write to %s (%s), so round %d is not in the roll. If it is "
                "restarted now, it may not know of that round.",
                self._file,
                error,
                decided.round,
            )


class Line:
    """Sends a worker's reports to the keeper, and brings the entries of its log.

    A thread does it, so that no silent machine can hold up the training thread for longer than it
    wants to wait. If the rendezvous is gone the thread connects again, for as long as it takes. If
    the address is this machine's and nobody answers there, this process serves the rendezvous.

    Args:
        host, port: of the rendezvous.
        secret: that all share.
        roll: file of the roll, if this process serves the rendezvous.

    Raises:
        ValueError: a line of the file is not a round.
    """

    def __init__(
        self, host: str, port: int, secret: str | None = None, roll: Path | None = None
    ) -> None:
        if roll is not None and roll.exists():
            list(read_lines(roll.read_text(), str(roll)))
        self.host, self.port = host, port
        self._secret, self._seal, self._roll = secret, Seal(secret), roll
        self._report: Report | None = None
        self._sent: Report | None = None
        self._beat = 0
        self._entries: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        self._awaited = threading.Event()  # the training thread waits
        self._closed = threading.Event()
        self._term, self._cursor = "", 0
        self._serving: Rendezvous | None = None
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
            time.sleep(0.5)  # others read what has been decided last
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
        except OSError as error:
            self.trouble = f"nobody answers at {self.host}:{self.port} ({error})"
            if not _is_here(self.host):
                raise
            # Another process of this machine may be quicker, and then this one connects to it.
            with contextlib.suppress(RuntimeError):
                self._serving = Rendezvous(self.port, self._secret, self._roll)

    def _talk(self, store: Store, slot: int) -> None:
        """Send and receive until the store is gone."""
        place, due = f"report/{slot}", 0.0
        self._catch_up(store)
        self.trouble = ""
        while not self._closed.is_set():
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

    def _receive(self, store: Store) -> None:
        while True:
            place = f"log/{self._term}/{self._cursor}"
            if not store.check([place]):
                return
            try:
                self._entries.put(entry_of(self._seal.opened(place, store.get(place))))
            except ValueError as error:
                _log.warning("An entry of the rendezvous is ignored: %s", error)
            self._cursor += 1


def _is_here(host: str) -> bool:
    """Return whether a host's address is one of this machine's."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError:
        return False
    return is_bindable(family, place)


def serve(
    port: int,
    secret: str | None,
    roll: Path | None,
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Serve a rendezvous until ``until`` is true, or Ctrl-C."""
    served = Rendezvous(port, secret, roll)
    try:
        while not until():
            time.sleep(0.2)
    finally:
        served.close()
