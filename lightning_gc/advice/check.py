"""Check machines before a training: names, interfaces, ports, versions, kernels and the link."""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import shutil
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from lightning_gc.advice import meeting
from lightning_gc.advice.link_probe import directions, probe, sustained
from lightning_gc.compressors import Identity
from lightning_gc.core.notices import waiting
from lightning_gc.elastic.folder import IN_A_ROW, POLL
from lightning_gc.elastic.objects import Objects
from lightning_gc.exchange.compression import Compression
from lightning_gc.exchange.kernel_compilation import compile_kernels, own_release
from lightning_gc.exchange.validation import FIXES
from lightning_gc.kernels import dispatch
from lightning_gc.kernels.dispatch import SWITCH
from lightning_gc.methods import text_table
from lightning_gc.methods.text_table import print_line
from lightning_gc.transports import interfaces
from lightning_gc.transports.accounting import human_bytes
from lightning_gc.transports.distributed import Distributed
from lightning_gc.transports.link import APART, Link, Rate
from lightning_gc.transports.peer_error import naming_peers


@dataclass(frozen=True)
class Finding:
    """Something that the page says first.

    Attributes:
        text: what, and the fix.
        stops: whether a training would not start, or be refused.
    """

    text: str
    stops: bool = True


SAME = {
    "machines": "Give all machines the same --nnodes.",
    "lightning_gc": "Install the same version on all machines.",
    "wire format": "Messages would be read wrongly. Install the same lightning_gc on all machines.",
    **{name: FIXES[name] for name in ("torch", "kernels", "vector instructions")},
}
"""Facts that must be equal on all machines -> the fix."""
WAYS = ("sends", "receives")
ROWS = (
    *("host name", "way to machine 0", "Gloo announces", "Python", "torch", "Lightning"),
    *("lightning_gc", "wire format", "vector instructions", "numba", "compiled kernels", SWITCH),
    "GPU",
    *WAYS,
)
"""Facts that the page shows."""
_LARGE = 1 << 23
ANNOUNCED, WAY, OWN_NAME = "Gloo announces", "way to machine 0", "own name"
TROUBLE = "kernels that do not run"


def check(party: meeting.Party | None) -> bool:
    """Run the command on one machine; return whether a training can start.

    Args:
        party: as ``meeting.party_of`` returns it.
    """
    if meeting.TORCHRUN in os.environ and os.environ["LOCAL_RANK"] != "0":
        return True  # the machine's first process speaks for it
    dispatch.allowed()  # refuses a wrong value before the machines meet
    if party is None:
        return alone()
    try:
        return together(party)
    except meeting.NotMet as error:
        print_line(page([Finding(str(error))], []))
        return False
    except dist.DistError as error:  # the store's
        print_line(page([Finding(f"Another machine has left. See its output. ({error})")], []))
        return False


def check_folder(url: str) -> bool:
    """Say whether a folder can carry an elastic run; return that."""
    try:
        found = Objects(url, None).probe(_LARGE)
    except (OSError, ValueError) as error:
        print_line(page([Finding(str(error))], []))
        return False
    print_line(
        f"{url} can carry an elastic run: of those who created an object at once, one succeeded.\n"
        f"  small request  {1e3 * found.seconds:.3g} ms, median\n"
        f"  rate           {human_bytes(found.rate)} in a second, with an object of "
        f"{human_bytes(_LARGE)} written and read\n"
        f"  listing        shows a new object after {1e3 * found.lag:.3g} ms\n"
        f"A round has about {IN_A_ROW} requests one after the other, so it takes "
        f"{max(found.seconds, POLL) * IN_A_ROW:.2g} s or more, and the time of its bytes."
    )
    return True


def alone() -> bool:
    """Tell of this machine only, and how to check two."""
    own = software() | {
        "host name": platform.node(),
        "addresses": ", ".join(meeting.own_addresses()),
    }
    found = list(findings([own], []))
    print_line(page(found, [own]))
    example = meeting.Party(
        0, 2, next(iter(meeting.own_addresses()), "10.0.0.1"), meeting.PORT, True, 0
    )
    print_line(
        f"Only this machine was checked. Start one line on each of two machines:\n"
        f"  {example.command(0)}  # here\n  {example.command(1)}  # on the other one"
    )
    return not any(each.stops for each in found)


