"""Packing: compressed tensors as bytes, for whoever carries them: a file, a queue, a web server."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import numbers
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gc.compressors import COMPRESSORS, Collective, Compressor
from lightning_gc.compressors.wrappers.per_parameter import forget_plans, layerwise
from lightning_gc.core import Exchange, Flow, Gather, Mean, MeanShard, Request
from lightning_gc.core.combinations import judge
from lightning_gc.core.flow import Limits, resume, undisturbed
from lightning_gc.core.message import FORMAT, Message
from lightning_gc.core.refusal import refuse
from lightning_gc.core.registry import make
from lightning_gc.core.saved_state import TEXT, Record
from lightning_gc.engine import Engine
from lightning_gc.engine.compatibility import combine
from lightning_gc.engine.engine import ENGINE_STATE
from lightning_gc.memories import Memory

MAGIC = b"lgc\x01"
_FIXED = struct.Struct("<4sII")  # MAGIC, checksum of all that follows, length of the header
MOST_ELEMENTS = 1 << 28
"""Elements of all tensors that ``unpack`` makes, unless it is told otherwise: a gibibyte."""
_STATE = Record({"method": TEXT, **ENGINE_STATE})
_MOST_READ = 1 << 22
_read = 0  # bytes of headers, since caches of what they name were emptied


class Sender:
    """Keep one sender's errors, and the method's own state, from message to message.

    Args:
        compressor: an instance, or a name from the registry. It compresses each tensor separately.
        memory: the error feedback rule; the compressor's default if left out.
        seed: of the sender's random numbers. Give each sender another one: rounding errors of
            senders with equal seeds are equal too, and do not average out.

    Example:
        >>> import torch
        >>> from lightning_gc import TopK
        >>> sender = Sender(TopK(density=0.5))
        >>> data = sender.pack({"w": torch.tensor([4.0, 1.0])})
        >>> unpack(data, TopK(density=0.5))
        {'w': tensor([4., 0.])}
        >>> unpack(sender.pack({"w": torch.tensor([0.0, 1.0])}), TopK(density=0.5))
        {'w': tensor([0., 2.])}
    """

    def __init__(
        self, compressor: Compressor | str, memory: Memory | None = None, seed: int = 0
    ) -> None:
        if not _is_count(seed):
            refuse("Sender", "give a whole number from 0 to 2^62 - 1", seed=seed)
        engine = self._engine = _engine(compressor, memory, seed)
        judge("Sender", memory=engine.memory)
        default = combine(engine.compressor)[1]
        in_rounds = isinstance(engine.compressor.method, Collective)
        self._checks = in_rounds or engine.memory != default

    @property
    def method(self) -> str:
        """The compressor with all its settings, as messages name it."""
        return _named(self._engine.compressor)

    def pack(self, tensors: Mapping[str, Tensor]) -> bytes:
        """Return tensors and old errors as one message; what it does not carry is the new error.

        Args:
            tensors: by name, float32 on any device; they do not change. Names and shapes must be
                the same in all messages.

        Raises:
            ValueError: no tensors, another dtype, numbers that are not finite, or a message that
                nobody could read by itself. The errors are as before.
        """
        _check(tensors)
        if not self._checks:
            return self._packed(tensors)[0]
        before = self._engine.state_dict()
        data, sent = self._packed(tensors)
        with contextlib.suppress(ValueError):
            read = unpack(data, self._engine.compressor, most_elements=sent.numel())
            if torch.equal(torch.cat([tensor.view(-1) for tensor in read.values()]), sent):
                return data
        self._engine.load_state_dict(before)
        raise ValueError(
            f"{self._engine.compressor!r} with {self._engine.memory!r} needs other workers, or "
            f"what its receivers know of earlier messages, so one message cannot hold it. Give "
            f"another method, such as TopK or PowerSGD, with its own memory."
        )

    @undisturbed()
    def _packed(self, tensors: Mapping[str, Tensor]) -> tuple[bytes, Tensor]:
        """Return a message, and what it is meant to say."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        flat = torch.cat([tensor.detach().reshape(-1).cpu() for tensor in tensors.values()])
        sent: list[bytes] = []
        lengths: list[list[int]] = []
        engine, step = self._engine, self._engine.step
        flow = engine.flow(flat, shapes)
        request = next(flow, None)
        while request is not None:
            own = _own(request)
            lengths.append([tensor.numel() for tensor in own])
            sent.append(bytes(Message.of(own).pack(own).numpy()))
            request = resume(flow, _reply(request, own))
        engine.advance()
        named = [[name, list(shape)] for name, shape in shapes.items()]
        about = {"format": FORMAT, "seed": engine.seed, "step": step, "method": self.method}
        header = json.dumps(about | {"shapes": named, "lengths": lengths}).encode()
        body = struct.pack("<I", len(header)) + header + b"".join(sent)
        return MAGIC + struct.pack("<I", zlib.crc32(body)) + body, flat

    def state_dict(self) -> dict[str, Any]:
        """Return errors and state: tensors, numbers and strings only."""
        return {"method": self._saved} | self._engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another sender was; ValueError if the state is of no such sender."""
        _STATE.check(state)
        if not _is_count(state["step"]):
            refuse(f"The state has step {state['step']}, which no sender reaches")
        if state["method"] != self._saved:
            refuse(f"The state is of {state['method']}, and this is {self._saved}")
        self._engine.load_state_dict(state)

    @property
    def _saved(self) -> str:
        return f"{self.method} with {_named(self._engine.memory)}"


def pack(
    tensors: Mapping[str, Tensor], compressor: Compressor | str, state: Sender | None = None
) -> bytes:
    """Return compressed tensors as one message; without ``state``, errors are dropped.

    Wire format, in bytes: 4 that begin every message and name its version. 4 of a checksum (CRC-32)
    of the rest. 4 of the header's length. The header is JSON with names, shapes, the method and the
    lengths of what follows. Then come the payloads. Each has its tensors by descending element
    size, and is padded to a multiple of 16.

    Args:
        tensors: by name, float32.
        compressor: as for ``Sender``; the receiver needs an equal one.
        state: of this sender, with the same compressor; it keeps the errors.

    Raises:
        ValueError: as ``Sender.pack``; the sender has another compressor.
    """
    sender = Sender(compressor)
    if state is not None and state.method != sender.method:
        refuse(f"The sender compresses by {state.method}, not by {sender.method}")
    return (state or sender).pack(tensors)


def unpack(
    data: bytes, compressor: Compressor | str, *, most_elements: int = MOST_ELEMENTS
) -> dict[str, Tensor]:
    """Return the tensors of a message, by name, float32 on the CPU.

    No byte is trusted: a message that ``pack`` has not made with an equal compressor ends in a
    ValueError, or in tensors of the shapes that it names, and nothing else is changed. It proves
    neither who has sent it nor that its numbers are right: sign it, if senders are not trusted.

    Args:
        data: of ``pack``.
        compressor: equal to the sender's.
        most_elements: refuse messages that name more elements. A short message can name very many,
            and they cost memory and time before it is refused: up to 24 times 4 bytes an element
            with ``AQSGD`` and ``SketchedSGD``, and with methods by singular values a time that is
            cubic in a matrix's sides. So give what you expect. Limit the length of a message too,
            for each tensor that it names costs up to a millisecond.

    Raises:
        ValueError: the message is damaged, of another version, method or compressor, or too large.
    """
    header, body = _opened(data)
    shapes = _shapes(header.get("shapes"), most_elements)
    step, seed = _counts(header, "step", "seed")
    engine = _engine(compressor, None, seed)
    if header.get("method") != _named(engine.compressor):
        refuse(
            f"The message was made with {str(header.get('method'))[:200]}, and is read with "
            f"{_named(engine.compressor)}. Give unpack the sender's compressor"
        )
    engine.rounds.step = step
    numel = sum(map(math.prod, shapes.values()))
    _forget_others(len(data) - len(body))
    with undisturbed():
        flat = torch.zeros(numel, dtype=torch.float32, device="cpu")
        _replay(engine.flow(flat, shapes), _pieces(header.get("lengths")), body)
    pieces = flat.split([math.prod(shape) for shape in shapes.values()])
    return {n: piece.view(s) for (n, s), piece in zip(shapes.items(), pieces, strict=True)}


def _forget_others(nbytes: int) -> None:
    """Empty caches now and then: they would keep the names in all messages for good."""
    global _read
    _read += nbytes
    if _read > _MOST_READ:
        _read = 0
        forget_plans()


def _named(value: Any) -> str:
    """Return a setting with all that it is made of, so that equal ones have equal texts."""
    if dataclasses.is_dataclass(value):
        parts = [f.name for f in dataclasses.fields(value) if f.init and f.compare]
        inner = ", ".join(f"{name}={_named(getattr(value, name))}" for name in parts)
        return f"{type(value).__name__}({inner})"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_named, value))})"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return repr(value)
    return repr(float(value)).removesuffix(".0")


def _engine(compressor: Compressor | str, memory: Memory | None, seed: int) -> Engine:
    if isinstance(compressor, str):
        compressor = make("compressor", compressor, COMPRESSORS, Compressor)
    return Engine(layerwise(compressor), memory, seed=seed)


def _check(tensors: Mapping[str, Tensor]) -> None:
    if not tensors:
        refuse("pack({}) has nothing to send. Give tensors by name")
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            refuse(f"pack takes tensors by name, and {name!r} is not a text. Use str(...)")
        if tensor.layout is not torch.strided or tensor.is_meta:
            refuse(f"{name} is sparse or has no values, but pack takes dense tensors")
        if tensor.dtype != torch.float32:
            refuse(f"{name} is {tensor.dtype}, but pack takes float32: tensor.float()")
        if not tensor.isfinite().all():
            refuse(f"{name} is not finite, so its error would be lost for good")


def _own(request: Request) -> tuple[Tensor, ...]:
    """Return the tensors of a request of a single worker."""
    if isinstance(request, Exchange):
        return request.payloads[0]
    return request.tensors


def _reply(request: Request, tensors: Sequence[Tensor]) -> list[Any]:
    """Return the reply that a single worker gets."""
    return list(tensors) if isinstance(request, Mean | MeanShard) else [tuple(tensors)]


def _opened(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return header and payloads of a whole message."""
    if len(data) < _FIXED.size or data[:3] != MAGIC[:3]:
        refuse(f"These {len(data)} bytes were not made by lightning_gc.pack")
    if data[:4] != MAGIC:
        refuse(f"The message has version {data[3]}, and this library reads {MAGIC[3]}")
    _, checksum, length = _FIXED.unpack_from(data)
    if zlib.crc32(data[8:]) != checksum:
        refuse("The message's checksum is wrong: it was damaged on the way")
    try:
        header = json.loads(data[_FIXED.size : _FIXED.size + length])
    except (ValueError, RecursionError) as error:
        raise ValueError("The message's header cannot be read, so it is damaged.") from error
    if not isinstance(header, dict):
        refuse("The message's header is not what pack writes")
    if header.get("format") != FORMAT:
        found = str(header.get("format"))[:20]
        refuse(
            f"The message has payloads of format {found}, and this version of the library reads "
            f"{FORMAT}. Use the same version on both sides"
        )
    return header, data[_FIXED.size + length :]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _counts(header: dict[str, Any], *names: str) -> list[int]:
    if not all(_is_count(header.get(name)) for name in names):
        refuse(f"The message has no {' or '.join(names)}, so it is damaged")
    return [int(header[name]) for name in names]


