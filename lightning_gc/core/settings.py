"""Check calls of public classes, and the fields of frozen configurations (Settings)."""

import ast
import dataclasses
import functools
import inspect
import math
import numbers
import re
import textwrap
import typing
from abc import ABCMeta
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from lightning_gc.core.refusal import refuse
from lightning_gc.core.registry import default_of, did_you_mean

_WHOLE = ("int", "int | None", int, int | None)
_NUMBERS = (*_WHOLE, "float", "float | None", float, float | None)
"""Annotations of the checked fields, as texts and as types."""

_SHARE = "density"
"""Field that is a share of elements, in every class: see "Words" in CONTRIBUTING."""


_EXAMPLES = {"compressor": "QSGD(4)"}
"""Argument -> a value with which one may begin."""

Taker = TypeVar("Taker", bound=Callable[..., Any])


class CheckedCalls(ABCMeta):
    """Metaclass: refuse a call with wrong arguments in a sentence.

    Python's ``TypeError`` names internal classes, and no argument that was meant. A call that binds
    costs nothing. A class may have ``elsewhere``: argument that people expect -> the end of the
    sentence that refuses it.

    Raises:
        ValueError: an unknown argument, one that is missing, too many, or 1 as a share of elements.
    """

    if not TYPE_CHECKING:  # type checkers are to read ``__init__``

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            """Make an instance."""
            if args and type(args[0]) is int and args[0] == 1 and next(iter(_takes(cls))) == _SHARE:
                raise ValueError(
                    f"{cls.__name__}(1): {_SHARE} is a share, and 1 sends every element. Write "
                    f"{cls.__name__}(0.01) for one percent, or {_SHARE}=1.0 for all."
                )
            try:
                return super().__call__(*args, **kwargs)
            except TypeError:
                wrong = _wrong_call(cls, args, kwargs)
                if not wrong:
                    raise
            raise ValueError(wrong)

        @property
        def __signature__(cls) -> inspect.Signature:
            return inspect.Signature(list(_takes(cls).values()))


def _takes(cls: type) -> dict[str, inspect.Parameter]:
    return parameters_of(cls.__init__)  # type: ignore[misc]


