"""Let machines meet before a training, each within seconds, and say which port is not reached."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from lightning_gc.core import notices
from lightning_gc.core.refusal import refuse
from lightning_gc.transports import interfaces

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

CONNECT = 4.0
"""Seconds in which a machine must answer: three tries of TCP. A blocked port never answers."""
PATIENT = 2.0
"""Seconds after which it is said that machine 0 does not listen: it may just start."""
ECHOES = 20
"""Bytes sent back and forth, one by one; the fastest gives the round trip."""

Say = Callable[[str], object]
Facts = dict[str, str]
"""What one machine tells the others: name -> text of one line."""


class NotMet(RuntimeError):
    """The machines cannot meet; the text has the reason and the fix."""


@dataclass(frozen=True)
class Party:
    """Place of this machine among those that meet.

    Attributes:
        number: of this machine; 0 is the one at ``address``.
        machines: how many meet.
        address: machine 0's.
        port: on which the store of machine 0 listens.
        hosts: whether this process makes that store; torchrun has made one.
        wait: seconds for the other machines to start.
    """

    number: int
    machines: int
    address: str
    port: int
    hosts: bool
    wait: float

    @property
    def others(self) -> list[int]:
        """Numbers of the other machines."""
        return [i for i in range(self.machines) if i != self.number]

    def command(self, number: object) -> str:
        """Return the command of a machine."""
        port = "" if self.port == PORT else f" --master-port {self.port}"
        return (
            f"lightning-gc check --nnodes {self.machines} --node-rank {number} --master-addr "
            f"{self.address}{port}"
        )

    def store(self, say: Say) -> Store:
        """Connect to machine 0's store; NotMet if that cannot be."""
        from torch._C._distributed_c10d import TCPStore  # seconds: options are judged before

        limit = timedelta(seconds=CONNECT)
        if self.hosts:
            self._refuse_other_address()
            try:
                return TCPStore(
                    self.address, self.port, is_master=True, timeout=limit, wait_for_workers=False
                )
            except RuntimeError as error:
                raise NotMet(
                    f"Port {self.port} of this machine is taken by another program. Stop it, or "
                    f"give all machines another --master-port, such as {self.port + 1}."
                ) from error
        self._knock(say)
        found: list[Store] = []

        def connect() -> None:
            with contextlib.suppress(RuntimeError):
                found.append(TCPStore(self.address, self.port, is_master=False, timeout=limit))

        # In a thread: torch waits without a limit for a program that listens and says nothing.
        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(CONNECT)
        if not found:
            atexit.register(_end_beside, thread)
            raise NotMet(
                f"Another program than lightning-gc check answers at {self.address}:{self.port}. "
                f"Start the command on machine 0, or use another --master-port on all machines."
            )
        return found[0]

    def _refuse_other_address(self) -> None:
        try:
            family, _, _, _, place = socket.getaddrinfo(self.address, 0, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise NotMet(self._unknown()) from error
        if not interfaces.is_bindable(family, place):
            raise NotMet(
                f"--master-addr {self.address} is not an address of this machine, which is "
                f"machine 0. Its addresses are {', '.join(own_addresses()) or 'loopback only'}."
            )

    def _unknown(self) -> str:
        return f"The name {self.address} is not known here. Give machine 0's address instead."

    def _knock(self, say: Say) -> None:
        """Wait until machine 0 listens; NotMet if it cannot be reached."""
        where, begun, due = f"{self.address}:{self.port}", time.monotonic(), PATIENT
        while True:
            try:
                socket.create_connection((self.address, self.port), CONNECT).close()
                return
            except ConnectionRefusedError as error:
                problem = (
                    f"Nothing listens at {where}. Start there: {self.command(0)}. If it runs "
                    f"there, the address is another machine's, or a firewall refuses port "
                    f"{self.port}: open it for TCP."
                )
                if time.monotonic() - begun > self.wait:
                    raise NotMet(problem) from error
            except OSError as error:
                raise NotMet(self._unreached(error)) from error
            if time.monotonic() - begun > due:
                say(f"{problem} Waiting up to {self.wait:.0f} s.")
                due += notices.AGAIN
            time.sleep(0.2)

    def _unreached(self, error: OSError) -> str:
        if isinstance(error, socket.gaierror):
            return self._unknown()
        try:
            own = f"this machine, {interfaces.address_towards(self.address)},"
        except OSError:
            own = "this machine"
        where = f"port {self.port} of machine 0, {self.address}"
        if isinstance(error, TimeoutError):
            return (
                f"{own[0].upper()}{own[1:]} gets no answer from {where}. The address is wrong, or "
                f"a firewall drops the packets. On machine 0 open TCP port {self.port}, and later "
                f"all TCP ports between the machines."
            )
        return (
            f"{own[0].upper()}{own[1:]} has no way to {where} ({error.strerror}). Check the "
            f"address, and that `ping {self.address}` answers."
        )

    def gather(self, store: Store, what: str, own: Mapping[str, str], say: Say) -> list[Facts]:
        """Return what every machine tells, in their order; NotMet if one does not come in time.

        Args:
            store: machine 0's.
            what: is told.
            own: this machine's.
            say: called with a line if one is missing after ``CONNECT`` seconds, and again.
        """
        lines = "\n".join(f"{name}\t{' '.join(text.split())}" for name, text in own.items())
        store.set(f"{what}/{self.number}", lines)
        begun, due = time.monotonic(), CONNECT
        while missing := [i for i in self.others if not store.check([f"{what}/{i}"])]:
            numbers = ", ".join(map(str, missing))
            problem = (
                f"Machine {numbers} has not come. If the command runs there, it does not reach "
                f"port {self.port} of machine 0, {self.address}: open it for TCP."
                if what == FIRST
                else f"Machine {numbers} has come, but does not go on. See its output."
            )
            passed = time.monotonic() - begun
            if passed > self.wait:
                raise NotMet(problem)
            if passed > due:
                say(f"{problem} Waiting up to {self.wait:.0f} s.")
                due += notices.AGAIN
            time.sleep(0.05)
        return [_facts(store.get(f"{what}/{i}")) for i in range(self.machines)]


PORT = 29500
"""Default port, as torchrun's."""
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Environment variable that torchrun sets."""
FIRST = "place"
"""What each machine tells first, so that others know it has come."""
_MOST = 300  # letters of a fact: another program may have written it


def _end_beside(thread: threading.Thread) -> None:
    """End this process as failed if a thread is still in torch's code.

    Python would unwind that thread at its end, and C++ answers by ``std::terminate``.
    """
    if thread.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def party_of(options: argparse.Namespace) -> Party | None:
    """Return this machine's place, from the options or from torchrun; None if it is alone.

    Raises:
        ValueError: options that do not fit together.
    """
    names = {"--nnodes": options.nnodes, "--node-rank": options.node_rank}
    names["--master-addr"] = options.master_addr
    given = [name for name, value in names.items() if value is not None]
    if not 1 <= options.wait < float("inf"):
        refuse(f"--wait {options.wait:g}: give 1 second or more, such as 60")
    if TORCHRUN in os.environ:
        if given:
            refuse(f"{given[0]}: torchrun has said it. Give it to torchrun only")
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        rank, machines = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) // local
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        party = Party(rank // local, machines, *place, rank == 0 and not agents, options.wait)
        return party if machines > 1 else None
    if not given or options.nnodes == 1:
        return None
    missing = sorted(names.keys() - given)
    if missing:
        refuse(f"{', '.join(given)} needs also {' and '.join(missing)}")
    number, machines = options.node_rank, options.nnodes
    address, port = _place(options.master_addr, options.master_port)
    if machines < 1:
        refuse(f"--nnodes {machines}: give the number of machines, such as 2")
    if not 0 <= number < machines:
        refuse(f"--node-rank {number}: give 0 to {machines - 1}, each on one machine")
    if not 0 < port < 1 << 16:
        refuse(f"--master-port {port}: a port is a number from 1 to 65535")
    return Party(number, machines, address, port, number == 0, options.wait)


_WITH_PORT = re.compile(r"\[(?P<six>[^\]]*)\](?::(?P<its>.*))?|(?P<host>[^:]*):(?P<port>[^:]*)")


def _place(address: str, port: int | None) -> tuple[str, int]:
    """Return machine 0's address and port; the port may stand in the address, as for torchrun."""
    found = _WITH_PORT.fullmatch(address)
    if found is None:  # several colons without brackets are an address of IPv6
        return address, PORT if port is None else port
    host, written = found["six"] or found["host"], found["its"] or found["port"]
    if not host or (written and not (written.isascii() and written.isdecimal())):
        refuse(f"--master-addr {address}: write an address, such as 10.0.0.1:{PORT}")
    if written is None:
        return host, PORT if port is None else port
    if port not in (None, int(written)):
        refuse(f"--master-addr {address} and --master-port {port} name two ports. Give one of them")
    return host, int(written)


def _facts(text: bytes) -> Facts:
    found: Facts = {}
    for line in text.decode(errors="replace").splitlines():
        name, _, value = line.partition("\t")
        shown = "".join(filter(str.isprintable, value))
        found[name] = shown if len(shown) <= _MOST else f"{shown[:_MOST]} ..."
    return found


def own_addresses() -> list[str]:
    """Return this machine's addresses that other machines may reach."""
    found = [
        address for _, address in interfaces.interfaces() if not interfaces.is_loopback(address)
    ]
    return [address for address in found if not address.startswith("fe80:")]


class Door:
    """Listens at the address that Gloo announces, names itself, and sends back what it gets.

    Attributes:
        place: ``"address port"``.
        token: what it says first, so that no other program is taken for it.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family)
        self.place = f"{address} {self._socket.getsockname()[1]}"
        self.token = secrets.token_hex(8)
        threading.Thread(target=self._work, daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _work(self) -> None:
        while True:
            try:
                visitor, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(visitor,), daemon=True).start()

    def _answer(self, visitor: socket.socket) -> None:
        with contextlib.suppress(OSError), visitor:
            visitor.settimeout(CONNECT)
            visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            visitor.sendall(self.token.encode())
            while data := visitor.recv(1):
                visitor.sendall(data)


def visit(place: str, token: str) -> str:
    """Return the seconds of a round trip to another machine's door, or what is wrong, as text."""
    host, _, port = place.rpartition(" ")
    try:
        with socket.create_connection((host, int(port)), CONNECT) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found = b""
            while len(found) < len(token) and (more := link.recv(len(token) - len(found))):
                found += more
            if found != token.encode():
                return "another program answers"
            return f"{min(_echo(link) for _ in range(ECHOES)):.9f}"
    except TimeoutError:
        return "no answer"
    except (OSError, ValueError, OverflowError) as error:  # of a place that is none, too
        return getattr(error, "strerror", None) or str(error) or "it hangs up"


def _echo(link: socket.socket) -> float:
    began = time.perf_counter()
    link.sendall(b".")
    if not link.recv(1):
        raise ConnectionError("it hangs up")
    return time.perf_counter() - began


def visit_all(party: Party, doors: Sequence[Facts]) -> Facts:
    """Visit the doors of all other machines at the same time."""

    def one(number: int) -> tuple[str, str]:
        door = doors[number]
        return str(number), visit(door.get("door", ""), door.get("token", "?"))

    with ThreadPoolExecutor(len(party.others)) as pool:
        return dict(pool.map(one, party.others))
