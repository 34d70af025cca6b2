"""Says on the site which version it is of, when each page was changed, and where to edit it.

The address of the repository comes from ``[project.urls]`` in pyproject.toml. Without one the site
has no links to edit a page.
"""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def on_config(config: Any) -> None:
    """Take the version from the package, and addresses from pyproject.toml."""
    (version,) = re.findall(
        r'__version__ = "(.*)"', (ROOT / "lightning_gc/__init__.py").read_text()
    )
    config.copyright = f"lightning_gc {version} · Apache-2.0"
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    if "Repository" in urls:
        config.repo_url = urls["Repository"]
        config.repo_name = urls["Repository"].partition("://")[2].partition("/")[2]
        config.edit_uri = "edit/main/docs/"
        config.theme["features"].append("content.action.edit")
    config.site_url = urls.get("Documentation", config.site_url)


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> None:
    """Show the day of the page's last commit, where the theme shows it."""
    if page.file.src_uri and not page.file.generated_by:
        day = last_change(Path("docs", page.file.src_uri))
        if day:
            page.meta["git_revision_date_localized"] = day


def last_change(path: Path) -> str:
    """Return the day of a file's last commit as 2026-11-28; "" outside a repository."""
    command = ["git", "log", "-1", "--format=%cs", "--", str(path)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except OSError:  # no git on this machine
        return ""
    return done.stdout.strip()
