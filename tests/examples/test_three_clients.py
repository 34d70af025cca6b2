"""The example of messages as bytes: three clients, and a line that damages some of them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "three_clients.py"


@pytest.mark.processes
def test_a_server_averages_three_clients_and_refuses_damaged_messages() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--rounds", "8"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *said, last = done.stdout.splitlines()
    assert said == ["client 2: The message's checksum is wrong: it was damaged on the way."] * 2
    before, after, times = map(
        float, re.findall(r"loss (\S+) before, (\S+) after.* (\S+) times", last)[0]
    )
    assert after < before / 2
    assert times > 10
