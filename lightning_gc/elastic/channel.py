"""Authenticated connections of an elastic run: a shared secret, a handshake, signed messages.

Both sides greet with a random number. The caller proves first that it has the secret, so that a
stranger who calls learns nothing. Every message is then signed for this connection, this direction
and its place in the order: nothing said on another connection, or said before, is believed.

Bytes of a connection: a greeting of 30 bytes each way (4 that name the protocol, 2 of its version,
8 of the place that is called, 16 random ones). The caller's proof of 32 bytes. One byte of answer,
with a proof of 32 if it is yes. Then messages: 8 bytes of length, 32 of signature, the data.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import logging
import secrets
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from typing import Any

_log = logging.getLogger(__name__)
VERSION = 2
"""The protocol's: greetings, messages, reports and entries of the log."""
DEADLINE = 10.0
"""Seconds in which a visitor must prove that it has the secret."""
STRANGERS = 64
"""Most visitors who have not proved it. The oldest goes when another one comes."""
PAUSE = 0.2
"""Seconds without new visitors after one could not be accepted."""
_MAGIC = b"\0lgc"
_NONCE, _SIGN = 16, 32
_HEAD = 8 + _SIGN
_PIECE = 1 << 18
_MOST_UNSENT = 1 << 26
_AT_ONCE = 16
_YES, _NO = b"\1", b"\0"


class HandshakeError(ConnectionError):
    """The other side has not shown that it has the same secret, place and version."""


class StrangerError(HandshakeError):
    """The other side has shown that it has not, so that calling again does not help."""


class Seal:
    """Signs bytes with a shared secret: HMAC-SHA256. It hides nothing.

    Args:
        secret: equal on all workers and the rendezvous. Without one it only finds damage.

    Example:
        >>> Seal("a secret").sign(b"a") == Seal("a secret").sign(b"a")
        True
    """

    def __init__(self, secret: str | None) -> None:
        self._key = hashlib.sha256((secret or "").encode()).digest()

    def sign(self, *parts: bytes | bytearray) -> bytes:
        """Return 32 bytes that only those who have the secret can make."""
        made = hmac.new(self._key, digestmod="sha256")
        for part in parts:
            made.update(len(part).to_bytes(8, "big"))
            made.update(part)
        return made.digest()


