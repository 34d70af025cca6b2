"""How mkdocstrings reads our sources. Part of the build, not of the site."""

import ast
import re
from typing import Any

import griffe


class HouseStyle(griffe.Extension):
    """What our packages and docstrings mean, where griffe would read something else."""

    def on_alias_instance(self, *, node: Any, alias: griffe.Alias, **kwargs: Any) -> None:
        """Take ``from x import Y as Y`` for public: our ``__all__`` is computed at import."""
        if isinstance(node, ast.ImportFrom):
            alias.public = any(name.name == name.asname == alias.name for name in node.names)

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Take a section called ``Example`` for what griffe calls ``Examples``: code."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