def _wrong_call(cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return what is wrong with the arguments of a call, or an empty text."""
    name = getattr(cls, "as_called", lambda: cls)().__name__
    takes = list(_takes(cls).values())
    open_ended = {each.kind for each in takes}
    named = [each for each in takes if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    in_order = [each.name for each in named if each.kind is not each.KEYWORD_ONLY]
    given = {*in_order[: len(args)], *kwargs}
    unknown = [each for each in kwargs if each not in {each.name for each in named}]
    if unknown and inspect.Parameter.VAR_KEYWORD not in open_ended:
        return unknown_argument(cls, unknown[0], [each.name for each in named])
    if len(args) > len(in_order) and inspect.Parameter.VAR_POSITIONAL not in open_ended:
        most = f"at most {len(in_order)}: {_listed(in_order)}" if in_order else "none"
        return f"{name} was given {len(args)} without a name; it takes {most}."
    twice = [each for each in in_order[: len(args)] if each in kwargs]
    if twice:
        return f"{name}({twice[0]}=...): the first arguments, without a name, give it already."
    missing = [e.name for e in named if e.default is e.empty and e.name not in given]
    if not missing:
        return ""
    words = [*(["..."] if given else []), *(f"{e}={_EXAMPLES.get(e, '...')}" for e in missing)]
    return f"{name} needs {_listed(missing)}; write {name}({', '.join(words)})."


def unknown_argument(cls: type, name: str, known: Collection[str], instead: str = "") -> str:
    """Return a sentence on an argument that a class does not take.

    Args:
        cls: that was called.
        name: of the argument.
        known: names of those that it takes.
        instead: what to write, if the caller knows; otherwise the class's own ``elsewhere``, or the
            closest name, or all names of a short list.
    """
    said = f"{cls.__name__}({name}=...): unknown argument"
    instead = instead or getattr(cls, "elsewhere", {}).get(name, "") or did_you_mean(name, known)
    if not instead and len(known) <= 5:
        instead = f"; it takes {_listed(list(known)) or 'none'}"
    return f"{said}{instead}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def takes_fields(*settings: type, but: Collection[str] = ()) -> Callable[[Taker], Taker]:
    """Let a class or function with ``**keywords`` take the fields of frozen values too.

    The fields are declared and documented once. ``parted`` takes them out of the keywords. The
    signature and the docstring have them, for ``help`` and our sentences. For type checkers a
    ``TypedDict`` of the keywords names them, as in ``**given: Unpack[RoundFields]``.

    LightningCLI reads the signature of a method. It refuses one whose default is an object and not
    in the source, so such a field is also an argument of a base's ``__init__``.

    Args:
        settings: the values' classes.
        but: names of fields that are not taken.
    """

    def taking(taker: Taker) -> Taker:
        function: Any = taker.__init__ if isinstance(taker, type) else taker  # type: ignore[misc]
        function.takes, signature = (settings, but), inspect.signature(function)
        *parameters, keywords = _taken(function, but_objects=True)
        # LightningCLI takes a TypedDict's names, and does not look where other keywords go.
        keywords = keywords.replace(annotation=Any)
        function.__signature__ = signature.replace(parameters=[*parameters, keywords])
        taker.__doc__ = _described(taker.__doc__ or "", settings, but)
        return taker

    return taking


def _taken(function: Any, but_objects: bool = False) -> list[inspect.Parameter]:
    """Return a function's parameters, and the fields that it takes besides."""
    named = list(inspect.signature(function).parameters.values())
    settings, but = getattr(function, "takes", ((), ()))
    left = {each.name for each in named} | {*but}
    for cls in settings:
        types, keywords = typing.get_type_hints(cls), named.pop()
        named += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=types[field.name],
            )
            for field in dataclasses.fields(cls)
            if field.repr and field.name not in left  # a hidden field is no argument
            if not (but_objects and dataclasses.is_dataclass(field.default))
        ]
        named.append(keywords)
    return named


def _described(doc: str, settings: Sequence[type], but: Collection[str]) -> str:
    """Return a docstring with the arguments of ``settings`` first, except those that it has."""
    before, heading, after = inspect.cleandoc(doc).partition("\nArgs:\n")
    own, gap, rest = after.partition("\n\n")
    left = {*but, *_entries(own)}
    for cls in reversed(settings):
        described = inspect.cleandoc(cls.__doc__ or "").partition("\nArgs:\n")[2]
        left |= {field.name for field in dataclasses.fields(cls) if not field.repr}
        entries = _entries(described.partition("\n\n")[0]).items()
        own = "\n".join([*(text for name, text in entries if name not in left), own])
    return f"{before}{heading}{own}{gap}{rest}"


def _entries(arguments: str) -> dict[str, str]:
    """Return the descriptions of arguments by their names."""
    lines = re.split(r"\n(?=    \w+: )", arguments)
    return {line.strip().partition(":")[0]: line for line in lines}


def parted(keywords: Mapping[str, object], *settings: type) -> list[dict[str, Any]]:
    """Return the keywords that are fields of each of ``settings``, and the others at last."""
    left = dict(keywords)
    names = [
        [f.name for f in dataclasses.fields(cls) if f.repr and f.name in keywords]
        for cls in settings  # a hidden field is no argument
    ]
    return [*({name: left.pop(name) for name in each} for each in names), left]


