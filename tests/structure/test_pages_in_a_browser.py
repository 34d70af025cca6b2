"""Every page of the documentation, opened in a real browser.

No errors, nothing off the screen, and pictures that can be read on light and on dark pages.

Needs mkdocs (the extra ``docs``), playwright (``browser``) and a chromium that the machine has.
"""

import functools
import importlib.util
import io
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

ROOT = Path(__file__).parents[2]
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
QUIET = [
    "no-sandbox",
    "disable-gpu",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
]

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not CHROMIUM, reason="no chromium on this machine: install one"),
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None,
        reason="no playwright: pip install 'lightning-gc[browser]'",
    ),
]

OFF_SCREEN = """() => {
  const wide = (part) => part.scrollWidth > part.clientWidth + 1;
  const found = [];
  if (wide(document.documentElement)) found.push("the page is wider than the screen");
  // Lines of code may be scrolled, on a telephone and in the source that is unfolded.
  const code = window.innerWidth < 1000 ? [] : document.querySelectorAll(".md-content pre > code");
  const shown = [...code].filter((part) => !part.closest("details, .doc-contents"));
  for (const part of [...document.querySelectorAll(".md-typeset__scrollwrap"), ...shown])
    if (wide(part)) found.push("off the screen: " + part.textContent.trim().slice(0, 60));
  return found;
}"""

