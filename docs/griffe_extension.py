"""How mkdocstrings reads our sources. Part of the build, not of the site."""

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import griffe

WIRE_TABLE = Path(__file__).parent / "tables" / "wire.md"
"""Wire formats of all compressors, read from ``wire(numel)`` by ``lightning-gc list wire``."""

_BETWEEN = re.compile(r"; (?=[^;:]+: )")
_LINK = re.compile(r"\[`(\w+)`\]\[lightning_gc\.compressors\.\1\]<br>`\w+`")


class HouseStyle(griffe.Extension):
    """What our packages and docstrings mean, where griffe would read something else."""

    def __init__(self) -> None:
        self._wire_formats = wire_formats(WIRE_TABLE.read_text()) if WIRE_TABLE.exists() else {}

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

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Complete docstrings that the classes themselves complete, or declare a part of.

        A configuration shows what ``Settings`` refuses, a compressor its error bound and wire
        format, also inherited ones. What takes the fields of a frozen value shows the fields.
        """
        for module in ("lightning", "attachment"):
            self._describe_fields(pkg.members.get(module))
        rooms = ("compressors", "memories", "schemes", "transports")
        modules = [pkg[room] for room in rooms if room in pkg.members]
        while modules:
            module = modules.pop()
            modules += module.modules.values()
            for cls in module.classes.values():
                if not cls.is_alias:
                    self._describe(cls)

    def _describe_fields(self, room: Any) -> None:
        for each in () if room is None else list(room.members.values()):
            if each.is_alias or each.is_attribute:
                continue
            if each.is_module:
                self._describe_fields(each)
            elif any("takes_fields" in str(decorator.value) for decorator in each.decorators):
                taker = getattr(importlib.import_module(each.module.path), each.name)
                each.docstring.value = taker.__doc__
                self.on_instance(obj=each)
                function = each.members["__init__"] if each.is_class else each
                given = function.parameters
                *known, rest = given
                del given[rest.name]
                for name, field in inspect.signature(taker).parameters.items():
                    if name not in {parameter.name for parameter in (*known, rest)}:
                        of_field: dict[str, Any] = {
                            "annotation": inspect.formatannotation(field.annotation),
                            "kind": griffe.ParameterKind.keyword_only,
                            "default": repr(field.default),
                        }
                        given.add(griffe.Parameter(name, **of_field))
                given.add(rest)

    def _describe(self, cls: griffe.Class) -> None:
        finished = any("dataclass" in str(decorator.value) for decorator in cls.decorators)
        if cls.docstring and finished:
            made = inspect.getdoc(getattr(importlib.import_module(cls.module.path), cls.name)) or ""
            if "\nRaises:\n" not in cls.docstring.value:
                cls.docstring.value += "".join(made.partition("\n\nRaises:\n")[1:])
            bound = cls.all_members.get("bound")
            if bound is not None and bound.docstring is not None:
                said = bound.docstring.value.removeprefix("Return ")
                cls.docstring.value += f"\n\n**Error bound**: {said}"
            cls.docstring.value += self._wire_formats.get(cls.name, "")


def wire_formats(table: str) -> dict[str, str]:
    """Return class -> Markdown, from a table with class, tensors and bytes in its columns."""
    heading, _, *rows = (line.strip("| ").split(" | ") for line in table.splitlines())
    found = {}
    for link, tensors, nbytes in rows:
        name = _LINK.fullmatch(link)
        if name is None:
            raise ValueError(f"{WIRE_TABLE}: {link} links to no compressor; run make docs-tables.")
        lines = [f"| {tensor} |" for tensor in _BETWEEN.split(tensors)]
        title = f"\n\n**Wire format** with default fields: {nbytes} bytes"
        found[name[1]] = "\n".join([title, "", f"| {heading[1]} |", "| --- |", *lines])
    return found