def _can_be(sizes: Sequence[int]) -> bool:
    """Whether torch can make such a tensor: its strides are products of what is not 0."""
    return len(sizes) <= 64 and math.prod(max(size, 1) for size in sizes) < 1 << 62


def _shapes(given: Any, most_elements: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for entry in given if isinstance(given, list) else ():
        match entry:
            case [str(name), list(sizes)] if all(map(_is_count, sizes)) and _can_be(sizes):
                found[name] = tuple(sizes)
            case _:
                refuse("The message's shapes are not what pack writes")
    if not found or len(found) != len(given):
        refuse("The message names no tensors, or one twice")
    numel = sum(map(math.prod, found.values()))
    if numel > most_elements:
        refuse(
            f"The message names {numel:,} elements, more than most_elements={most_elements:,}. "
            "Raise it if you expect so many"
        )
    return found


def _pieces(lengths: Any) -> Iterator[list[int]]:
    """Yield the lengths of each request's tensors."""
    for row in lengths if isinstance(lengths, list) else ():
        if not (isinstance(row, list) and all(map(_is_count, row))):
            break
        yield row


def _replay(flow: Flow, pieces: Iterator[list[int]], body: bytes) -> None:
    """Answer a flow's requests with what the sender's were answered."""
    start = 0
    request = next(flow, None)
    while request is not None:
        like, row = _own(request), next(pieces, None)
        if row is None or not _fits(row, like, _limits(request)):
            refuse(
                "The lengths in the message do not fit its tensors: it is damaged, or its sender "
                "has another compressor"
            )
        layout = Message([t.dtype for t in like], _as(row, like))
        end = start + layout.nbytes
        if end > len(body):
            refuse("The message is shorter than its header says")
        piece = bytearray(body[start:end])
        memory = torch.frombuffer(piece or bytearray(1), dtype=torch.uint8)[: len(piece)]
        request, start = resume(flow, _reply(request, layout.unpack(memory))), end
    if start != len(body) or next(pieces, None) is not None:
        refuse("The message is longer than its tensors need, so it is damaged")


def _limits(request: Request) -> Limits | None:
    return request.limits if isinstance(request, Gather | Exchange) else None


def _fits(row: list[int], like: Sequence[Tensor], limits: Limits | None) -> bool:
    if len(row) != len(like):
        return False
    most = limits or (None,) * len(like)
    return all(
        n == tensor.numel() if limit is None else n <= limit
        for n, tensor, limit in zip(row, like, most, strict=True)
    )


def _as(row: list[int], like: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(t.shape) if t.numel() == n else (n,) for n, t in zip(row, like, strict=True)]
