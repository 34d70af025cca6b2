"""Find the address that Gloo announces to other machines, and the interface that leads to them.

Gloo announces the address of the machine's name. Debian and Ubuntu give that name 127.0.1.1, which
each machine takes for itself, so that workers on several machines wait for each other until the
timeout.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

VARIABLE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the name of Gloo's interface. Torch reads it for each new group."""

Interfaces = Sequence[tuple[str, str]]
"""Name and address, one pair for each address of this machine."""


@dataclass(frozen=True)
class Way:
    """This machine's way to worker 0.

    Attributes:
        host: the name of this machine.
        announced: the address of that name, which Gloo announces if no interface is named.
        own: this machine's address on the way to worker 0; empty if no way is known.
        interface: the interface with that address; None if only a loopback interface has it.
    """

    host: str
    announced: str
    own: str
    interface: str | None

    @property
    def hidden(self) -> bool:
        """Whether other machines would be told an address that only this machine can reach."""
        return is_loopback(self.announced) and bool(self.own) and not is_loopback(self.own)

    @property
    def sentence(self) -> str:
        """What is wrong if ``hidden``, and what is done or is to be done."""
        wrong = (
            f"The name of this machine, {self.host}, has the address {self.announced}, which other "
            f"machines cannot reach."
        )
        if self.interface is None:
            return f"{wrong} {how_to_name(None)}"
        return f"{wrong} Gloo uses {self.interface} ({self.own}), which they can reach."


def how_to_name(interface: str | None) -> str:
    """Say how to name an interface, in a sentence; None: it is not known which."""
    if interface is not None:
        return (
            f"On every machine, set {VARIABLE} to the interface that joins the machines, here "
            f"{interface}."
        )
    return (
        f"On every machine, set {VARIABLE} to the interface that joins the machines, such as eth0. "
        f"`ip address` lists the names."
    )


def advice() -> str:
    """Say how to name the interface; it is named if ``MASTER_ADDR`` leads to it."""
    main = os.environ.get("MASTER_ADDR")
    return how_to_name(way_to(main).interface if main else None)


@contextlib.contextmanager
def named_interface(main_address: str, say: Callable[[str], object]) -> Iterator[None]:
    """Let Gloo use the interface that leads to worker 0 if it would announce a loopback address.

    Within the context the environment of this process has its name. A name that the user has set
    stays. If worker 0's address is a loopback address, all workers are on this machine.

    Args:
        main_address: worker 0's.
        say: called with a sentence if an interface is named.

    Warns:
        UserWarning: an interface is needed, but none has this machine's address.
    """
    way = None if VARIABLE in os.environ else way_to(main_address)
    if way is None or not way.hidden:
        yield
        return
    if way.interface is None:
        warnings.warn(way.sentence, stacklevel=4)
        yield
        return
    os.environ[VARIABLE] = way.interface
    say(way.sentence)
    try:
        yield
    finally:
        if os.environ.get(VARIABLE) == way.interface:
            del os.environ[VARIABLE]


def way_to(main_address: str) -> Way:
    """Return this machine's way to worker 0, which may be this machine."""
    try:
        own = address_towards(main_address)
    except OSError:
        own = ""
    host = socket.gethostname()
    return Way(host, announced_address(host), own, interface_of(own, interfaces()))


def address_towards(host: str, port: int = 9) -> str:
    """Return this machine's address on the way to another one; OSError if there is no way.

    Nothing is sent: a datagram socket is connected, for which the system chooses a route.
    """
    family, _, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])


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


def announced_address(host: str) -> str:
    """Return a name's first address that is this machine's, else the loopback's, as Gloo does."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, _, _, _, place in found:
        if is_bindable(family, place):
            return str(place[0])
    return "127.0.0.1"


def is_bindable(family: int, place: tuple[object, ...]) -> bool:
    """Return whether an address is one of this machine's."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Return whether an address of version 4 or 6 stays within the machine."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str, among: Interfaces) -> str | None:
    """Return the interface that has an address, and no loopback address; None if there is none.

    Example:
        >>> interface_of("10.0.0.2", [("lo", "127.0.0.1"), ("eth0", "10.0.0.2")])
        'eth0'
    """
    loopback = {name for name, each in among if is_loopback(each)}
    plain = address.partition("%")[0]
    return next((name for name, each in among if each == plain and name not in loopback), None)


class _Entry(ctypes.Structure):
    """The beginning of C's ``struct ifaddrs``."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def interfaces() -> Interfaces:
    """Return the addresses of this machine, of version 4 and 6; none where C has no getifaddrs."""
    if os.name != "posix":
        return []
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "getifaddrs"):
        return []
    first = ctypes.POINTER(_Entry)()
    if libc.getifaddrs(ctypes.byref(first)):
        return []
    try:
        return list(_addresses(first))
    finally:
        libc.freeifaddrs(first)


_PLACES = {int(socket.AF_INET): (4, 4), int(socket.AF_INET6): (8, 16)}
"""Family -> first byte and size of the address in C's ``struct sockaddr``."""


def _addresses(entry: ctypes._Pointer[_Entry]) -> Iterator[tuple[str, str]]:
    while entry:
        found = entry.contents
        if found.address:
            # Linux has the family in two bytes, BSD and macOS a length and then the family.
            head = ctypes.string_at(found.address, 2)
            family = int.from_bytes(head, sys.byteorder) if sys.platform == "linux" else head[1]
            begins, size = _PLACES.get(family, (0, 0))
            if size:
                data = ctypes.string_at(found.address + begins, size)
                yield found.name.decode(), str(ipaddress.ip_address(data))
        entry = found.next
