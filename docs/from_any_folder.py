"""Makes ``mkdocs build -f path/mkdocs.yml`` the same from any folder. Part of the build."""

import os
from pathlib import Path
from typing import Any


def on_config(config: Any) -> None:
    """Go to the folder of mkdocs.yml: mkdocstrings shows paths of sources from the current one."""
    os.chdir(Path(config.config_file_path).parent)
