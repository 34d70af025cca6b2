"""Snapshots: what a worker that joins begins with, its bytes, and the door where it is had.

Nothing is unpickled: a tree is a JSON text, and the bytes of its tensors behind it. A ``channel``
carries them, so they are neither damaged, nor a stranger's, nor old ones.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gc.core import ANYTHING, TEXT, WHOLE, Each, Leaf, Record
from lightning_gc.core.digest import digest
from lightning_gc.core.saved_state import ERRORS, FLOATS, Tree, each_tensor
from lightning_gc.engine import Engine
from lightning_gc.engine.engine import compressor_state
from lightning_gc.exchange.workers import Shapes
from lightning_gc.local_steps.channel import Link, Listener, Seal, calling
from lightning_gc.local_steps.local_rounds import CommonState, LocalRounds
from lightning_gc.local_steps.rendezvous import host_and_port

_log = logging.getLogger(__name__)
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
}
MAX_HEADER = 1 << 26
"""Most bytes of a tree's text."""


_SNAPSHOT = Record(
    {
        "round": WHOLE,
        "common": CommonState.common_structure,
        "weights": Each(FLOATS),
        "buffers": Each(FLOATS),
        "constants": Each(Leaf("a tensor", lambda v: isinstance(v, Tensor))),
        "compressor": ANYTHING,
        "shared": Each(Each(ERRORS)),
    },
    {"mark": TEXT},
)


def snapshot_of(rounds: LocalRounds, engine: Engine) -> Tree:
    """Return all that a worker needs to begin where this one is, but its own steps and error.

    Common weights in full precision, outer momentum and buffers, the number of the round, and what
    compressor and memory keep equally on all workers. Tensors are this worker's own.
    """
    weights, common = rounds.weights, engine.memory.common
    named = engine.buffers.named.items() if common else ()
    return {
        "round": engine.step,
        "common": CommonState([rounds]).common_state(),
        "weights": weights.named([each.anchor for each in weights.fragments]),
        "buffers": dict(weights.buffers.common),
        "constants": weights.buffers.constants,
        "compressor": {name: kept for name, kept in engine.compressor_state.items() if kept},
        "shared": {name: {buffer: kept[buffer] for buffer in common} for name, kept in named},
    }


def check_snapshot(tree: Any, engine: Engine, shapes: Shapes) -> None:
    """Raise ValueError if a tree is not a snapshot for this model and compressor."""
    _SNAPSHOT.check(tree, "snapshot")
    found = {name: tuple(each.shape) for name, each in tree["weights"].items()}
    if found != dict(shapes):
        raise ValueError("The snapshot is of a model with other parameters.")
    state = compressor_state(engine.levels.compressor, shapes)
    state.check(tree["compressor"], "snapshot/compressor")


def load_snapshot(tree: Tree, rounds: LocalRounds, engine: Engine, keep_error: bool) -> None:
    """Go on from a snapshot, at the beginning of its round.

    Args:
        tree: of ``snapshot_of``, checked.
        rounds: the worker's; the module has its weights.
        engine: the worker's.
        keep_error: whether the worker's error is kept, or begins at zero.
    """
    device = rounds.weights.fragments[0].anchor.device
    there = each_tensor(tree, lambda tensor: tensor.detach().to(device, copy=True))
    engine.loss_scaling.settle()
    if not keep_error:
        engine.reset()
    engine.rounds.step = tree["round"]
    engine.rounds.begin_again()
    engine.compressor_state = there["compressor"]
    if there["shared"]:
        kept = {name: dict(each) for name, each in engine.buffers.named.items()}
        engine.buffers.load(
            kept | {name: kept.get(name, {}) | own for name, own in there["shared"].items()}
        )
    with torch.no_grad():
        rounds.begin_from(there["weights"], there["buffers"], there["constants"])
        state = CommonState([rounds])
        state.load_common_state(there["common"] | {"flight": None})
    rounds.skip(0)


def digest_in_words(tensors: Sequence[Tensor]) -> str:
    """Return a digest of every bit of the tensors."""
    return f"{int(digest(*tensors)) & _MASK:016x}"


_MASK = (1 << 64) - 1


def to_bytes(tree: Tree) -> bytearray:
    """Return nested dicts and lists of tensors, numbers, texts and None as bytes.

    Eight bytes are the length of the text; the tensors' bytes follow it, in the order of the text.

    Raises:
        ValueError: a value of another type.

    Example:
        >>> from_bytes(to_bytes({"a": [1, 2.5, None], "b": {"c": "text"}}))
        {'a': [1, 2.5, None], 'b': {'c': 'text'}}
    """
    tensors: list[Tensor] = []
    text = json.dumps(_described(tree, tensors)).encode()
    data = bytearray(len(text).to_bytes(8, "big") + text)
    for tensor in tensors:
        data += tensor.reshape(-1).view(torch.uint8).numpy().data
    return data


