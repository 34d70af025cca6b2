"""Every planted fault still fits the source; ``make faults`` shows at night that each is found."""

import ast
from pathlib import Path

import pytest

from tests.faults.fault import Fault, changed_files, load
from tests.faults.plant import ROOT

FAULTS = load()

MOST = 155
"""A fault quotes source word for word, so who changes that source edits the fault. Only falls."""


def test_they_are_few() -> None:
    assert 40 <= len(FAULTS) <= MOST


def defined(file: Path) -> set[str]:
    """Return the names of a file's test functions and classes."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_it_can_be_planted(fault: Fault) -> None:
    """Where code or tests have moved, make the same mistake in its new place."""
    changed = changed_files(fault, ROOT)
    assert all(text != (ROOT / file).read_text() for file, text in changed.items())
    for selection in fault.tests:
        file, _, test = selection.partition("::")
        name = test.partition("::")[0].partition("[")[0]
        assert not name or name in defined(ROOT / file), selection
        assert (ROOT / file).is_file(), selection
