"""Workers in network namespaces of their own, joined by links as fast or slow as one likes.

Needs Linux, root and iproute2.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

INTERFACE, SUBNET, PORT = "gc0", "10.77.0.", 29500  # inside the namespaces only


@dataclass(frozen=True)
class Link:
    """What every worker's way out is like, and its way in.

    Attributes:
        mbit: 10⁶ bits per second; 0: as fast as the machine.
        delay_ms: added to every packet, one way.
        loss: share of packets lost, in [0, 1).
        down_mbit: of the way in; 0: as fast as the machine.
    """

    mbit: float = 0.0
    delay_ms: float = 0.0
    loss: float = 0.0
    down_mbit: float = 0.0

    def __str__(self) -> str:
        """As a table shows it."""
        parts = [_speed(self.mbit)]
        parts += [f"{_speed(self.down_mbit)} down"] if self.down_mbit else []
        parts += [f"{self.delay_ms:g} ms"] if self.delay_ms else []
        parts += [f"{self.loss:.1%} lost"] if self.loss else []
        return ", ".join(parts)

    def carried(self, spaces: Sequence[str]) -> contextlib.AbstractContextManager[bool]:
        """Return a context in which `delay_line` joins namespaces; False where it is not needed."""
        if (self.delay_ms or self.loss) and not has_netem(spaces[0]):
            if self.down_mbit:
                give_up("A way in of its own needs netem in the kernel where packets are delayed.")
            return _delay_line(self, spaces)
        return contextlib.nullcontext(False)

    def shape(self, space: str = "") -> None:
        """Give the interface of a namespace, or of the one that this process is in, this speed."""
        tell = f"-n {space} qdisc replace" if space else "qdisc replace"
        parent = "root handle 1:"
        if self.mbit:
            tc(f"{tell} dev {INTERFACE} {parent} {_bucket(self.mbit)}")
            parent = "parent 1:1 handle 10:"
        if self.delay_ms or self.loss:
            worse = f"netem delay {self.delay_ms}ms loss {100 * self.loss}%"
            tc(f"{tell} dev {INTERFACE} {parent} {worse}")


def _speed(mbit: float) -> str:
    if not mbit:
        return "unlimited"
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"


def _bucket(mbit: float) -> str:
    # As much as flows between two ticks of the kernel's clock, and one segment at least.
    burst = max(int(mbit * 1e6 / 8 / 250 * 1.5), 128 * 1024)
    return f"tbf rate {mbit}mbit burst {burst} latency 200ms"


def sent_bytes(interface: str = INTERFACE) -> int:
    """Return what the namespace that this process is in has sent through an interface."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def has_netem(space: str) -> bool:
    """Return whether this kernel can delay packets."""
    words = f"tc -n {space} qdisc replace dev lo root netem delay 0ms".split()
    return subprocess.run(words, capture_output=True, timeout=30).returncode == 0