def together(party: meeting.Party) -> bool:
    """Meet the other machines, compare and measure; machine 0 prints the page.

    Communication pattern:
        Texts through machine 0's store. A connection of each machine to each other one. Then a
        process group of Gloo, with the probe of the link.
    """
    if party.hosts:
        commands = "".join(f"\n  {party.command(i)}" for i in party.others)
        print_line(f"Waiting for the other machines. Start there:{commands}")
    store = PrefixStore("lightning_gc check", party.store(print_line))
    if store.add(f"number {party.number}", 1) > 1:
        raise meeting.NotMet(
            f"Another machine has --node-rank {party.number} too. Give each machine its own, from "
            f"0 to {party.machines - 1}."
        )
    hidden: list[str] = []
    with interfaces.named_interface(party.address, hidden.append):
        place = here(party)
        door = meeting.Door(place[ANNOUNCED].partition(" ")[0])
        own = place | {"door": door.place, "token": door.token, OWN_NAME: "".join(hidden)}
        party.gather(store, meeting.FIRST, own, print_line)
        told = party.gather(store, "facts", own | software(), print_line)
        with waiting("Visiting the other machines"):
            visited = meeting.visit_all(party, told)
        reached = party.gather(store, "reached", visited, print_line)
        found = list(findings(told, reached))
        link = ""
        if not any(each.stops for each in found):
            gbps, ways = measured(store, party)
            link = in_words(gbps, ways, reached)
            for facts, rates in zip(told, ways, strict=False):
                facts.update(zip(WAYS, map(_rate, rates), strict=True))
    door.close()
    if party.number == 0:
        print_line(page(found, told, link))
    else:
        print_line("Checked. The page is in machine 0's output.")
    _leave(store, party)
    return not any(each.stops for each in found)


def _leave(store: Store, party: meeting.Party) -> None:
    """Wait until machine 0 has printed its page, and it until the others know; then end."""
    limit = time.monotonic() + 2.0
    if party.number:
        while not store.check(["printed"]) and time.monotonic() < limit:
            time.sleep(0.02)
        store.add("left", 1)
        return
    store.set("printed", "")
    while store.add("left", 0) < len(party.others) and time.monotonic() < limit:
        time.sleep(0.02)


def here(party: meeting.Party) -> meeting.Facts:
    """Return where this machine is in the network, quickly."""
    way = interfaces.way_to(party.address)
    named = os.environ.get(interfaces.VARIABLE)
    own = [address for name, address in interfaces.interfaces() if name == named]
    if named is not None and not own:
        names = ", ".join(sorted({name for name, _ in interfaces.interfaces()}))
        raise meeting.NotMet(
            f"{interfaces.VARIABLE}={named} is not an interface of this machine with an address. "
            f"Choose from {names}."
        )
    announced = f"{own[0]} ({named})" if own else way.announced
    return {
        "host name": f"{way.host} ({way.announced})",
        WAY: f"{way.own} ({way.interface})" if way.interface else way.own,
        ANNOUNCED: announced,
        "machines": str(party.machines),
    }


def software() -> meeting.Facts:
    """Return versions and kernels, in a few seconds."""
    with waiting("Reading this machine's versions"):
        return _software()


