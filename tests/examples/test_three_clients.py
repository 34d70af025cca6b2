"""The example of messages as bytes: three clients, and a line that damages some of them."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.examples import each_script


@pytest.mark.processes
@each_script
def test_a_server_averages_three_clients_and_refuses_damaged_messages(
    run: Any, tmp_path: Path
) -> None:
    done = run("three_clients", ("--rounds", 8), folder=tmp_path)
    assert done.code == 0, done.err
    *said, last = done.out.splitlines()
    assert said == ["client 2: The message's checksum is wrong: it was damaged on the way."] * 2
    before, after, times = map(
        float, re.findall(r"loss (\S+) before, (\S+) after.* (\S+) times", last)[0]
    )
    assert after < before / 2
    assert times > 10
