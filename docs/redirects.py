"""Leads from old addresses to today's: from pages that are gone, and headings that have moved."""

import json
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

LIST = Path(__file__).with_name("moved.txt")
MOVED = dict(line.split() for line in LIST.read_text().splitlines())
"""Old address -> today's. The entry of a page that is gone also serves its other anchors."""


def places_of(old: str) -> dict[str, str]:
    """Return ``{anchor that the page had: today's address}``, relative to the page."""
    up = "../" * old.count("/")
    return {key[len(old) :]: up + new for key, new in MOVED.items() if key.split("#")[0] == old}


def page(old: str) -> str:
    """Return the HTML that sends a reader of a page that is gone to today's address."""
    places = places_of(old)
    script = f"const to = {json.dumps(places)}; location.replace(to[location.hash] ?? to['']);"
    return (
        f'<!doctype html><html lang="en"><title>Moved</title><script>{script}</script>'
        f'<meta http-equiv="refresh" content="1; url={places[""]}">'
        f'<p>This page has moved: <a href="{places[""]}">{places[""]}</a></p></html>\n'
    )


def script(url: str) -> str:
    """Return what a page that is there adds: it sends a reader of a moved heading after it."""
    places = places_of(url)
    if not places:
        return ""
    go = "const go = () => moved[location.hash] && location.replace(moved[location.hash]);"
    listen = "go(); addEventListener('hashchange', go);"
    return f"<script>{{ const moved = {json.dumps(places)}; {go} {listen} }}</script>"


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page for each address that is gone."""
    for old in sorted(key for key in MOVED if "#" not in key):
        files.append(File.generated(config, old, content=page(old)))
    return files


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Add the script to pages that are there."""
    return output.replace("</body>", f"{script(page.url)}</body>")
