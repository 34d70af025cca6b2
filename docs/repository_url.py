"""Write the repository's address from pyproject.toml into the files that cannot read it there.

    python docs/repository_url.py      # or: make url

Set ``Repository = "https://host/owner/name"`` in ``[project.urls]`` of pyproject.toml first. Then
README and Quickstart say how to install from it, CITATION.cff names it, and whoever opens an issue
gets a link to Troubleshooting. The site reads it in each build.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = {
    "README.md": (
        r"pip install '(?:\.\[fast\]|lightning-gc\[fast\] @ [^']*)'",
        "pip install 'lightning-gc[fast] @ git+{url}'",
    ),
    "docs/quickstart.md": (
        r"pip install (?:path/to/lightning_gc|'lightning-gc @ [^']*')  ",
        "pip install 'lightning-gc @ git+{url}'  ",
    ),
    "CITATION.cff": (
        r"license: Apache-2.0\n(?:repository-code: .*\n)?",
        "license: Apache-2.0\nrepository-code: {url}\n",
    ),
    ".github/ISSUE_TEMPLATE/config.yml": (
        r"blank_issues_enabled: true\n(?:contact_links:\n(?: .*\n)*)?",
        "blank_issues_enabled: true\ncontact_links:\n  - name: Troubleshooting\n"
        "    url: {url}/blob/main/docs/troubleshooting.md\n"
        "    about: Symptoms, causes and fixes\n",
    ),
}
"""File -> pattern of what depends on the address, and what to write instead."""


def changed(root: Path) -> dict[Path, str]:
    """Return the files without the address of ``root``'s pyproject.toml, as they should be.

    Raises:
        ValueError: a file has no place for it, or several.
    """
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"].get("urls", {})
    if "Repository" not in urls:
        return {}
    found = {}
    for name, (pattern, template) in PLACES.items():
        text = (root / name).read_text()
        new, times = re.subn(pattern, lambda _: template.format(url=urls["Repository"]), text)  # noqa: B023
        if times != 1:
            raise ValueError(f"{name} has {times} places for the repository's address, not one.")
        if new != text:
            found[root / name] = new
    return found


def main() -> None:
    """Write the files, and name them."""
    files = changed(ROOT)
    for path, text in files.items():
        path.write_text(text)
    names = ", ".join(str(path.relative_to(ROOT)) for path in files)
    sys.stdout.write(f"Written: {names or 'nothing'}\n")


if __name__ == "__main__":
    main()
