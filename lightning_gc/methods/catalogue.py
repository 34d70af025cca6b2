"""List the catalogue: compressors, memories, schemes, controllers, waits and wire formats."""

import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lightning_gc import controllers
from lightning_gc.compressors import COMPRESSORS, Codec, Collective, Compressor, base
from lightning_gc.compressors.sparsifiers.sparse_codec import SparseCodec
from lightning_gc.controllers import Controller
from lightning_gc.core import Choice, Field, Range
from lightning_gc.core.combinations import RULES, shown
from lightning_gc.core.registry import path_of, required_fields, subclasses
from lightning_gc.engine.compatibility import combine, waits_of_step
from lightning_gc.kernels import dispatch
from lightning_gc.memories import MEMORIES, Memory
from lightning_gc.methods import text_table
from lightning_gc.methods.method import declared
from lightning_gc.schemes import SCHEMES, Scheme
from lightning_gc.testing import Lockstep

SIDE = 512
"""Rows and columns of the matrix for which bounds and bits per element are given."""
NUMEL = 1_000_000
"""Elements of the tensor for which wire formats are given."""
WORKERS = 8
"""Workers in the step for which waits are counted."""
SPREAD = 0.004
"""Standard deviation of measured elements, normal: 1.2 % of them reach a threshold of 0.01."""


@dataclasses.dataclass(frozen=True)
class CatalogueEntry:
    """Describe one class in the catalogue.

    Attributes:
        name: the registered name.
        cls: the class.
        cells: ``{heading: text}``; newlines in the text may be replaced by spaces.
    """

    name: str
    cls: type[Any]
    cells: Mapping[str, str]

    @property
    def what(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.cls) or "").partition("\n")[0]


def compressor_entry(name: str, cls: type[Compressor]) -> CatalogueEntry:
    """Return a compressor's entry: declarations and bits per element of its default instance."""
    compressor = cls()
    _, memory, scheme = combine(compressor)
    kind = filter(None, [compressor.traits.kind, ", ".join(properties(compressor))])
    cells = {
        "kind": ",\n".join(kind),
        "bits": f"{wire_bits(compressor):.3g}",
        "error bound": bound(compressor, SIDE**2),
        "knob": "none" if compressor.knob is None else _knob(compressor.knob),
        "tuned": ",\n".join(map(_range, declared(cls))),
        "memory": written(memory),
        "scheme": "its own rounds" if scheme is None else written(scheme),
        "reference": cited(inspect.getdoc(cls) or ""),
    }
    return CatalogueEntry(name, cls, cells)


def properties(compressor: Compressor) -> list[str]:
    """Return a compressor's properties in words."""
    traits, method = compressor.traits, compressor.method
    found = {
        "linear": traits.linear,
        "own rounds": isinstance(method, Collective),
        "unbiased": traits.unbiased,
        "ragged": any(field.varies == "worker" for field in compressor.wire(SIDE**2)),
        "selects": isinstance(method, SparseCodec),
        "no mean": not traits.conserves,
    }
    return [name for name, holds in found.items() if holds]


@functools.cache
def wire_bits(compressor: Compressor) -> float:
    """Return the payload's bits per element of a matrix: declared, or measured if they vary."""
    wire = compressor.wire(SIDE**2)
    if isinstance(compressor.method, Codec) and all(field.varies == "no" for field in wire):
        return 8 * sum(field.nbytes for field in wire) / SIDE**2
    drawn = torch.randn(
        (SIDE, SIDE), generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    )
    alone = Lockstep(1, compressor)
    with dispatch.host.counting():
        alone.step([{"weight": SPREAD * drawn}])
    tally = alone.engines[0].tally
    # Codecs do not count elements that are sent dense.
    return 8 * tally.payload_bytes / drawn.numel() if tally.elements else 32.0


def bound(compressor: Compressor, numel: int) -> str:
    """Return the bound on the compression error in a few words."""
    found = compressor.bound(numel)
    if compressor.traits.exact or found == base.Contraction(1.0):
        return "no error"
    if isinstance(found, base.Contraction):
        text = f"{found.delta:.3g}" if found.delta <= 0.99 else f"1 − {1 - found.delta:.3g}"
        return f"contraction\nδ = {text}"
    if isinstance(found, base.Variance):
        return f"variance\nω = {found.omega:.3g}"
    if isinstance(found, base.Multiple):
        return f"‖error‖² ≤\n{found.omega:.3g}·‖x‖²"
    if isinstance(found, base.AbsoluteError):
        other = compressor.bound(4 * numel)
        if isinstance(other, base.AbsoluteError) and abs(other.v - 2 * found.v) <= 1e-6 * found.v:
            return f"‖error‖ ≤\n{found.v / numel**0.5:.3g}·√d"
        return f"‖error‖ ≤\n{found.v:.3g}"
    assert isinstance(found, base.Unbounded), found
    return "none"