class Channel:
    """One connection's protocol, without its socket: bytes that come, bytes that go.

    Args:
        seal: with the secret.
        place: what is called, such as ``"rendezvous"``; equal on both sides.
        calls: whether this side has made the connection.
        most: bytes of a message that are accepted.
        name: of the other side, for errors.

    Attributes:
        open: whether both sides have proved that they have the secret.
        out: bytes of the handshake that are to be sent.
        heard: messages that have come.
    """

    def __init__(self, seal: Seal, place: str, calls: bool, most: int, name: str) -> None:
        self.open, self.out, self.heard = False, bytearray(), deque[bytearray]()
        self._seal, self._calls, self._most, self._name = seal, calls, most, name
        self._key, self._sent, self._taken = b"", 0, 0
        self._buffer, self._greeted = bytearray(), False
        self._steps = self._converse(hashlib.sha256(place.encode()).digest()[:8])
        self._wanted = next(self._steps)

    def feed(self, data: bytes | memoryview) -> None:
        """Take bytes that have come.

        Raises:
            HandshakeError: the other side is a stranger.
            ValueError: a message is damaged, too long, or somebody else's.
        """
        self._buffer += data
        while len(self._buffer) >= self._wanted:
            if len(self._buffer) == self._wanted:
                piece, self._buffer = self._buffer, bytearray()
            else:
                piece = self._buffer[: self._wanted]
                del self._buffer[: self._wanted]
            self._wanted = self._steps.send(piece)

    def messages(self) -> Iterator[bytearray]:
        """Yield messages that have come, each once."""
        while self.heard:
            yield self.heard.popleft()

    def pack(self, data: bytes | bytearray) -> tuple[bytes | bytearray, ...]:
        """Return the pieces of a message, to be sent in this order."""
        self._sent += 1
        head = len(data).to_bytes(8, "big") + self._sign(self._calls, self._sent, data)
        return head, data

    def hung_up(self) -> ConnectionError:
        """Return the error if the other side ends the connection here."""
        if self.open:
            return ConnectionError(f"{self._name} has hung up")
        if self._greeted:
            return HandshakeError(f"{self._name} has hung up in the handshake")
        return HandshakeError(self._is_another())

    def _is_another(self) -> str:
        return f"{self._name} is another program, or an older version of lightning_gc"

    def _converse(self, place: bytes) -> Generator[int, bytearray, None]:
        """Yield how many bytes are needed next."""
        own = VERSION.to_bytes(2, "big") + place + secrets.token_bytes(_NONCE)
        self.out += _MAGIC + own
        if (yield len(_MAGIC)) != _MAGIC:
            raise StrangerError(self._is_another())
        self._greeted = True
        other = yield len(own)
        version = int.from_bytes(other[:2], "big")
        if version != VERSION:
            raise StrangerError(
                f"{self._name} has version {version} of the protocol, and this process has "
                f"{VERSION}; install one version of lightning_gc on all machines"
            )
        if other[2:10] != place:
            raise StrangerError(
                f"{self._name} is another part of an elastic run; compare addresses and ports"
            )
        yield from self._prove(own + other if self._calls else other + own)
        while True:
            head = yield _HEAD
            number = int.from_bytes(head[:8], "big")
            if number > self._most:
                raise ValueError(
                    f"{self._name} has sent a message of {number:,} bytes, where {self._most:,} "
                    f"are possible"
                )
            data = (yield number) if number else bytearray()
            self._taken += 1
            if not hmac.compare_digest(head[8:], self._sign(not self._calls, self._taken, data)):
                raise ValueError(f"{self._name} has sent a message that is damaged, or not its own")
            self.heard.append(data)

    def _prove(self, both: bytes | bytearray) -> Generator[int, bytearray, None]:
        """Prove that this side has the secret, the caller first; demand the same."""
        caller, called = (self._seal.sign(who, both) for who in (b"caller", b"called"))
        if self._calls:
            self.out += caller
            if (yield 1) != _YES:
                raise StrangerError(f"{self._name} has another secret")
        if not hmac.compare_digest(bytes((yield _SIGN)), called if self._calls else caller):
            self.out += b"" if self._calls else _NO
            raise StrangerError(f"{self._name} has another secret")
        self.out += b"" if self._calls else _YES + called
        self._key = self._seal.sign(b"session", both)
        self.open = True

    def _sign(self, by_caller: bool, count: int, data: bytes | bytearray) -> bytes:
        made = hmac.new(self._key, b"%d%d" % (by_caller, count), "sha256")
        made.update(data)
        return made.digest()


class Link:
    """A connection that has passed its handshake, and waits for what it sends and receives.

    Args:
        link: connected, with the time-out of each wait.
        channel: of the same connection.
    """

    def __init__(self, link: socket.socket, channel: Channel) -> None:
        self.link, self.channel = link, channel

    def send(self, data: bytes | bytearray) -> None:
        """Send a message."""
        for piece in self.channel.pack(data):
            self.link.sendall(piece)

    def receive(self) -> bytearray:
        """Return the next message; ValueError if it is damaged, or a stranger's."""
        while not self.channel.heard:
            self.read()
        return self.channel.heard.popleft()

    def read(self) -> None:
        """Wait for some bytes."""
        data = self.link.recv(_PIECE)
        if not data:
            raise self.channel.hung_up()
        self.channel.feed(data)

    def hang_up(self, seconds: float = 1.0) -> None:
        """Say that nothing more comes, and wait until the other side has taken all of it."""
        limit = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            self.link.shutdown(socket.SHUT_WR)
            while (left := limit - time.monotonic()) > 0:
                self.link.settimeout(left)
                if not self.link.recv(_PIECE):
                    return

    def shake(self, seconds: float) -> None:
        """Make the handshake."""
        limit = time.monotonic() + seconds
        while not self.channel.open:
            self.link.settimeout(max(0.01, limit - time.monotonic()))
            self.link.sendall(self.channel.out)
            self.channel.out.clear()
            self.read()


