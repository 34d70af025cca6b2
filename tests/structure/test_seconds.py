"""The recorded seconds of each file of tests stay below a ceiling. ``make seconds`` writes them."""

from tests.support.seconds import CEILING, ROOT, recorded


def test_no_file_takes_long() -> None:
    """Split it, start its processes once, or leave some cases to the night."""
    assert {file: cpu for file, (cpu, _) in recorded().items() if cpu > CEILING} == {}


def test_every_recorded_file_is_there() -> None:
    assert [file for file in recorded() if not (ROOT / file).exists()] == []
