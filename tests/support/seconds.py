"""Seconds of each file of tests: recorded in ``tests/seconds.json``, and the longest file first.

``make seconds`` writes the record again. A file that is not in it comes first.
"""

import functools
import json
import os
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests/seconds.json"
CEILING = 45.0
"""Most CPU seconds of a file; the processes that it starts count, too."""
Seconds = Mapping[str, tuple[float, float]]
"""File -> CPU seconds, seconds of the clock."""


def recorded() -> Seconds:
    """Return the record."""
    return {file: (cpu, clock) for file, (cpu, clock) in json.loads(RECORD.read_text()).items()}


def write(seconds: Seconds) -> None:
    """Replace the record."""
    lines = [
        f'"{file}": [{cpu:.1f}, {clock:.1f}]' for file, (cpu, clock) in sorted(seconds.items())
    ]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def cpu_seconds() -> float:
    """Return the seconds of this process, of its ended children, and of the fork server's."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    stat = Path(f"/proc/{server}/stat")
    ended = stat.read_text().rpartition(")")[2].split()[13:15] if stat.exists() else []
    return sum(os.times()[:4]) + sum(map(int, ended)) / os.sysconf("SC_CLK_TCK")


class Clock:
    """Plugin of a process that runs tests: adds up the seconds of each file."""

    def __init__(self) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        cpu, clock = cpu_seconds(), monotonic()
        result = yield
        file = item.nodeid.partition("::")[0]
        before = self.seconds.get(file, (0.0, 0.0))
        self.seconds[file] = (before[0] + cpu_seconds() - cpu, before[1] + monotonic() - clock)
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["seconds"] = self.seconds


class Report:
    """Plugin of the process that starts the others: names files above the ceiling."""

    def __init__(self, config: pytest.Config) -> None:
        self._records = config.getoption("record_seconds")
        self.seconds: dict[str, tuple[float, float]] = {}

    def pytest_testnodedown(self, node: WorkerController) -> None:
        self.seconds |= getattr(node, "workeroutput", {}).get("seconds", {})

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        total = sum(cpu for cpu, _ in self.seconds.values())
        terminalreporter.write_line(f"{total / 60:.1f} CPU minutes in tests")
        for file, (cpu, _) in self.seconds.items():
            if cpu > CEILING:
                terminalreporter.write_line(f"{file}: {cpu:.0f} CPU s, above {CEILING:.0f}")
        if self._records:
            write(self.seconds)


class TwoPools(LoadFileScheduling):  # type: ignore[misc]
    """Every second process takes files that start processes and wait, the others those that do not.

    Each begins with the longest file. Who finds none of its kind takes the other.
    """

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        self._known = recorded()

    def _assign_work_unit(self, node: WorkerController) -> None:
        waits = int(node.gateway.id.removeprefix("gw")) % 2 == 0
        longest = max(self.workqueue, key=lambda file: (_waits(file) == waits, self._clock(file)))
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)

    def _clock(self, file: str) -> float:
        return self._known.get(file, (0.0, float("inf")))[1]


@functools.cache
def _waits(file: str) -> bool:
    return "mark.processes" in (ROOT / file).read_text()