@contextlib.contextmanager
def calling(
    address: tuple[str, int], seal: Seal, place: str, most: int, timeout: float, name: str
) -> Iterator[Link]:
    """Connect to a ``Listener``; yield the ``Link``.

    Args:
        address: host and port.
        seal: with the secret.
        place: that is called.
        most: bytes of a message that are accepted.
        timeout: seconds of each wait.
        name: of the other side, for errors.

    Raises:
        HandshakeError: another program answers, or one with another secret or version.
        OSError: nobody answers.
    """
    with socket.create_connection(address, min(timeout, DEADLINE)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made = Link(link, Channel(seal, place, True, most, name))
        try:
            made.shake(min(timeout, DEADLINE))
        except TimeoutError as error:
            raise HandshakeError(f"{name} does not answer: it is busy, or another program") from (
                error
            )
        link.settimeout(timeout)
        yield made


class Waker:
    """Ends a thread's wait for sockets, from another thread.

    Attributes:
        woken: can be read once the thread is to wake up.
    """

    def __init__(self) -> None:
        self._waker, self.woken = socket.socketpair()
        self._waker.setblocking(False)
        self.woken.setblocking(False)

    def wake(self) -> None:
        """End the wait; from any thread."""
        with contextlib.suppress(OSError):  # full: it is being woken; closed: it does not wait
            self._waker.send(b"\0")

    def clear(self) -> None:
        """Note that the thread is awake."""
        self.woken.recv(4096)

    def close(self) -> None:
        """Close both ends."""
        self._waker.close()
        self.woken.close()


class Guest:
    """A visitor of a ``Listener``.

    Args:
        link: that does not block.
        channel: of it.
        limit: time until which it must have passed the handshake.

    Attributes:
        note: what the listener's owner knows of the guest.
    """

    def __init__(self, link: socket.socket, channel: Channel, limit: float) -> None:
        self.link, self.channel, self.limit = link, channel, limit
        self.unsent, self.blocked = bytearray(), False
        self.note: Any = None


class Listener:
    """Accepts connections, and lets in those who have the secret; in its owner's thread.

    It outlives strangers, and a process without free files: new visitors then wait a moment. Both
    are logged, the first time and at every power of ten.

    Args:
        ports: the first free one is taken; empty: any.
        seal, most: as for ``Channel``.
        place: as for ``Channel``; None: ``"host:port"`` of this listener.
        host: by which others reach it.

    Attributes:
        port: on which it listens, on all interfaces.
        place: as given, or made.
        wake: ends a ``wait``; from any thread.
        guests: who has passed the handshake.

    Raises:
        OSError: none of the ports is free.
    """

    def __init__(
        self, ports: Sequence[int], seal: Seal, most: int, place: str | None, host: str = ""
    ) -> None:
        self._server = _listen(ports)
        self._server.setblocking(False)
        self.port = int(self._server.getsockname()[1])
        self.place = place or f"{host}:{self.port}"
        self._seal, self._most = seal, most
        self.guests: dict[Guest, None] = {}
        self._strangers: dict[Guest, None] = {}  # in the order of their coming
        self._room = memoryview(bytearray(_PIECE))  # to receive in
        self._noted = Counter[str]()
        self._paused = 0.0  # until when nobody is accepted
        self._waker = Waker()
        self.wake = self._waker.wake
        self._selector = selectors.DefaultSelector()
        for each in (self._server, self._waker.woken):
            self._selector.register(each, selectors.EVENT_READ)

    def close(self) -> None:
        """Hang up on everybody."""
        for guest in [*self.guests, *self._strangers]:
            self.drop(guest)
        self._selector.close()
        for each in (self._server, self._waker):
            each.close()

    def wait(self, until: float) -> list[tuple[Guest, bytearray]]:
        """Return messages that have come, and who has sent them; after that time at the latest."""
        limits = [guest.limit for guest in self._strangers][:1]
        limits += [self._paused] if self._paused else []
        seconds = min([until, *limits]) - time.monotonic()
        heard = []
        for key, events in self._selector.select(max(0.0, seconds)):
            if isinstance(key.data, Guest):
                self._attend(key.data, events)
                if key.data in self.guests:
                    heard += [(key.data, each) for each in key.data.channel.messages()]
            elif key.fileobj is self._server:
                self._accept()
            else:
                self._waker.clear()
        self._turn_away()
        return heard

    def send(self, guest: Guest, data: bytes) -> None:
        """Send a message as fast as the guest takes it; drop one that takes nothing."""
        if guest in self.guests:
            guest.unsent += b"".join(guest.channel.pack(data))
            self._attend(guest, selectors.EVENT_WRITE)

    def release(self, guest: Guest, timeout: float) -> Link:
        """Hand a guest over, whose thread waits for it from now on."""
        self._selector.unregister(guest.link)
        del self.guests[guest]
        guest.link.settimeout(timeout)
        return Link(guest.link, guest.channel)

    def drop(self, guest: Guest, why: Exception | None = None) -> None:
        """Hang up on a guest or a stranger."""
        known = self.guests if guest in self.guests else self._strangers
        if guest not in known:
            return
        del known[guest]
        if why is not None:
            self.note(type(why).__name__, f"hung up on {_peer(guest.link)}: {why}")
        with contextlib.suppress(OSError):
            guest.link.send(guest.channel.out)  # a refusal
        with contextlib.suppress(KeyError):  # a selector that fails to modify has forgotten it
            self._selector.unregister(guest.link)
        guest.link.close()

    def note(self, kind: str, text: str) -> None:
        """Log this, if it is the first of its kind, or the tenth, hundredth ..."""
        self._noted[kind] += 1
        count = self._noted[kind]
        if str(count).strip("0") == "1":
            so_far = f" ({count} times so far)" if count > 1 else ""
            _log.warning("The listener on port %d has %s%s.", self.port, text, so_far)

    def _attend(self, guest: Guest, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read(guest)
            if guest.unsent:
                self._write(guest)
        except BlockingIOError:
            pass
        except (OSError, ValueError) as error:
            said = isinstance(error, HandshakeError) or not isinstance(error, ConnectionError)
            self.drop(guest, error if said else None)

    def _read(self, guest: Guest) -> None:
        number = guest.link.recv_into(self._room)
        if not number:
            raise ConnectionError("a visitor has gone")
        guest.channel.feed(self._room[:number])
        if guest in self._strangers:
            guest.unsent += guest.channel.out
            guest.channel.out.clear()
            if guest.channel.open:
                del self._strangers[guest]
                self.guests[guest] = None

    def _write(self, guest: Guest) -> None:
        with contextlib.suppress(BlockingIOError):
            while guest.unsent:
                del guest.unsent[: guest.link.send(guest.unsent)]
        if len(guest.unsent) > _MOST_UNSENT:
            raise ValueError(f"{len(guest.unsent):,} bytes are not taken")
        if guest.blocked != bool(guest.unsent):
            guest.blocked = not guest.blocked
            also = selectors.EVENT_WRITE if guest.blocked else 0
            self._selector.modify(guest.link, selectors.EVENT_READ | also, guest)

    def _accept(self) -> None:
        """Accept some visitors; others come in the next turn."""
        for _ in range(_AT_ONCE):
            try:
                link, _ = self._server.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._pause(error)
                return
            self._greet(link)
            if self._paused:
                return

    def _greet(self, link: socket.socket) -> None:
        guest = Guest(link, Channel(self._seal, self.place, False, self._most, "a visitor"), 0.0)
        guest.limit = time.monotonic() + DEADLINE
        self._strangers[guest] = None
        try:
            link.setblocking(False)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # of machines that vanish
            self._selector.register(link, selectors.EVENT_READ, guest)
        except OSError as error:
            del self._strangers[guest]
            link.close()
            self._pause(error)
            return
        guest.unsent, guest.channel.out = guest.channel.out, bytearray()
        self._attend(guest, selectors.EVENT_WRITE)

    def _pause(self, error: OSError) -> None:
        """Accept nobody for a moment: this process has no file left, say."""
        self.note("pause", f"accepted nobody for {PAUSE:g} s: {error}")
        for oldest in [*self._strangers][:1]:
            self.drop(oldest)
        self._selector.unregister(self._server)
        self._paused = time.monotonic() + PAUSE

    def _turn_away(self) -> None:
        """Drop strangers that are too many or too late; go on after a pause."""
        now = time.monotonic()
        if self._paused and now >= self._paused:
            try:
                self._selector.register(self._server, selectors.EVENT_READ)
                self._paused = 0.0
            except OSError:  # as before the pause
                self._paused = now + PAUSE
        for guest in [*self._strangers]:
            crowded = len(self._strangers) > STRANGERS
            if not crowded and now < guest.limit:
                return
            why = f"more than {STRANGERS}" if crowded else f"{DEADLINE:g} s"
            self.note(why, f"hung up on a visitor who has proved nothing: {why}")
            self.drop(guest)


def _peer(link: socket.socket) -> str:
    with contextlib.suppress(OSError):
        return str(link.getpeername()[0]).removeprefix("::ffff:")  # IPv4 at a socket of IPv6
    return "a visitor"


def _listen(ports: Sequence[int]) -> socket.socket:
    """Return a socket that listens on all interfaces, at the first port that is free."""
    problem: OSError | None = None
    for port in ports or (0,):
        for dual in (socket.has_dualstack_ipv6(), False):
            family = socket.AF_INET6 if dual else socket.AF_INET
            try:
                return socket.create_server(("", port), family=family, dualstack_ipv6=dual)
            except OSError as error:
                problem = error
                if error.errno == errno.EADDRINUSE:
                    break
    assert problem is not None
    raise problem