def written(instance: Any) -> str:
    """Return the call that makes a frozen configuration; omit fields at their defaults."""
    cls, needed = type(instance), required_fields(type(instance))
    given = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    plain = cls(**{name: given[name] for name in needed})
    shown = [n for n, value in given.items() if n in needed or value != getattr(plain, n)]
    return f"{cls.__name__}({', '.join(f'{name}={given[name]!r}' for name in shown)})"


def memory_entry(name: str, cls: type[Memory]) -> CatalogueEntry:
    """Return the entry of a memory: the laws that it keeps, and its bytes per parameter."""
    memory = cls()
    each = 4 if memory.stored is None else memory.stored.bytes_per_element
    cells = {
        "conserves": "yes" if memory.conserves else "no",
        "feeds back": "yes" if memory.feeds_back else "no",
        "bytes per parameter": f"{each * len(memory.buffers):.3g}",
        "fields": _fields(cls),
    }
    return CatalogueEntry(name, cls, cells)


def scheme_entry(name: str, cls: type[Scheme]) -> CatalogueEntry:
    """Return the entry of a scheme: the compressors that it accepts."""
    codecs = {name: c() for name, c in COMPRESSORS.items() if isinstance(c().method, Codec)}
    taken = sorted(name for name, codec in codecs.items() if _takes(cls(), codec))
    others = sorted(codecs.keys() - taken)
    takes = ", ".join(taken)
    if len(others) < len(taken):
        takes = f"all codecs but {', '.join(others)}" if others else "all codecs"
    return CatalogueEntry(name, cls, {"takes": takes, "fields": _fields(cls)})


def _takes(scheme: Scheme, compressor: Compressor) -> bool:
    try:
        scheme.check(compressor)
    except ValueError:
        return False
    return True


def wire_entry(name: str, cls: type[Compressor]) -> CatalogueEntry:
    """Return the wire format of the default instance for a tensor of ``NUMEL`` elements."""
    wire = cls().wire(NUMEL)
    varies = any(field.varies != "no" for field in wire)
    cells = {
        f"tensors for {NUMEL:,} elements": ";\n".join(map(_tensor, wire)),
        "bytes": f"{'≤ ' * varies}{sum(field.nbytes for field in wire):,}",
    }
    return CatalogueEntry(name, cls, cells)


def _tensor(field: Field) -> str:
    most = {"no": "", "step": "by step ≤ ", "worker": "≤ "}[field.varies]
    text = f"{field.name}: {most}{field.length:,} {str(field.dtype).removeprefix('torch.')}"
    return f"{text} ({field.note})" if field.note else text


def waits_entry(name: str, cls: type[Compressor]) -> CatalogueEntry:
    """Return the entry of waits: how often the default instance makes the host wait for a GPU."""
    compressor = cls()
    scheme = combine(compressor)[2]
    ragged = any(field.varies == "worker" for field in compressor.wire(NUMEL))
    cells = {
        "encoding a tensor": str(compressor.waits),
        "a message": "1" if ragged else "0",
        "default scheme": "its own rounds" if scheme is None else written(scheme),
        f"a tensor in a step of {WORKERS} workers": str(waits_of_step(compressor, scheme, WORKERS)),
    }
    return CatalogueEntry(name, cls, cells)


def _knob(knob: base.Knob) -> str:
    sends = "more" if knob.more == "bytes" else "less"
    return f"{knob.field}: {knob.low:g} to {knob.high:g},\nhigher sends {sends}"


def _range(entry: Range | Choice) -> str:
    if isinstance(entry, Choice):
        return f"{entry.field}: {', '.join(map(str, entry.values))}"
    return f"{entry.field}: {entry.low:g} to {entry.high:g}, {entry.scale}"


def _fields(cls: type[Any]) -> str:
    required = required_fields(cls)
    return ",\n".join(
        field.name if field.name in required else f"{field.name} = {field.default!r}"
        for field in dataclasses.fields(cls)
    )


