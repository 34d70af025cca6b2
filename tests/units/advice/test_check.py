"""lightning-gc check: a sentence with the fix for each finding, and one page."""

import argparse
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from lightning_gc import cli
from lightning_gc.advice import check, meeting
from lightning_gc.advice.check import Finding, findings, page
from lightning_gc.advice.link_probe import sustained
from lightning_gc.advice.meeting import Door, NotMet, Party, visit
from lightning_gc.controllers import ExchangeRecord
from lightning_gc.core import notices
from lightning_gc.kernels.dispatch import SWITCH
from lightning_gc.transports.interfaces import VARIABLE
from lightning_gc.transports.link import Link
from tests.support.kernel_device import switched
from tests.support.processes import hold_port

FACTS = {
    "host name": "a (10.0.0.1)",
    check.WAY: "10.0.0.1 (eth0)",
    check.ANNOUNCED: "10.0.0.1",
    "door": "10.0.0.1 4001",
    "machines": "2",
    "torch": "2.13.0",
    "lightning_gc": "0.2.0",
    "wire format": "5a1e7b8e",
    "numba": "0.61",
    "compiled kernels": "9 of 9",
}
REACHED = [{"1": "0.02"}, {"0": "0.02"}]


def told(**changed: str) -> list[dict[str, str]]:
    """Return the facts of two machines; some differ on machine 1."""
    return [FACTS, FACTS | {"door": "10.0.0.2 4002"} | changed]


def test_nothing_is_found_between_equal_machines() -> None:
    assert list(findings(told(), REACHED)) == []


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"lightning_gc": "0.1.0"}, "Machine 1 has lightning_gc 0.1.0, but machine 0 has 0.2.0."),
        ({"torch": "2.12.0"}, "Machine 1 has torch 2.12.0, but machine 0 has 2.13.0."),
        ({"wire format": "0"}, "Machine 1 has wire format 0, but machine 0 has 5a1e7b8e."),
        ({"machines": "3"}, "Machine 1 has machines 3, but machine 0 has 2."),
        ({check.WAY: "127.0.1.1"}, "Machine 1 takes 127.0.1.1, itself, for machine 0."),
    ],
)
def test_a_difference_that_stops_a_training(changed: dict[str, str], sentence: str) -> None:
    (found,) = findings(told(**changed), REACHED)
    assert found.stops
    assert found.text.startswith(sentence)


@pytest.mark.parametrize(
    ("changed", "sentences"),
    [
        ({"Python": "3.13.1", "host name": "b"}, []),
        (
            {"numba": "none"},
            ["Machine 1 has no numba", "Methods of low rank, such as PowerSGD: This method decode"],
        ),
        ({"compiled kernels": "0 of 9"}, []),
        (
            {SWITCH: "written"},
            [f"Machine 1 has {SWITCH}=written, which makes exchanges"],
        ),
        (
            {SWITCH: "torch", "GPU": "1 x T4"},
            [
                f"Machine 1 has {SWITCH}=torch",
                "Training on GPUs: They may differ in the last bit",
                "Methods of low rank, such as PowerSGD: This method decode",
            ],
        ),
        (
            {check.TROUBLE: "casts (OSError: full)"},
            ["Machine 1: numba's kernels of casts (OSError: full) do not run, and torch's operat"],
        ),
        (
            {check.OWN_NAME: "The name is 127.0.1.1.", check.ANNOUNCED: "10.0.0.2 (eth0)"},
            ["Machine 1: The name is 127.0.1.1. The strategies of lightning_gc do the same."],
        ),
    ],
)
def test_what_is_only_to_be_known(changed: dict[str, str], sentences: list[str]) -> None:
    found = list(findings(told(**changed), REACHED))
    assert not any(each.stops for each in found)
    assert len(found) == len(sentences)
    for each, sentence in zip(found, sentences, strict=True):
        assert each.text.startswith(sentence)


def test_the_note_about_a_name_names_the_interface() -> None:
    changed = {check.OWN_NAME: "The name is 127.0.1.1.", check.ANNOUNCED: "10.0.0.2 (eth0)"}
    (found,) = findings(told(**changed), REACHED)
    assert found.text.endswith(f"Plain DDP needs `export {VARIABLE}=eth0`.")


def test_machines_with_the_same_finding_share_its_line() -> None:
    facts = [FACTS, *[FACTS | {"numba": "none", "torch": "2.12.0"}] * 3]
    other, without, _ = (each.text for each in findings(facts, []))
    assert other.startswith("Machines 1, 2 and 3 have torch 2.12.0, but machine 0 has 2.13.0.")
    assert without.startswith("Machines 1, 2 and 3 have no numba")