@contextlib.contextmanager
def _delay_line(link: Link, spaces: Sequence[str]) -> Iterator[bool]:
    command = [sys.executable, str(Path(__file__).with_name("delay_line.py")), *spaces]
    command += [f"--interface={INTERFACE}", f"--mbit={link.mbit}", f"--delay-ms={link.delay_ms}"]
    command += [f"--loss={link.loss}"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
    try:
        if not process.stdout or process.stdout.readline() != b"ready\n":
            give_up("A delay needs netem in the kernel, or TAP devices; here is neither.")
        yield True
    finally:
        process.communicate(timeout=30)  # closes its input, which ends it


def give_up(*why: str) -> NoReturn:
    """Say why there is no result, and leave."""
    sys.stderr.write("\n".join((*why, "")))
    raise SystemExit(2)


def check_privileges(who: str) -> None:
    """Leave with a sentence where namespaces cannot be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        give_up(f"{who} makes network namespaces: it needs Linux, root (sudo) and iproute2.")
    for number in (signal.SIGTERM, signal.SIGHUP):  # by way of every `finally`
        signal.signal(number, lambda *_: sys.exit(2))


def ip(command: str, check: bool = True) -> str:
    """Run ``ip`` and return what it prints."""
    return _run("ip", command, check)


def tc(command: str) -> str:
    """Run ``tc`` and return what it prints."""
    return _run("tc", command, check=True)


def _run(tool: str, command: str, check: bool) -> str:
    words = [tool, *command.split()]  # in its own session, which no Ctrl-C reaches
    done = subprocess.run(words, capture_output=True, timeout=30, start_new_session=True)
    if check and done.returncode:
        give_up(
            done.stderr.decode(), f"`{tool} {command}` failed; network namespaces need privileges."
        )
    return done.stdout.decode()


@contextlib.contextmanager
def network(workers: int, link: Link = Link()) -> Iterator[list[str]]:
    """Make one namespace per worker, joined; in the end remove them and what runs in them."""
    *spaces, hub = (f"gcbench{os.getpid()}-{i}" for i in range(workers + 1))
    try:
        for space in (*spaces, hub):
            ip(f"netns add {space}")
        with link.carried(spaces) as carried:
            if not carried:
                _join(spaces, hub, link.down_mbit)
            for i, space in enumerate(spaces):
                ip(f"-n {space} addr add {SUBNET}{i + 1}/24 dev {INTERFACE}")
                for name in (INTERFACE, "lo"):
                    ip(f"-n {space} link set {name} up")
                if not carried:
                    link.shape(space)
                elif not 0 < link.mbit <= 100:  # fewer frames to carry
                    ip(f"-n {space} link set {INTERFACE} mtu 9000")
            yield spaces
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must wait
        for space in (*spaces, hub):
            for pid in ip(f"netns pids {space}", check=False).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            ip(f"netns del {space}", check=False)
        signal.signal(signal.SIGINT, before)


def _join(spaces: Sequence[str], hub: str, down_mbit: float) -> None:
    """Give each namespace an interface; two are joined directly, more by a bridge in the hub.

    The bridge's ports send what comes in, so they limit it.
    """
    ip(f"-n {hub} link add bridge0 up type bridge")
    for i, space in enumerate(spaces):
        if len(spaces) > 2 or down_mbit:
            ip(f"-n {space} link add {INTERFACE} type veth peer name port{i} netns {hub}")
            ip(f"-n {hub} link set port{i} master bridge0 up")
            if down_mbit:
                tc(f"-n {hub} qdisc replace dev port{i} root {_bucket(down_mbit)}")
        elif i:
            ip(f"-n {space} link add {INTERFACE} type veth peer {INTERFACE} netns {spaces[0]}")


def launch(
    script: str, arguments: Sequence[str], spaces: Sequence[str], timeout: float, local: int = 1
) -> list[Any]:
    """Run a script in every namespace; return what each wrote into the file that it got as --out.

    Each namespace is a node with so many processes, ``local``, in the order of their ranks. They
    find the variables that torchrun would set.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = len(spaces) * local
        results = [Path(folder, f"{i}.json") for i in range(ranks)]
        logs = [Path(folder, f"{i}.log") for i in range(ranks)]
        processes = []
        for i in range(ranks):
            node, space = i // local, spaces[i // local]
            into = f"ip netns exec {space} env OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME={INTERFACE} "
            into += f"MASTER_ADDR={SUBNET}1 MASTER_PORT={PORT} WORLD_SIZE={ranks} RANK={i} "
            # Where there are GPUs, torch's PowerSGD hook refuses gradients on the CPU.
            into += "CUDA_VISIBLE_DEVICES= "
            command = [*into.split(), f"NODE_RANK={node}", f"LOCAL_RANK={i % local}"]
            command += [sys.executable, script, *arguments, f"--out={results[i]}"]
            with logs[i].open("w") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            processes.append(process)
        deadline = time.monotonic() + timeout
        while None in (codes := [process.poll() for process in processes]):
            if any(codes) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        if any(code != 0 for code in codes):
            ends = ["\n".join(log.read_text().splitlines()[-15:]) for log in logs]
            what = " ".join(arguments)
            give_up(*ends, f"{what} failed or took over {timeout:.0f} s; its logs end as above.")
        return [json.loads(path.read_text()) for path in results]