def _entries(
    entry: Callable[[str, Any], CatalogueEntry], classes: Mapping[str, type]
) -> list[CatalogueEntry]:
    return [entry(*item) for item in sorted(classes.items())]


def _kind(entry: CatalogueEntry) -> str:
    return entry.cells["kind"].partition(",")[0]


FAMILIES: dict[str, Callable[[], list[CatalogueEntry]]] = {
    "compressors": lambda: sorted(_entries(compressor_entry, COMPRESSORS), key=_kind),
    "memories": lambda: _entries(memory_entry, MEMORIES),
    "schemes": lambda: _entries(scheme_entry, SCHEMES),
    "controllers": lambda: _entries(
        lambda name, cls: CatalogueEntry(name, cls, {"fields": _fields(cls)}),
        subclasses(vars(controllers), Controller),
    ),
    "waits": lambda: _entries(waits_entry, COMPRESSORS),
    "wire": lambda: _entries(wire_entry, COMPRESSORS),
}
"""``{family: function that returns its entries}``; some compressors are measured, in seconds."""


_SECTION = re.compile(r"^References?:\s*\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
# Authors, a title in quotes, and the first year after it that is not part of another number.
_ENTRY = re.compile(r"(?P<authors>[^\"“”]*)[\"“][^\"“”]*[\"”](?P<venue>.*)", re.DOTALL)
_YEAR = re.compile(r"(?<![\d.:])(?:19|20)\d\d(?![\d.]*\d)")


def cited(docstring: str) -> str:
    r"""Return the authors and year of the first reference, or "" without a reference.

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
    if entry is None:  # a book or a manual: its first words
        return textwrap.shorten(re.split(r"[,.;:]\s", text)[0], 40, placeholder=" ...")
    year = _YEAR.search(re.split(r"[\"“]", entry["venue"])[0])
    names = _names(entry["authors"])
    return f"{names}, {year[0]}" if year else names


def _names(authors: str) -> str:
    """Return up to two names, or the first name and "et al."."""
    authors = re.split(r"[:;]\s", authors.strip(" ,:.;"))[-1]
    if re.search(r"\bet al\b", authors):
        return re.split(r",?\s+et al\b", authors)[0].split(", ")[0] + " et al."
    names = [name for name in re.split(r",\s*(?:and\s+|&\s*)?|\s+and\s+|\s+&\s+", authors) if name]
    return " and ".join(names) if len(names) <= 2 else f"{names[0]} et al."


_FIGURES = ("waits", "wire")
"""Families without a column of descriptions, which the table of compressors has."""

_CODE = re.compile(r"(`+[^`]*`+)")


class Start(NamedTuple):
    """A row of the table that says what to begin with.

    Attributes:
        name: registered name of the compressor; "auto" or "local_steps" otherwise.
        want: what the user wants.
        code: what to write.
        sent: share of plain DDP's bytes, with two to four workers.
        tune: hyper-parameters to tune again.
    """

    name: str
    want: str
    code: str
    sent: str
    tune: str


_NOTHING, _RARELY, _RATE = "nothing", "rarely anything", "the learning rate"
_BETAS = f"{_RATE}; with Adam set `betas=(0.0, 0.999)`"
START = (
    Start(
        "auto",
        "it to choose, by your link",
        '`strategy="compressed_ddp_auto"`',
        "1 to 1/8 (2 to 1/4)",
        _NOTHING,
    ),
    Start("cast", "the safest choice", '`Cast("bfloat16")`', "1/2 (1)", _NOTHING),
    Start("qsgd", "a real gain with your hyper-parameters", "`QSGD(bits=4)`", "1/8 (1/4)", _RARELY),
    Start("topk", "the least traffic", "`TopK(0.01)`", "1/35 to 1/70 (1/17 to 1/35)", _BETAS),
    Start(
        "powersgd",
        "many workers, large matrices",
        "`PowerSGD(rank=2)`",
        "1/75 to 1/115 (1/37 to 1/57)",
        _BETAS,
    ),
    Start(
        "local_steps",
        "links between sites",
        "`LocalStepsStrategy(QSGD(bits=4), every=8)`",
        "1/60 (1/30)",
        _RATE,
    ),
)
"""The methods to begin with, as README, site, ``lightning-gc list`` and ``advise`` show them."""
_START_HEAD = ("you want", "begin with", "bytes sent, of 32 (16) bits", "tune again")


def start_text(width: int) -> str:
    """Return the table of ``START`` as text of at most ``width`` characters a line."""
    rows = [[cell.replace("`", "") for cell in row[1:]] for row in START]
    return text_table.plain(_START_HEAD, rows, width)


_COMBINATIONS_HEAD = ("where", "what does not go together")


def _combinations() -> list[tuple[str, str]]:
    return [(place, shown(sentence)) for place, rules in RULES.items() for sentence in rules]


def to_tune(compressor: type[Compressor]) -> str:
    """Return what to tune again with a compressor of ``START``, or "" for others."""
    found = (row.tune for row in START if COMPRESSORS.get(row.name) is compressor)
    return next(found, "").replace("`", "")


def needs_no_tuning(compressor: type[Compressor]) -> bool:
    """Return whether the table ``START`` has nothing to tune again with a compressor."""
    return to_tune(compressor) in (_NOTHING, _RARELY)


def plain(family: str, width: int, all_columns: bool = False) -> str:
    """Return one family as text of at most ``width`` characters a line.

    Args:
        family: "start", "combinations", or one of ``FAMILIES``.
        width: see ``text_table.plain``.
        all_columns: give each declaration its own column. Otherwise each class has one line; waits
            and wire formats, which have no description, are tables anyway.
    """
    if family == "start":
        return f"Start here\n\n{start_text(width)}"
    if family == "combinations":
        return f"Combinations\n\n{text_table.plain(_COMBINATIONS_HEAD, _combinations(), width)}"
    entries, table = FAMILIES[family](), []
    if not all_columns and family not in _FIGURES:
        return _lines(family, entries, width)
    for entry in entries:
        if all_columns:
            named = {"class": entry.cls.__name__, "name": entry.name}
            cells = {**named, **entry.cells, "what": entry.what}
        else:
            cells = {"class\nname": f"{entry.cls.__name__}\n{entry.name}", **entry.cells}
        table.append({heading: text.replace("``", "") for heading, text in cells.items()})
    lines = text_table.plain(list(table[0]), [list(cells.values()) for cells in table], width)
    return f"{family.capitalize()}\n\n{lines}\n"


def _lines(family: str, entries: Sequence[CatalogueEntry], width: int) -> str:
    """Return one line per class: its name, then what it does, cut at ``width``."""
    size = max(len(entry.name) for entry in entries)
    found = [family.capitalize()]
    for entry in entries:
        room = max(width - size - 4, 20)
        cut = textwrap.shorten(entry.what.replace("``", ""), room, placeholder=" ...")
        found.append(f"  {entry.name:{size}}  {cut}")
    return "\n".join([*found, ""])


def markdown(family: str) -> str:
    """Return one family as a Markdown table, with links that mkdocs-autorefs resolves.

    Related values share a cell, so that all columns fit on the screen.
    """
    if family == "start":
        return text_table.markdown(_START_HEAD, [row[1:] for row in START], _START_HEAD)
    if family == "combinations":
        rows = [(place, re.sub(r"<(\w+)>", r"*\1*", said)) for place, said in _combinations()]
        return text_table.markdown(_COMBINATIONS_HEAD, rows, _COMBINATIONS_HEAD)
    table = []
    for entry in FAMILIES[family]():
        cells = {heading: _on_page(text) for heading, text in entry.cells.items()}
        cells.pop("tuned", None)
        reference = cells.pop("reference", "")
        what = _on_page(entry.what) + (f" *{reference}*" if reference else "")
        if "scheme" in cells:
            cells["memory, scheme"] = f"{cells.pop('memory')},<br>{cells.pop('scheme')}"
        shown = {} if family in _FIGURES else {"what": what}
        link = f"[`{entry.cls.__name__}`][{path_of(entry.cls)}]<br>`{entry.name}`"
        table.append({"class, name": link, **shown, **cells})
    columns = list(table[0])
    left = set(columns) - {"bits", "bytes"}
    return text_table.markdown(columns, [list(cells.values()) for cells in table], left)


def _on_page(text: str) -> str:
    """Join lines, and escape bars outside code, which would begin the next cell."""
    pieces = _CODE.split(" ".join(text.split()))
    return "".join(p if _CODE.fullmatch(p) else p.replace("|", "&#124;") for p in pieces)