@pytest.mark.parametrize(
    ("changed", "ends"),
    [
        ({check.WAY: "10.0.0.2 (eth0)"}, "allow all TCP ports from the other machines: each"),
        ({check.WAY: "10.1.1.2 (ib0)"}, "Machine 1 is at 10.1.1.2: there, run `export GLOO_SOCKET"),
        ({check.WAY: "10.1.1.2"}, "set GLOO_SOCKET_IFNAME to the interface that joins the machin"),
    ],
)
def test_a_port_that_is_not_reached(changed: dict[str, str], ends: str) -> None:
    (found,) = findings(told(**changed), [{"1": "no answer"}, {"0": "0.02"}])
    assert found.stops
    assert found.text.startswith(
        "Machine 0 does not reach port 4002 of machine 1 at 10.0.0.2 (no answer), the address that"
    )
    assert ends in found.text


def test_what_another_machine_tells_is_not_trusted() -> None:
    found = findings([FACTS, {check.WAY: "junk"}], [{"1": "nan"}, {}])
    assert [each.stops for each in found].count(True) >= 4
    assert meeting._facts(b"torch\t2\x1b[2J.0\nno tab\n\xff\t1") == {
        "torch": "2[2J.0",
        "no tab": "",
        "\ufffd": "1",
    }
    assert len(meeting._facts(b"host name\t" + b"h" * 200_000)["host name"]) < 400
    for place in ("", "127.0.0.1", "127.0.0.1 x", "127.0.0.1 99999", "no-one.invalid 80"):
        assert not check._is_number(visit(place, "token"))


def test_findings_are_first_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = page([Finding("To know.", stops=False), Finding("To fix. " * 20)], told(), "Link: x.")
    lines = text.splitlines()
    assert lines[0] == "1 problem to fix before training, 1 note."
    assert lines[1].startswith("STOP  To fix.")
    assert lines[2].startswith("      ")
    assert text.index("STOP") < text.index("note  To know.") < text.index("host name")
    assert lines[-1] == "Link: x."
    assert max(map(len, lines)) <= 80
    assert page([], []) == "Ready to train."
    assert page([Finding("", stops=False)] * 4, []).startswith("Ready to train, 4 notes.")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nnodes", "2"], "--nnodes needs also --master-addr and --node-rank"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "h"], "--node-rank 2: give 0 to 1"),
        (["--nnodes", "0", "--node-rank", "0", "--master-addr", "h"], "--nnodes 0: give the num"),
        (["--wait", "0"], "--wait 0: give 1 second or more"),
        (
            ["--nnodes=2", "--node-rank=0", "--master-addr=h", "--master-port=70000"],
            "--master-port 70000: a port is a number from 1 to 65535",
        ),
        *(
            (["--nnodes=2", "--node-rank=0", *words], sentence)
            for words, sentence in (
                (["--master-addr=h:70000"], "--master-port 70000: a port is a number from 1"),
                (["--master-addr=h:http"], "--master-addr h:http: write an address, such as"),
                (["--master-addr=:29500"], "--master-addr :29500: write an address, such as"),
                (["--master-addr=h:1", "--master-port=2"], "--master-port 2 name two ports"),
            )
        ),
    ],
)
def test_invalid_requests(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", *words]) == cli.USAGE
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "port", "place"),
    [
        ("10.0.0.1", None, ("10.0.0.1", 29500)),
        ("10.0.0.1:29501", None, ("10.0.0.1", 29501)),
        ("host:29501", 29501, ("host", 29501)),
        ("fe80::1", 29501, ("fe80::1", 29501)),
        ("[fe80::1]", None, ("fe80::1", 29500)),
        ("[fe80::1]:29501", None, ("fe80::1", 29501)),
    ],
)
def test_the_address_may_have_a_port(address: str, port: int, place: tuple[str, int]) -> None:
    given = argparse.Namespace(
        nnodes=2, node_rank=1, master_addr=address, master_port=port, wait=60
    )
    found = meeting.party_of(given)
    assert found is not None
    assert (found.address, found.port) == place


def test_options_beside_torchrun_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert cli.main(["check", "--nnodes", "2"]) == cli.USAGE
    assert "--nnodes: torchrun has said it." in capsys.readouterr().err


