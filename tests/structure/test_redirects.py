"""Old addresses of the documentation lead to pages and headings that exist."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
HEADING = re.compile(r"^#+ (.*?)(?: \{#([\w-]+)\})?$", re.M)
FENCED = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)

pytest.importorskip("mkdocs")
slugify = pytest.importorskip("markdown.extensions.toc").slugify


@pytest.fixture(scope="module")
def redirects() -> ModuleType:
    spec = importlib.util.spec_from_file_location("redirects", DOCS / "redirects.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = HEADING.findall(FENCED.sub("", page.read_text()))
    return {given or slugify(text.replace("`", ""), "-") for text, given in headings}


def test_old_addresses_lead_to_pages_and_anchors(redirects: Any) -> None:
    wrong = []
    for old, new in redirects.MOVED.items():
        path, _, anchor = new.partition("#")
        page = DOCS / path.replace(".html", ".md")
        if not page.exists() or (anchor and anchor not in anchors(page)):
            wrong.append((old, new))
    assert wrong == []


def test_what_has_moved_is_not_where_it_was(redirects: Any) -> None:
    """Pages that are gone have an entry for all their other anchors."""
    wrong = []
    for old in redirects.MOVED:
        path, _, anchor = old.partition("#")
        page = DOCS / path.replace(".html", ".md")
        if page.exists():
            wrong += [old] if not anchor or anchor in anchors(page) else []
        elif path not in redirects.MOVED:
            wrong.append(old)
    assert wrong == []


def test_a_page_that_is_there_sends_readers_of_moved_headings_after_them(redirects: Any) -> None:
    moved = redirects.MOVED["local-steps.html#elastic-runs"]
    assert f'"#elastic-runs": "{moved}"' in redirects.script("local-steps.html")
    assert redirects.script("index.html") == ""


def test_a_page_in_a_folder_leads_out_of_it(redirects: Any) -> None:
    text = redirects.page("tutorials/two-sites.html")
    assert 'href="../tutorials/slow-link.html#two-sites"' in text
    served = redirects.MOVED["adam.html#what-to-take"]
    assert f'"#what-to-take": "{served}"' in redirects.page("adam.html")
