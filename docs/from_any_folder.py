"""Makes ``mkdocs build -f path/mkdocs.yml`` the same from any folder. Part of the build.

And leaves out the lines for those who read a page unbuilt, as on GitHub: links to the files that
the build includes. They end in ``<!-- unbuilt -->``.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

UNBUILT = re.compile(r"^.*<!-- unbuilt -->\n\n?", re.M)


@event_priority(100)  # plugins keep the path that they find
def on_config(config: Any) -> None:
    """Go to the folder of mkdocs.yml: mkdocstrings shows paths of sources from the current one."""
    # Made absolute first: mkdocs joins it later to the folder that includes are read from.
    config.config_file_path = str(Path(config.config_file_path).resolve())
    os.chdir(Path(config.config_file_path).parent)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Return the page without the lines that stand for what is now included."""
    return UNBUILT.sub("", markdown)