LEAST_PIXELS = 9
LEAST_CONTRAST = 4.5  # of text, as WCAG 2 demands
# Chromium reads a file once, so that currentSrc has the fragment of the first image with the file.
ADDRESS = "(image) => image.currentSrc.split('#')[0] + new URL(image.src).hash"
BACKGROUND = "() => getComputedStyle(document.body).backgroundColor"
TEXTS = """() => {
  const width = document.documentElement.viewBox?.baseVal.width;
  return [...document.querySelectorAll("text")].map((part) => {
    const style = getComputedStyle(part);
    return [part.textContent, style.fill, parseFloat(style.fontSize) / width];
  });
}"""
"""Of an SVG: each text, its colour, and its height as a share of the picture's width."""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built by a command in another folder."""
    folder = tmp_path_factory.mktemp("elsewhere")
    command = ["build", "--strict", "--quiet", "-f", str(ROOT / "mkdocs.yml"), "-d"]
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *command, str(folder / "site")],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tool:
        arguments = [f"--{flag}" for flag in QUIET]
        started = tool.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield started
        started.close()


def luminance(colours: Any) -> Any:
    """Return the relative luminance of colours with channels in [0, 1], as WCAG defines it."""
    channels = np.asarray(colours, dtype=float)[..., :3]
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def contrast(one: Any, other: Any) -> Any:
    high, low = np.maximum(one, other), np.minimum(one, other)
    return (high + 0.05) / (low + 0.05)


def parsed(colour: str) -> Any:
    """Return the luminance of a colour such as ``rgb(1, 2, 3)``."""
    return luminance([float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]])


def unreadable(tab: Any, svg: Any) -> list[str]:
    """Return what cannot be read in the pictures of a page, with a second tab to open SVGs in."""
    found, page = [], parsed(tab.evaluate(BACKGROUND))
    for picture in tab.locator("article img:visible").all():
        address = picture.evaluate(ADDRESS)
        name = address.rpartition("/")[2][:60]
        pixels = contrast(luminance(imread(io.BytesIO(picture.screenshot()))), page)
        if np.median(pixels) > 3:
            found.append(f"a rectangle that does not suit the page: {name}")
        if "svg" not in name:
            continue
        svg.goto(address)
        texts = svg.evaluate(TEXTS)
        if not texts:
            found.append(f"a picture without text that can be measured: {name}")
        width = picture.evaluate("(image) => image.clientWidth")
        for text, colour, height in texts:
            if height * width < LEAST_PIXELS:
                found.append(f"small text: {text!r} has {height * width:.1f} pixels: {name}")
            if contrast(parsed(colour), page) < LEAST_CONTRAST:
                found.append(f"faint text: {text!r} is {colour}: {name}")
    return found


def faults(browser: Any, address: str, pages: list[str], **settings: Any) -> dict[str, list[str]]:
    """Open the pages; return what is wrong with each with which something is."""
    context = browser.new_context(**settings)
    tab, svg, errors = context.new_page(), context.new_page(), []
    tab.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    tab.on("pageerror", lambda error: errors.append(str(error)))

    def fail(request: Any) -> None:
        if "ABORTED" not in str(request.failure):  # by going on to the next page
            errors.append(f"not loaded: {request.url}, {request.failure}")

    def see(request: Any) -> None:
        if not request.url.startswith((address, "data:", "blob:")):
            errors.append(f"from elsewhere: {request.url}")

    tab.on("request", see)
    tab.on("requestfailed", fail)
    found = {}
    for page in pages:
        errors.clear()
        tab.goto(address + page, wait_until="networkidle")
        wrong = [*errors, *tab.evaluate(OFF_SCREEN), *unreadable(tab, svg)]
        if wrong:
            found[page] = wrong
    context.close()
    return found


def names(site: Path) -> list[str]:
    """Return the addresses of pages, without old addresses that lead to them."""
    pages = (p for p in site.rglob("*.html") if 'http-equiv="refresh"' not in p.read_text())
    return sorted(str(path.relative_to(site)) for path in pages)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages(browser: Any, address: str, site: Path, width: int, scheme: str) -> None:
    pages = names(site)
    assert {"index.html", "choosing-a-compressor.html", "api/strategy.html"} <= set(pages)
    screen = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    assert faults(browser, address, pages, **screen) == {}


def test_compressors_are_sorted_by_a_click(browser: Any, address: str) -> None:
    tab = browser.new_page()
    tab.goto(address + "catalogue-tables.html", wait_until="networkidle")
    table = tab.locator(".sortable table").first
    table.locator("th", has_text="bits").click()
    column = table.locator("th").all_text_contents().index("bits")
    cells = table.locator(f"tbody td:nth-child({column + 1})").all_text_contents()
    assert len(cells) > 30
    assert [float(cell) for cell in cells] == sorted(float(cell) for cell in cells)


def test_lists_beside_pages_of_the_api_name_classes(browser: Any, address: str) -> None:
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.goto(address + "api/base-classes.html", wait_until="networkidle")
    shown = tab.locator(".md-nav--secondary a.md-nav__link:visible").all_text_contents()
    shown = [text.strip() for text in shown]
    assert {"Compressor", "Traits", "Bucket"} <= set(shown)
    assert not {"encode", "bound", "values", "pack"} & set(shown)


def test_paths_of_sources_begin_at_the_repository(site: Path) -> None:
    text = (site / "api" / "network.html").read_text()
    assert set(re.findall(r"Source code in <code>([^<]*)", text)) == {
        "lightning_gc/transports/network_model.py"
    }


def image(markup: str) -> str:
    """Return an <img> with an SVG of 100 by 100 units."""
    svg = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 100 100'>{markup}</svg>"
    return f'<article><img width="300" src="data:image/svg+xml,{svg}"></article>'


PLANTED = {
    "a line that is too wide": ("<p style='width: 2000px'>x</p>", "the page is wider"),
    "a table that is too wide": (
        "<div class='md-typeset__scrollwrap' style='overflow-x: auto'>"
        "<div style='width: 3000px'>columns</div></div>",
        "off the screen: columns",
    ),
    "an error": ("<script>console.error('planted')</script>", "planted"),
    "an exception": ("<script>planted()</script>", "planted is not defined"),
    "a missing image": ("<img src='none.png'>", "404"),
    "a picture on white": (
        image("<rect width='100' height='100' fill='white'/><text fill='white' y='50'>x</text>"),
        "a rectangle that does not suit the page",
    ),
    "black text in a picture": (image("<text y='50'>x</text>"), "faint text: 'x'"),
    "small text in a picture": (
        image("<text y='50' fill='white' font-size='2.9'>x</text>"),
        "small text: 'x' has 8.7 pixels",
    ),
    "text as curves": (image("<path d='M0 0L9 9' stroke='white'/>"), "can be measured"),
    "a file from elsewhere": ("<img src='http://127.0.0.1:9/x.png'>", "from elsewhere"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_finds_what_is_planted(browser: Any, address: str, site: Path, what: str) -> None:
    markup, said = PLANTED[what]
    whole = (site / "advise.html").read_text()
    before, heading, rest = whole.partition("<h1")
    assert heading
    (site / "planted.html").write_text(f"{before}{markup}{heading}{rest}")
    try:
        screen = {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"}
        found = faults(browser, address, ["planted.html"], **screen)
    finally:
        (site / "planted.html").unlink()
    assert any(said in line for line in found["planted.html"]), found