def from_bytes(data: bytes | bytearray) -> Any:
    """Return the tree of ``to_bytes``; ValueError if the bytes are not a tree."""
    length = int.from_bytes(data[:8], "big")
    if not 0 < length <= min(MAX_HEADER, len(data) - 8):
        raise ValueError(f"{len(data):,} bytes cannot have a text of {length:,} bytes.")
    reader = _Decoder(memoryview(data), 8 + length)
    tree = reader.value(json.loads(bytes(data[8 : 8 + length])))
    if reader.at != len(data):
        raise ValueError(f"{len(data) - reader.at:,} bytes belong to no tensor.")
    return tree


def _described(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        here = value.detach().to("cpu").contiguous()
        dtype = str(here.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise ValueError(f"A snapshot cannot hold a tensor of {here.dtype}.")
        tensors.append(here)
        return {"t": [dtype, list(here.shape)]}
    if isinstance(value, dict):
        return {"d": {str(name): _described(each, tensors) for name, each in value.items()}}
    if isinstance(value, list | tuple):
        return {"l": [_described(each, tensors) for each in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"v": value}
    raise ValueError(f"A snapshot cannot hold {value!r} of {type(value).__name__}.")


class _Decoder:
    """Reads the values that a text describes.

    Attributes:
        at: position in the data of the next tensor.
    """

    def __init__(self, data: memoryview, at: int) -> None:
        self._data, self.at = data, at

    def value(self, said: Any) -> Any:
        match said:
            case {"d": dict(named)}:
                return {name: self.value(each) for name, each in named.items()}
            case {"l": list(listed)}:
                return [self.value(each) for each in listed]
            case {"t": [str(dtype), list(shape)]} if dtype in _DTYPES:
                return self._tensor(_DTYPES[dtype], shape)
            case {"v": None | bool() | int() | float() | str() as plain}:
                return plain
        raise ValueError(f"{str(said)[:60]} describes no value of a snapshot.")

    def _tensor(self, dtype: torch.dtype, shape: list[Any]) -> Tensor:
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{str(shape)[:60]} is not a shape.")
        start, self.at = self.at, self.at + math.prod(shape) * dtype.itemsize
        if self.at > len(self._data):
            raise ValueError(
                f"A tensor of shape {shape} ends behind the {len(self._data):,} bytes."
            )
        if start == self.at:
            return torch.zeros(shape, dtype=dtype, device="cpu")
        piece = bytearray(self._data[start : self.at])
        return torch.frombuffer(piece, dtype=dtype).view(shape)


class Wire:
    """One side of a connection between a door and its visitor, which carries trees.

    Args:
        link: the connection.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    def send(self, tree: Tree) -> None:
        """Send a tree."""
        self._link.send(to_bytes(tree))

    def receive(self) -> Any:
        """Return the tree that has come; ValueError if it is damaged."""
        return from_bytes(self._link.receive())


class Door:
    """Answers other workers; the training thread does not wait for them.

    One thread listens, and each worker that asks something gets a thread of its own. Strangers get
    none.

    Args:
        host: address that others reach this machine by.
        ports: the first free one is taken; empty: any.
        seal: with the shared secret.
        most: bytes of a request that are accepted.
        timeout: seconds of silence after which a visitor is given up.
        answer: returns the answer to a request, from any thread.

    Attributes:
        address: ``"host:port"``.

    Raises:
        OSError: none of the ports is free.
    """

    def __init__(
        self,
        host: str,
        ports: Sequence[int],
        seal: Seal,
        most: int,
        timeout: float,
        answer: Callable[[Any], Tree],
    ) -> None:
        self._timeout, self._answer = timeout, answer
        try:
            self._listener = Listener(ports, seal, most, None, host)
        except OSError as error:
            raise OSError(
                f"No port of {ports and (*ports,)} is free for snapshots ({error}); give "
                f"Elastic(ports=...) one more for each worker of a machine."
            ) from error
        self.address = self._listener.place
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="elastic door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more visitors."""
        self._closed.set()
        self._listener.wake()
        self._thread.join(1.0)

    def _serve(self) -> None:
        while not self._closed.is_set():
            heard = self._listener.wait(time.monotonic() + 60.0)
            for guest in {guest: None for guest, _ in heard}:
                first = [message for whose, message in heard if whose is guest]
                link = self._listener.release(guest, self._timeout)
                visit = threading.Thread(target=self._visit, args=(link, first), daemon=True)
                try:
                    visit.start()
                except RuntimeError as error:  # no thread can be had now
                    self._listener.note("thread", f"sent a worker away: {error}")
                    link.link.close()
        self._listener.close()

    def _visit(self, link: Link, heard: Sequence[bytearray]) -> None:
        with link.link:
            try:
                for message in heard:
                    link.send(to_bytes(self._answer(from_bytes(message))))
                while True:
                    link.send(to_bytes(self._answer(from_bytes(link.receive()))))
            except ConnectionError:
                return
            except (OSError, ValueError) as error:
                _log.warning("A visitor was sent away: %s", error)


@contextlib.contextmanager
def visiting(address: str, seal: Seal, most: int, timeout: float) -> Iterator[Wire]:
    """Connect to a door at ``"host:port"``; yield the ``Wire``."""
    where = host_and_port(address, "Worker")
    with calling(where, seal, address, most, timeout, f"the worker at {address}") as link:
        yield Wire(link)
