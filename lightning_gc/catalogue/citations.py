"""Citations such as "Yu et al., 2018", read from the first reference of a docstring."""

from __future__ import annotations

import re
import textwrap

_SECTION = re.compile(r"^References?:\s*\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
# Authors, a title in quotes, and the first year behind it that is not part of a number.
_ENTRY = re.compile(r"(?P<authors>[^\"“”]*)[\"“][^\"“”]*[\"”](?P<venue>.*)", re.DOTALL)
_YEAR = re.compile(r"(?<![\d.:])(?:19|20)\d\d(?![\d.]*\d)")


def cited(docstring: str) -> str:
    r"""Return the authors of the first reference and its year, or "" where there is none.

    Args:
        docstring: without the common indentation, as ``inspect.getdoc`` returns it.

    Example:
        >>> cited('Send.\n\nReference:\n    Yu, Wu and Li, "On\n    Sending", ICML 2018.')
        'Yu et al., 2018'
    """
    section = _SECTION.search(docstring)
    if section is None:
        return ""
    text = " ".join(section[1].split())
    entry = _ENTRY.match(text)
    if entry is None:  # a book, a manual: what it says first
        return textwrap.shorten(re.split(r"[,.;:]\s", text)[0], 40, placeholder=" ...")
    year = _YEAR.search(re.split(r"[\"“]", entry["venue"])[0])
    names = _names(entry["authors"])
    return f"{names}, {year[0]}" if year else names


def _names(authors: str) -> str:
    """Shorten more than two names to the first one's "et al."."""
    authors = re.split(r"[:;]\s", authors.strip(" ,:.;"))[-1]
    if re.search(r"\bet al\b", authors):
        return re.split(r",?\s+et al\b", authors)[0].split(", ")[0] + " et al."
    names = [name for name in re.split(r",\s*(?:and\s+|&\s*)?|\s+and\s+|\s+&\s+", authors) if name]
    return " and ".join(names) if len(names) <= 2 else f"{names[0]} et al."