def _software() -> meeting.Facts:
    from lightning_gc.methods import catalogue  # takes seconds: not before the machines meet

    device = torch.device("cpu")
    wire = hashlib.sha256(catalogue.markdown("wire").encode()).hexdigest()
    lightning = sorted({_version("lightning"), _version("pytorch-lightning")} - {""})
    numba, compiled, trouble = _version("numba"), dispatch.on_disk(), dispatch.trouble()
    found = {
        "Python": platform.python_version(),
        **compile_kernels(Compression(Identity()).configured("lightning-gc check"), device),
        "Lightning": ", ".join(lightning) or "none",
        "lightning_gc": own_release(),
        "wire format": wire[:8],
        "numba": numba or "none",
        "compiled kernels": f"{sum(compiled.values())} of {len(compiled)}",
        TROUBLE: "; ".join(f"{', '.join(names)} ({why})" for why, names in trouble.items()),
    }
    if dispatch.allowed().value != "auto":
        found[SWITCH] = dispatch.allowed().value
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["GPU"] = f"{len(names)} x {names[0]}"
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def findings(
    told: Sequence[meeting.Facts], reached: Sequence[Mapping[str, str]]
) -> Iterator[Finding]:
    """Yield what is to be mended: what stops a training first.

    Args:
        told: facts of each machine.
        reached: of each machine, other machine -> seconds of a round trip, or what is wrong.
    """
    for here, there in itertools.permutations(range(len(reached)), 2):
        problem = reached[here].get(str(there), "no answer")
        if not _is_number(problem):
            yield Finding(_unreached(told, here, there, problem))
    for name, fix in SAME.items():
        expected = told[0].get(name, "nothing")
        others: dict[str, list[int]] = {}
        for machine, facts in enumerate(told):
            if (value := facts.get(name, "nothing")) != expected:
                others.setdefault(value, []).append(machine)
        for value, machines in others.items():
            yield Finding(
                f"{_who(machines, told)} {name} {value}, but machine 0 has {expected}. {fix}"
            )
    ways = [facts.get(WAY, "").partition(" ")[0] for facts in told if WAY in facts]
    local = [way.startswith("127.") or way == "::1" for way in ways]
    for machine, wrong in enumerate(local):
        if wrong and not all(local):
            yield Finding(
                f"Machine {machine} takes {ways[machine]}, itself, for machine 0. Start all "
                f"machines with machine 0's address in the network as --master-addr."
            )
    yield from _notes(told)


def _notes(told: Sequence[meeting.Facts]) -> Iterator[Finding]:
    for machine, facts in enumerate(told):
        who = f"Machine {machine}" if len(told) > 1 else "This machine"
        if facts.get(OWN_NAME):
            name = facts.get(ANNOUNCED, "").partition("(")[2].rstrip(")")
            yield Finding(
                f"{who}: {facts[OWN_NAME]} The strategies of lightning_gc do the same. Plain DDP "
                f"needs `export {interfaces.VARIABLE}={name}`.",
                stops=False,
            )
        if facts.get(TROUBLE):
            yield Finding(
                f"{who}: numba's kernels of {facts[TROUBLE]} do not run, and torch's operations "
                f"take longer. There, set NUMBA_CACHE_DIR to another folder, which has room, or "
                f"{SWITCH}=torch.",
                stops=False,
            )
        if facts.get(SWITCH):
            yield Finding(
                f"{who} has {SWITCH}={facts[SWITCH]}, which makes exchanges take longer. Unset it "
                f"to use all that is faster.",
                stops=False,
            )
    without = [machine for machine, facts in enumerate(told) if facts.get("numba") == "none"]
    if without:
        yield Finding(
            f"{_who(without, told)} no numba, so QSGD and Cast take longer on CPUs, and all "
            f"machines wait. Install it: pip install numba.",
            stops=False,
        )
    off = [machine for machine, facts in enumerate(told) if facts.get(SWITCH) == "torch"]
    if 0 < len(off) < len(told) and any("GPU" in facts for facts in told):
        yield Finding(f"Training on GPUs: {FIXES['kernels']}", stops=False)
    if 0 < len({*without, *off}) < len(told):
        yield Finding(f"Methods of low rank, such as PowerSGD: {FIXES['numba']}", stops=False)


def _who(machines: Sequence[int], told: Sequence[meeting.Facts]) -> str:
    """Return the subject of a sentence about machines, with its verb."""
    if len(told) == 1:
        return "This machine has"
    if len(machines) == 1:
        return f"Machine {machines[0]} has"
    return f"Machines {', '.join(map(str, machines[:-1]))} and {machines[-1]} have"


