"""lightning-gc check between real processes, and by night between network namespaces."""

import contextlib
import io
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lightning_gc
from lightning_gc import cli
from lightning_gc.advice.link_probe import directions
from lightning_gc.transports import Distributed
from tests.support.processes import ROOT, hold_port, run_in_processes

LINK = re.compile(r"Link: ([\d.]+) ([GM])bit/s .* a round trip takes ([\d.]+) ms")


def check(worker: int, port: int, versions: dict[str, str]) -> tuple[int, str]:
    """Be one of the machines; machine 1 may have other versions."""
    words = f"--nnodes 2 --node-rank {worker} --master-addr 127.0.0.1 --master-port {port}"
    if worker:
        lightning_gc.__version__ = versions.get("lightning_gc", lightning_gc.__version__)
        torch.__version__ = versions.get("torch", torch.__version__)  # type: ignore[assignment]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = cli.main(["check", *words.split()])
    return code, said.getvalue()


def checked(versions: dict[str, str]) -> list[Any]:
    with hold_port() as held:
        found: list[Any] = run_in_processes(check, 2, held.getsockname()[1], versions)
    return found


def test_two_equal_machines() -> None:
    (code, page), (other, said) = checked({})
    assert code == other == cli.OK, page + said
    assert "Start there:\n  lightning-gc check --nnodes 2 --node-rank 1 --master-addr" in page
    assert "Ready to train" in page
    assert LINK.search(page), page
    assert "Next: lightning-gc advise" in page
    names = ("host name", "Gloo announces", "wire format", "vector instructions", "numba")
    for name in (*names, "sends", "receives"):
        assert re.search(rf"^{name} ", page, re.MULTILINE), name
    assert "Checked. The page is in machine 0's output." in said
    assert "host name" not in said


def test_other_versions_are_found_on_all_machines() -> None:
    (code, page), (other, _) = checked({"lightning_gc": "0.1.0", "torch": "2.12.9"})
    assert code == other == cli.FAILED
    assert "2 problems to fix before training" in page
    found = " ".join(page.split())
    assert "Machine 1 has lightning_gc 0.1.0, but machine 0 has" in found
    assert "Machine 1 has torch 2.12.9, but machine 0 has" in found
    assert "install the same version on all." in found
    assert "Link:" not in page


by_night = [
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not hasattr(os, "geteuid")
        or os.geteuid() != 0
        or not all(map(shutil.which, ("ip", "tc", "torchrun"))),
        reason="makes network namespaces: needs Linux, root, iproute2 and torchrun on the path",
    ),
]
HOSTS = f"127.0.0.1 localhost\n127.0.1.1 {os.uname().nodename}\n"


def rates(worker: int) -> list[tuple[float, float]]:
    """Return what each worker's directions are, as one of several finds it on loopback."""
    dist.init_process_group("gloo", rank=worker, world_size=3)
    found = directions(Distributed(), torch.device("cpu"), 1.0)
    dist.destroy_process_group()
    return found


def test_three_workers_agree_on_the_rates_of_each() -> None:
    first, *others = run_in_processes(rates, 3)
    assert others == [first, first]
    assert len(first) == 3
    assert all(0 < rate < math.inf for both in first for rate in both)


@contextlib.contextmanager
def debian(mbit: float = 0.0, delay_ms: float = 0.0, down: float = 0.0) -> Iterator[list[str]]:
    """Yield two namespaces where the machine's name means 127.0.1.1."""
    sys.path.insert(0, str(ROOT / "benchmarks"))  # where scripts are run
    from namespaces import Link, network

    with network(2, Link(mbit, delay_ms, down_mbit=down)) as spaces, contextlib.ExitStack() as ends:
        for space in spaces:
            folder = Path("/etc/netns", space)
            folder.mkdir(parents=True)
            ends.callback(shutil.rmtree, folder)
            (folder / "hosts").write_text(HOSTS)
        yield spaces


def on_each(spaces: Sequence[str], command: str) -> list[tuple[int, str]]:
    """Run README's line in each namespace; return exit codes and output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("GLOO_SOCKET_IFNAME", None)
    running = []
    for number, space in enumerate(spaces):
        words = ["ip", "netns", "exec", space, *command.format(number).split()]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        running.append(subprocess.Popen(words, env=environment, **pipe))  # type: ignore[call-overload]
    ended = []
    try:
        for process in running:
            said, _ = process.communicate(timeout=200)
            ended.append((process.returncode, said))
    finally:
        for process in running:
            process.kill()
    return ended


CHECK = "lightning-gc check --nnodes 2 --node-rank {} --master-addr 10.77.0.1 --wait 20"
TRAIN = "torchrun --nnodes 2 --node-rank {} --master-addr 10.77.0.1 --nproc-per-node 1"
PROGRAM = """
from pytorch_lightning import Trainer
from pytorch_lightning.demos.boring_classes import BoringDataModule, DemoModel
from lightning_gc import QSGD, CompressedDDPStrategy
trainer = Trainer(strategy=CompressedDDPStrategy(QSGD(bits=4)), devices=1, num_nodes=2,
                  accelerator="cpu", max_steps=4, logger=False, enable_checkpointing=False)
trainer.fit(DemoModel(out_dim=64), BoringDataModule())
"""


class TestByNight:
    """Two machines whose names mean 127.0.1.1, as Debian and Ubuntu set them up."""

    pytestmark = by_night

    @pytest.mark.parametrize(("mbit", "delay"), [(100, 10), (10, 25), (1000, 0)])
    def test_rate_and_latency(self, mbit: int, delay: int) -> None:
        with debian(mbit, delay) as spaces:
            (code, page), (other, _) = on_each(spaces, CHECK)
        assert code == other == cli.OK, page
        rate, unit, trip = LINK.search(page).groups()  # type: ignore[union-attr]
        assert float(rate) * (1000 if unit == "G" else 1) == pytest.approx(mbit, rel=0.15)
        if delay:
            assert float(trip) == pytest.approx(2 * delay, rel=0.15)
        words = " ".join(page.split())
        assert "has the address 127.0.1.1, which other machines cannot reach." in words
        assert "Plain DDP needs `export GLOO_SOCKET_IFNAME=gc0`." in words

    def test_a_way_in_that_is_slower(self) -> None:
        with debian(200, down=20) as spaces:
            (code, page), (other, _) = on_each(spaces, CHECK)
        assert code == other == cli.OK, page
        rate, unit, _ = LINK.search(page).groups()  # type: ignore[union-attr]
        assert unit == "M"
        assert float(rate) == pytest.approx(20, rel=0.25)  # a port drops what waits too long

    def test_a_blocked_port(self) -> None:
        with debian() as spaces:
            route = f"ip -n {spaces[0]} route add blackhole 10.77.0.2/32"
            subprocess.run(route.split(), check=True)
            (code, _), (other, page) = on_each(spaces, CHECK)
        assert code == other == cli.FAILED
        words = " ".join(page.split())
        assert "10.77.0.2, gets no answer from port 29500 of machine 0, 10.77.0.1." in words

    def test_the_lines_of_the_readme_train(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(PROGRAM)
        with debian() as spaces:
            ends = on_each(spaces, f"{TRAIN} {tmp_path / 'train.py'}")
        for number, (code, said) in enumerate(ends):
            assert code == 0, said
            assert f"cannot reach. Gloo uses gc0 (10.77.0.{number + 1}), which leads to" in said

    def test_torchrun_starts_the_check(self) -> None:
        with debian() as spaces:
            (code, page), (other, _) = on_each(spaces, f"{TRAIN} -m lightning_gc check")
        assert code == other == 0, page
        assert LINK.search(page), page
