"""Makes ``mkdocs build -f path/mkdocs.yml`` the same from any folder. Part of the build.

And leaves out the lines for those who read a page unbuilt, as on GitHub: links to the files that
the build includes. They end in ``<!-- unbuilt -->``.
"""

import os
import re
from pathlib import Path
from typing import Any

UNBUILT = re.compile(r"^.*<!-- unbuilt -->\n\n?", re.M)


def on_config(config: Any) -> None:
    """Go to the folder of mkdocs.yml: mkdocstrings shows paths of sources from the current one."""
    os.chdir(Path(config.config_file_path).parent)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Return the page without the lines that stand for what is now included."""
    return UNBUILT.sub("", markdown)