def _unreached(told: Sequence[meeting.Facts], here: int, there: int, problem: str) -> str:
    address, _, port = told[there].get("door", "").rpartition(" ")
    text = (
        f"Machine {here} does not reach port {port} of machine {there} at {address} ({problem}), "
        f"the address that Gloo announces. "
    )
    way, _, interface = told[there].get(WAY, "").rstrip(")").partition(" (")
    if way != address:
        return text + (
            f"Machine {there} is at {way}: there, run `export {interfaces.VARIABLE}={interface}`."
            if interface
            else interfaces.how_to_name(None)
        )
    return text + (
        f"On machine {there}, allow all TCP ports from the other machines: each training chooses "
        f"its own."
    )


def _is_number(text: str) -> bool:
    try:
        return float(text) >= 0
    except ValueError:
        return False


def measured(store: Store, party: meeting.Party) -> tuple[float, list[Rate]]:
    """Return the link's 10⁹ bits per second, and each machine's up and down.

    Measured with Gloo as a training uses it.
    """
    limit = timedelta(seconds=60)
    group = PrefixStore("gloo", store)
    me, machines = party.number, party.machines
    with waiting("Measuring the link with the other machines"):
        with naming_peers("connection", "the check of the link", me, machines):
            dist.init_process_group(
                "gloo", timeout=limit, world_size=machines, rank=me, store=group
            )
        transport = Distributed(purpose="the check of the link")
        device = torch.device("cpu")
        (probes,) = probe(transport, device, ("Exchange",)).values()
        gbps = sustained(probes)
        ways = directions(transport, device, gbps)
    dist.destroy_process_group()
    return gbps, ways


def in_words(gbps: float, ways: Sequence[Rate], reached: Sequence[Mapping[str, str]]) -> str:
    """Describe the link, and how to learn whether compression pays on it.

    Args:
        gbps: of requests in which all machines send and receive as much.
        ways: up and down, of each machine.
        reached: as for ``findings``.
    """
    trips = [float(seconds) for each in reached for seconds in each.values()]
    rates = [rate for both in ways for rate in both]
    what = "for each machine and direction"
    if max(rates) >= APART * min(rates):
        what = "in the slowest direction, which every exchange waits for"
    mbit = float(f"{1000 * gbps:.3g}")
    return (
        f"Link: {Link(mbit / 1000, 0)} of payload {what}; a round trip takes "
        f"{1000 * max(trips):.3g} ms.\n"
        f"Next: lightning-gc advise --params 124M --step-ms 45 --link {mbit:g}mbit --workers "
        f"{len(reached)}, with your model's figures."
    )


def _rate(gbps: float) -> str:
    return str(Link(float(f"{gbps:.3g}"), 0))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def page(found: Sequence[Finding], told: Sequence[meeting.Facts], link: str = "") -> str:
    """Return the text that is printed: findings first."""
    width = shutil.get_terminal_size((100, 24)).columns
    stops = sum(each.stops for each in found)
    heads = [f"{_count(stops, 'problem')} to fix before training" if stops else "Ready to train"]
    heads += [_count(len(found) - stops, "note")] if len(found) > stops else []
    lines = [f"{', '.join(heads)}."]
    for each in sorted(found, key=lambda each: not each.stops):
        mark = "STOP  " if each.stops else "note  "
        lines.append(
            textwrap.fill(
                each.text,
                width,
                initial_indent=mark,
                subsequent_indent=" " * 6,
                break_on_hyphens=False,
                break_long_words=False,
            )
        )
    if told:
        columns = ("", *(f"machine {i}" for i in range(len(told))))
        names = [name for name in (*ROWS, "addresses") if any(name in facts for facts in told)]
        rows = [[name, *(facts.get(name, "none") for facts in told)] for name in names]
        lines += ["", text_table.plain(columns, rows, width).rstrip()]
    lines += ["", link] if link else []
    return "\n".join(lines)
