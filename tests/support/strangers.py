"""Those who have no secret: they idle, listen in, and play again what they have heard."""

import contextlib
import socket
import threading
from collections.abc import Iterator

from tests.support.processes import many_files


@contextlib.contextmanager
def idle_strangers(number: int, *ports: int) -> Iterator[None]:
    """Hold so many connections to each of these ports, and say nothing."""
    with many_files(), contextlib.ExitStack() as strangers:
        for port in ports * number:
            call = socket.create_connection(("127.0.0.1", port), 60.0)
            strangers.enter_context(call)
        yield


def play(said: bytes, port: int) -> None:
    """Call a port, say this, and wait until the other side has hung up."""
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(said)
        assert ended(stranger)


def ended(stranger: socket.socket) -> bool:
    """Return whether the other side has hung up; wait for it."""
    stranger.settimeout(30.0)
    with contextlib.suppress(ConnectionError):
        while stranger.recv(4096):
            pass
    return True


class Tap:
    """Stands between a worker and a rendezvous, and keeps what both say."""

    def __init__(self, port: int) -> None:
        self.said = (bytearray(), bytearray())
        self.open = True
        self._links: list[socket.socket] = []
        self._there = ("127.0.0.1", port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._server.accept()
                if not self.open:
                    caller.close()
                    continue
                ends = (caller, socket.create_connection(self._there))
                self._links += ends
                for index in range(2):
                    pair = (ends[index], ends[1 - index], self.said[index])
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket, said: bytearray) -> None:
        with one, contextlib.suppress(OSError):
            while data := one.recv(4096):
                said += data
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """Break all connections, and let no other one through."""
        self.open = False
        for each in self._links:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
