"""Snapshots: what a worker that joins begins with, its bytes, and the door where it is had.

Nothing is unpickled: a tree is a safetensors file. It is read after its ``channel`` has checked the
signature, so it is neither damaged, nor a stranger's, nor an old one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
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
    return f"{int(digest(*tensors)) & (1 << 64) - 1:016x}"


def to_bytes(tree: Any) -> bytes:
    """Return nested dicts and lists of tensors, numbers, texts and None as a safetensors file.

    Its tensors have numbers. Its metadata has the tree as JSON, with ``{"": number}`` for a tensor.

    Raises:
        ValueError: a value of another type, or tensors that share memory.

    Example:
        >>> from_bytes(to_bytes({"a": [1, 2.5, None], "b": {"c": "text"}}))
        {'a': [1, 2.5, None], 'b': {'c': 'text'}}
    """
    tensors: dict[str, Tensor] = {}

    def numbered(value: Any) -> dict[str, str]:
        if not isinstance(value, Tensor):
            raise ValueError(f"A snapshot cannot hold {value!r} of {type(value).__name__}.")
        number = str(len(tensors))
        tensors[number] = value.detach().to("cpu").contiguous()
        return {"": number}

    text = json.dumps(tree, default=numbered)
    try:
        return safetensors.torch.save(tensors, {"tree": text})
    except (LookupError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"A snapshot cannot hold one of its tensors: {error}") from error


def from_bytes(data: bytes | bytearray) -> Any:
    """Return the tree of ``to_bytes``; ValueError if the bytes are not a tree."""
    try:
        tensors = safetensors.torch.load(bytes(data))
        head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])  # not loaded
        tree = json.loads(
            head["__metadata__"]["tree"],
            object_hook=lambda each: tensors.pop(each[""]) if "" in each else each,
        )
    except Exception as error:  # nothing is known of the bytes
        raise ValueError(f"{len(data):,} bytes are not a tree: {error!r}") from error
    if tensors:
        raise ValueError(f"{len(tensors):,} tensors have no place in their tree.")
    return tree


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
                for message in itertools.chain(heard, iter(link.receive, None)):
                    link.send(to_bytes(self._answer(from_bytes(message))))
            except ConnectionError:
                return
            except (OSError, ValueError) as error:
                _log.warning("A visitor was sent away: %s", error)


Ask = Callable[[Tree], Any]
"""Sends a tree to a door, and returns the answer."""


@contextlib.contextmanager
def visiting(address: str, seal: Seal, most: int, timeout: float) -> Iterator[Ask]:
    """Yield what asks the door at ``"host:port"``; the first question connects."""
    with contextlib.ExitStack() as stack:
        links: list[Link] = []

        def ask(tree: Tree) -> Any:
            if not links:
                where, name = host_and_port(address, "Worker"), f"the worker at {address}"
                called = calling(where, seal, address, most, timeout, name)
                links.append(stack.enter_context(called))
            links[0].send(to_bytes(tree))
            return from_bytes(links[0].receive())

        yield ask