def test_torchrun_has_said_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {"RANK": 6, "WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 4, "LOCAL_RANK": 2}
    given |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": "none"}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    nothing = argparse.Namespace(nnodes=None, node_rank=None, master_addr=None, wait=60)
    assert meeting.party_of(nothing) == Party(1, 2, "10.0.0.1", 29500, False, 60)
    assert check.check(meeting.party_of(nothing))  # the machine's first process speaks for it


def test_a_wrong_value_of_the_switch(capsys: pytest.CaptureFixture[str]) -> None:
    with switched("wirtten"):
        assert cli.main(["check"]) == cli.USAGE
    assert "did you mean 'written'?" in capsys.readouterr().err


@pytest.mark.slow
def test_one_machine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with switched("prepared"):
        assert cli.main(["check"]) == cli.OK
    said = capsys.readouterr().out
    assert said.startswith("Ready to train")
    assert re.search(rf"^{SWITCH} +prepared$", said, re.MULTILINE)
    assert f"This machine has {SWITCH}=prepared" in said
    assert "Only this machine was checked. Start one line on each of two machines:" in said
    assert said.count("lightning-gc check --nnodes 2 --node-rank") == 2


@contextmanager
def silent() -> Iterator[int]:
    """Yield a port that drops connections, as behind a firewall: its queue is full."""
    with socket.socket() as full, socket.socket() as first:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        first.connect(full.getsockname())
        yield full.getsockname()[1]


def party(port: int, number: int = 1, address: str = "127.0.0.1") -> Party:
    return Party(number, 2, address, port, number == 0, 1.0)


def problem(of: Party, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(meeting, "CONNECT", 0.5)
    with pytest.raises(NotMet) as raised:
        of.store(print)
    return str(raised.value)


def test_a_blocked_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with silent() as port:
        said = problem(party(port), monkeypatch)
        assert visit(f"127.0.0.1 {port}", "token") == "no answer"
    assert f"127.0.0.1, gets no answer from port {port} of machine 0, 127.0.0.1." in said
    assert f"On machine 0 open TCP port {port}" in said


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with hold_port() as held:
        port = held.getsockname()[1]
        said = problem(party(port), monkeypatch)
        assert visit(f"127.0.0.1 {port}", "token") == "Connection refused"
    assert said.startswith(f"Nothing listens at 127.0.0.1:{port}. Start there: lightning-gc check")
    assert f"--node-rank 0 --master-addr 127.0.0.1 --master-port {port}" in said


def test_another_program_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[tuple[Any, threading.Thread]] = []
    ended: list[int] = []
    monkeypatch.setattr("atexit.register", lambda *call: at_exit.append(call))
    monkeypatch.setattr("os._exit", ended.append)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = problem(party(port), monkeypatch)
        ((end, thread),) = at_exit
        end(thread)  # torch still waits in it: Python must not unwind it
        assert ended == [1]
    assert said.startswith("Another program than lightning-gc check answers at 127.0.0.1")
    thread.join(60)
    end(thread)
    assert ended == [1]


def test_a_taken_port_and_an_address_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        said = problem(party(port, number=0), monkeypatch)
    assert said.startswith(f"Port {port} of this machine is taken by another program.")
    said = problem(party(port, number=0, address="203.0.113.5"), monkeypatch)
    assert said.startswith("--master-addr 203.0.113.5 is not an address of this machine")
    for number in (0, 1):
        said = problem(party(port, number, "nobody.invalid"), monkeypatch)
        assert said.startswith("The name nobody.invalid is not known here.")


def test_two_machines_with_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with hold_port() as held:
        first = party(held.getsockname()[1], number=0)
        store = first.store(print)
        store.add("lightning_gc check/number 1", 1)
        with pytest.raises(NotMet, match="Another machine has --node-rank 1 too"):
            check.together(party(first.port))


def test_a_machine_that_does_not_come() -> None:
    with hold_port() as held:
        first = party(held.getsockname()[1], number=0)
        with pytest.raises(NotMet, match=rf"Machine 1 has not come.* port {first.port} of machine"):
            first.gather(first.store(print), "place", {}, print)


def test_a_machine_that_stops_after_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotMet, match="Machine 1 has come, but does not go on"):
        Party(0, 2, "127.0.0.1", 29400, True, 0.0).gather(HashStore(), "facts", {}, print)


def test_a_machine_that_is_missing_is_named_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "CONNECT", 0.0)
    monkeypatch.setattr(notices, "AGAIN", 0.01)
    first, store = Party(0, 2, "127.0.0.1", 29400, True, 60.0), HashStore()
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            store.set("place/1", "host name\tb")

    assert first.gather(store, "place", {}, say)[1] == {"host name": "b"}
    assert all(line.startswith("Machine 1 has not come") for line in lines)


def test_an_interface_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "eth77")
    with pytest.raises(NotMet, match=rf"{VARIABLE}=eth77 is not an interface .* Choose from .*lo"):
        check.here(party(1))


def test_a_door_names_itself() -> None:
    door = Door("127.0.0.1")
    assert float(visit(door.place, door.token)) > 0
    assert visit(door.place, "0" * len(door.token)) == "another program answers"
    assert visit("no place", door.token)
    door.close()


@pytest.mark.parametrize("knee", [0.0, 131072.0])
def test_rate_between_large_requests(knee: float) -> None:
    link = Link(0.25, 10_000.0, knee)
    sizes: list[Any] = [8, 4096, 1 << 20, 1 << 21, 1 << 22]
    probes = [ExchangeRecord(1, size, link.seconds(1, size)) for size in sizes]
    assert sustained(probes) == pytest.approx(0.25)
    flat = [ExchangeRecord(1, size, 0.5) for size in sizes]
    assert sustained(flat) == pytest.approx(8e-9 * (1 << 22) / 0.5)