def parameters_of(method: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return a method's parameters without ``self``, and the fields that it takes besides."""
    return {each.name: each for each in _taken(method)[1:]}


def left_out(method: Callable[..., Any]) -> Collection[str]:
    """Return names of fields that a method leaves out, though it takes the others."""
    but: Collection[str] = getattr(method, "takes", ((), ()))[1]
    return but


class _Limit(NamedTuple):
    """An interval of numbers, and the sentence that refuses others. ``Settings`` has examples."""

    opening: str
    low: str
    high: str
    closing: str
    what: str
    fix: str

    @classmethod
    @functools.cache
    def read(cls, said: str) -> "_Limit":
        found = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])(?: ([^;]+))?(?:; (.+))?", said)
        assert found, f"{said!r} is not a limit such as '(0, 1] the weight; 0.5'"
        return cls(*found.groups(""))

    def holds(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            return False
        low, high, number = float(self.low), float(self.high), float(value)
        above = low <= number if self.opening == "[" else low < number
        return above and (number <= high if self.closing == "]" else number < high)

    @property
    def rule(self) -> str:
        if self.high == "inf":
            return f"{self.low} or more" if self.opening == "[" else f"above {self.low}"
        return f"in {self.opening}{self.low}, {self.high}{self.closing}"

    def sentence(self, whole: bool, example: str) -> str:
        kind = f"{int(self.low):,}..{int(self.high):,}" if whole and self.high != "inf" else ""
        rule = f"a whole number in {kind}" if kind else self.rule
        return f"{self.what or 'it'} must be {rule}; use {self.fix or example}"


class Settings(metaclass=CheckedCalls):
    """Check numbers and choices of fields before the subclass's own checks.

    A subclass's ``__post_init__`` may compare fields. A text there would raise a ``TypeError`` that
    does not name the field. An ``int`` may be given as 2.0, but not as 2.5, infinity or NaN.

    A ``Literal`` says the choices. The name of a dtype may also be given as the ``torch.dtype``.

    ``str`` is what a user would write, ``repr`` all fields.

    Attributes:
        limits: field -> an interval, what the number is, and after a semicolon what to use instead.
            Both may be left out; the fix is then the default. The text of a ``Literal`` is the end
            of the sentence. A class adds its limits to those of its bases. A docstring without the
            section "Raises" gets one from limits and choices.

    Raises:
        ValueError: a text in a numeric field, a fraction in an ``int`` field, a number beyond its
            limits, or a word that is none of the choices.

    Example:
        >>> from dataclasses import dataclass
        >>> from lightning_gc.core import Settings
        >>> @dataclass(frozen=True)
        ... class Average(Settings):
        ...     decay: float = 0.9
        ...     limits = {"decay": "[0, 1) the weight of the old average; 0.9, or 0 for no average"}
        >>> Average(decay=1.0)  # doctest: +NORMALIZE_WHITESPACE
        Traceback (most recent call last):
        ValueError: Average(decay=1.0): the weight of the old average must be in [0, 1); use 0.9, or
        0 for no average.
    """

    limits: ClassVar[Mapping[str, str]]

    def __post_init__(self, *init_only: Any) -> None:
        check_fields(self, type(self).__name__)

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "Raises:" not in (
            described := inspect.cleandoc(cls.__dict__.get("__doc__") or "Raises:")
        ):
            cls.__doc__ = described + _raises(cls)
        own: Callable[..., None] | None = cls.__dict__.get("__post_init__")
        if own is None:
            return

        @functools.wraps(own)
        def check_first(self: Any, *init_only: Any) -> None:
            Settings.__post_init__(self)
            own(self, *init_only)

        cls.__post_init__ = check_first  # type: ignore[method-assign]

    def __str__(self) -> str:
        return short(self)

    def _as_written(self) -> "Settings":
        """Return what a user would have given for this."""
        return self

    @property
    def _main_field(self) -> str | None:
        """The field that is always shown, without its name; None: no field."""
        return None


def check_fields(settings: Any, owner: str) -> None:
    """Raise ValueError in the name of ``owner`` for a field that ``Settings`` would refuse."""
    cls: type = type(settings)
    limits = _limits(cls)
    for field in dataclasses.fields(settings):
        value, said, whole = (
            getattr(settings, field.name),
            limits.get(field.name),
            field.type in _WHOLE,
        )
        given, example = {field.name: value}, _example(field.default, whole)
        several = isinstance(value, Iterable) and not isinstance(value, str)
        if several and str(field.type).startswith("tuple["):
            object.__setattr__(settings, field.name, tuple(value))  # a list, from a file
        if isinstance(value, str) and field.type in _NUMBERS:
            why = f"{field.name} is a number; write {_number(value, example)}, without quotes"
            refuse(owner, why, **given)
        if whole and isinstance(value, float) and not value.is_integer():
            better = math.ceil(value) if 1 <= value < math.inf else example
            refuse(owner, f"{field.name} is a whole number; use {better}", **given)
        annotation: Any = field.type
        choices = _choices(annotation)
        if choices:
            # Many will pass a torch.dtype; YAML, hparams and repr can only hold a string.
            if (name := str(value).removeprefix("torch.")) in choices:
                object.__setattr__(settings, field.name, name)
            elif value not in choices:
                refuse(owner, said or f"use {_either(choices)}", **given)
        elif said and not (value is None and "None" in str(annotation)):
            limit = _Limit.read(said)
            if not limit.holds(value):
                refuse(owner, limit.sentence(whole, example), **given)


@functools.cache
def _limits(cls: type) -> Mapping[str, str]:
    said: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        said |= vars(base).get("limits", {})
    return said


@functools.cache
def _choices(annotation: Any) -> tuple[Any, ...]:
    """Return the choices of a ``Literal``, given as a type or as text; none of other types."""
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    said = isinstance(annotation, str) and re.fullmatch(r"Literal\[([^\[\]]+)\]", annotation)
    return ast.literal_eval(f"({said[1]},)") if said else ()


def _raises(cls: type) -> str:
    """Return the section of a docstring on what ``check_fields`` refuses of numbers and words."""
    fields = {name: each.type for name, each in getattr(cls, "__dataclass_fields__", {}).items()}
    limits, wrong = _limits(cls), []
    for name, annotation in {**fields, **inspect.get_annotations(cls)}.items():
        if choices := _choices(annotation):
            wrong.append(f"``{name}`` is not {_either(choices)}")
        elif name in limits:
            limit = _Limit.read(limits[name])
            wrong.append(f"``{name}`` is not {limit.rule}")
    said = textwrap.fill(f"ValueError: {'; '.join(wrong)}.", 96, subsequent_indent="    ")
    return f"\n\nRaises:\n{textwrap.indent(said, '    ')}" if wrong else ""


def _either(choices: Sequence[Any]) -> str:
    """Return choices as a sentence has them: ``'a', 'b' or 'c'``."""
    *others, last = map(repr, choices)
    return " or ".join(filter(None, (", ".join(others), last)))


def short(value: Any) -> str:
    """Return an instance as one would write it: without wrappers and settings that are default.

    Example:
        >>> from lightning_gc import QSGD, PerParameter, Quantised, SizeSwitch, TopK
        >>> short(PerParameter(SizeSwitch(TopK(0.05)))), short(PerParameter(TopK(0.05)))
        ('TopK(0.05)', 'PerParameter(TopK(0.05))')
        >>> short(Quantised(TopK(0.05, selection="sampled"), QSGD(4)))
        "Quantised(TopK(0.05, selection='sampled'), QSGD(4))"
    """
    main = None
    if isinstance(value, Settings):
        value = value._as_written()
        main = value._main_field
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    fields = [field for field in dataclasses.fields(value) if field.init]
    words, in_order = [], True
    for field in fields:
        own = getattr(value, field.name)
        parts = dataclasses.is_dataclass(own)
        if not parts and field.name != main and (own == default_of(field) or not field.repr):
            in_order = False
            continue
        in_order = in_order and (parts or field.name == main or len(fields) == 1)
        words.append(short(own) if in_order else f"{field.name}={short(own)}")
    return f"{type(value).__name__}({', '.join(words)})"


def _example(default: Any, whole: bool) -> str:
    """Return a field's default as text, or a typical number if it has no default."""
    known = default is not None and default is not dataclasses.MISSING
    return repr(default) if known else "1" if whole else "0.01"


def _number(text: str, example: str) -> str:
    """Parse a number from a text, such as 0.01 from "1%"; return the example if that fails."""
    share = text.strip().endswith("%")
    try:
        value = float(text.strip().rstrip("%"))
    except ValueError:
        return example
    return f"{value / 100 if share else value:g}"
