"""Snapshots: what a worker that joins begins with, its bytes, and how it is handed over.

Nothing is unpickled: a tree is a safetensors file. It is read after its carrier has checked the
signature, so it is neither damaged, nor a stranger's, nor an old one.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from lightning_gc.core import ANYTHING, TEXT, WHOLE, Each, Leaf, Record
from lightning_gc.core.digest import digest
from lightning_gc.core.notices import say
from lightning_gc.core.saved_state import ERRORS, FLOATS, Tree, each_tensor
from lightning_gc.elastic.membership import Ask, Membership, Taken
from lightning_gc.engine import Engine
from lightning_gc.engine.engine import compressor_state
from lightning_gc.engine.error_buffers import to_host
from lightning_gc.exchange.workers import Shapes, Workers
from lightning_gc.local_steps.local_rounds import CommonState, LocalRounds
from lightning_gc.transports.island import Island

_log = logging.getLogger(__name__)
_PLACE = Record({"round": WHOLE, "position": WHOLE, "steps": WHOLE})
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
    {"mark": TEXT, "place": _PLACE},
)
_ERROR = Record({"ask": TEXT, "run": TEXT, "number": WHOLE, "memory": Each(Each(ERRORS))})


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


class Loop(Protocol):
    """The parts of its training loop that an elastic worker needs."""

    @property
    def steps(self) -> int:
        """Optimizer steps before the one that it is in, as all workers count them."""

    def go_on_from(self, steps: int) -> None:
        """Count from here, with optimizers that begin again and learning rates of this step."""

    def check(self) -> None:
        """Raise what ends the loop, such as a signal."""


@dataclass
class Place:
    """Where a worker is in the run."""

    rounds: LocalRounds
    loop: Loop
    first: int  # steps before this round
    belongs: bool  # whether the error is one of this run
    resumed: bool  # whether the weights still equal a checkpoint's
    within: bool = False  # whether the loop is in a step, which it has not counted


class Inheritance:
    """Hands a snapshot to a worker that joins, and this worker's error to another one.

    Threads of a carrier answer the others, but not while the common weights change.

    Args:
        workers: this process's worker.
        device: of its weights.
        membership: of the worker.
        undo: takes back the attempt that the worker is in.

    Attributes:
        place: where the worker is in the run; None before it comes in.
        closed: no error is taken any more.
    """

    def __init__(
        self,
        workers: Workers,
        device: torch.device,
        membership: Membership,
        undo: Callable[[], None],
    ) -> None:
        self.place: Place | None = None
        self.closed = False
        self._workers, self._device, self._membership = workers, device, membership
        self._undo = undo
        self._still = threading.Lock()  # held while the common weights change
        self._changing = False  # whether the training thread holds it
        self._errors: list[list[Any]] = []  # of those who have left, with their numbers

    def hold(self) -> None:
        """Serve no snapshots: the common weights are about to change."""
        if not self._changing:
            self._still.acquire()
            self._changing = True

    def release(self) -> None:
        """Serve snapshots again."""
        if self._changing:  # a thread of the carrier may hold the lock, too
            self._changing = False
            self._still.release()

    def mark(self) -> str:
        """Return a digest of the common weights, buffers and outer momentum."""
        assert self.place is not None
        weights = self.place.rounds.weights
        tensors = [each.anchor for each in weights.fragments]
        tensors += [each.velocity for each in weights.fragments if each.velocity is not None]
        tensors += [weights.buffers.common[name] for name in sorted(weights.buffers.common)]
        return digest_in_words(tensors)

    def take(self, address: str) -> Taken:
        """Begin where the donor is. Until all of it has come, this worker stays as it was."""
        assert self.place is not None
        place, engine, elastic = self.place, self._workers.first, self._membership.elastic
        rounds, island = place.rounds, self._membership.island
        check = partial(check_snapshot, engine=engine, shapes=self._workers.shapes)
        with self._membership.visit(address) as ask:  # rank 0 alone asks
            parts = (ask, check, self._membership.is_over, elastic.patience, place.loop.check)
            tree = heard(island, lambda: timely_snapshot(*parts))
            number, there = tree["round"], tree["place"]
            if place.resumed and (number, tree["mark"]) == (engine.step, self.mark()):
                # The steps within the round are kept, too.
                return number, rounds.position, "kept"
            if place.resumed:  # parts of that error may have been sent since
                place.belongs = False
                say(
                    "The checkpoint is of round %d, and the run is in round %d: this worker begins "
                    "with a zero error.",
                    *(engine.step, number),
                )
            place.resumed = False
            if self._changing:  # since an attempt whose verdict this worker has not read
                took = {"ask": "took", "number": self._membership.member.number}
                if heard(island, lambda: ask(took | {"round": engine.step})) != {"took": True}:
                    self._undo()
                self.release()
            with self._still:
                load_snapshot(tree, rounds, engine, keep_error=place.belongs)
            with suppress(OSError, ValueError):  # the donor has made steps in the meantime
                later = heard(island, lambda: place_of(ask))
                there = later if later["round"] == number else there
        rounds.skip(there["position"])
        place.first = there["steps"] - there["position"]
        # Within a step, as in a round that has begun without this worker, the loop counts it next.
        place.loop.go_on_from(there["steps"] - place.within)
        return number, there["position"], "kept" if place.belongs else "zero"

    def left(self) -> list[list[Any]]:
        """Return numbers and errors of those who have left, which this process was given."""
        with self._still:  # an error that was taken is in one of the lists
            errors, self._errors = self._errors, []
        return errors

    def add(self, errors: Sequence[Any]) -> list[int]:
        """Add the errors of those who have left to this worker's; return their numbers."""
        for _, memory in errors:
            there = each_tensor(memory, lambda tensor: tensor.to(self._device))
            self._workers.first.add_errors(there)
        return [number for number, _ in errors]

    def bequeath(self) -> None:
        """Give this worker's error to the lowest of the others that takes it.

        It is given once: if an answer does not come, nobody else is asked.
        """
        engine, membership = self._workers.first, self._membership
        common, number = engine.memory.common, membership.member.number
        memory = {
            name: {buffer: tensor for buffer, tensor in kept.items() if buffer not in common}
            for name, kept in engine.state_dict()["memory"].items()
        }
        norm = norm_of_error(engine)
        if not norm:
            say("Worker %d leaves.", number)
            return
        run = membership.member.report.run
        said = {"ask": "error", "run": run, "number": number, "memory": memory}
        for other, address in sorted(membership.neighbours.items()):
            if other == number:
                continue
            offer, given = membership.saying(f"offers its error to worker {other}"), False
            with offer, suppress(OSError, ValueError), membership.visit(address) as ask:
                place_of(ask)  # who does not answer now is given nothing
                given = True
                if ask(said) == {"taken": True}:
                    say(
                        "Worker %d leaves; worker %d has its error of norm %.6g.",
                        *(number, other, norm),
                    )
                    return
                given = False
            if given:
                _log.warning(
                    "Worker %d leaves. Worker %d was given its error of norm %.6g, and has not "
                    "answered: if it has died, that error is lost.",
                    *(number, other, norm),
                )
                return
        _log.warning(
            "Worker %d leaves, and no other worker takes its error of norm %.6g.", number, norm
        )

    def end(self) -> None:
        """Take no more errors, and add those that were taken."""
        self.release()
        with self._still:
            self.closed = True
        self.add(self.left())

    def _place(self) -> Tree:
        assert self.place is not None
        rounds, number = self.place.rounds, self._workers.first.step
        position = rounds.position % rounds.length  # the thread of training may be counting a step
        return {"round": number, "position": position, "steps": self.place.first + position}

    def answer(self, asked: Any) -> Tree:
        """Answer another worker, in a thread of the carrier."""
        place, engine = self.place, self._workers.first
        match asked:
            case {"ask": "snapshot"}:
                if place is None:
                    raise ValueError("This worker has not begun yet.")
                with self._still:
                    made = snapshot_of(place.rounds, engine)
                    made |= {"mark": self.mark(), "place": self._place()}
                    return each_tensor(made, to_host)
            case {"ask": "place"}:
                with self._still:
                    return self._place()
            case {"ask": "took", "round": int(number), "number": int(worker)}:
                roll = self._membership.member.roll  # begins where this worker came in
                took = any(each.round == number and worker in each.members for each in roll)
                return {"took": took}
            case {"ask": "error"}:
                _ERROR.check(asked, "error")
                with self._still:
                    fits = asked["run"] == self._membership.member.report.run and not self.closed
                    if fits:
                        self._errors.append([asked["number"], asked["memory"]])
                return {"taken": fits}
        raise ValueError(f"{str(asked)[:60]} is not a question that a worker answers.")


def heard(island: Island, act: Callable[[], Any]) -> Any:
    """Return the tree that ``act`` returns on rank 0, on all ranks of an island."""
    if island.size == 1:
        return act()
    data = island.hear(lambda: torch.frombuffer(bytearray(to_bytes(act())), dtype=torch.uint8))
    return from_bytes(data.numpy().tobytes())


def norm_of_error(engine: Engine) -> float:
    """Return the norm of a worker's error."""
    errors = engine.errors().values()
    return math.sqrt(sum(float(error.double().square().sum()) for error in errors))


def timely_snapshot(
    ask: Ask,
    check: Callable[[Any], None],
    is_over: Callable[[int], bool],
    patience: float,
    heed: Callable[[], None],
) -> Any:
    """Return a snapshot whose round is still under way when it has come.

    Args:
        ask: asks the donor.
        check: refuses a snapshot of another model.
        is_over: says whether a round has been committed.
        patience: seconds.
        heed: raises what ends the loop.

    Raises:
        RuntimeError: snapshots came after the ends of their rounds, for ``patience`` seconds.
    """
    limit = time.monotonic() + patience
    for tries in itertools.count(1):
        asked = time.monotonic()
        tree = ask({"ask": "snapshot"})
        check(tree)
        if not is_over(tree["round"]):
            return tree
        came = time.monotonic()
        if came > limit:
            raise RuntimeError(
                f"No snapshot has come before its round ended; tries: {tries}, the last one of "
                f"{came - asked:.3g} s. A round must take longer than that; raise every."
            )
        # After two that were late, the next one is asked for when a round begins.
        number = tree["round"]
        while is_over(number):
            number += 1
        while tries > 1 and not is_over(number) and time.monotonic() < came + 2 * (came - asked):
            heed()
            time.sleep(0.01)
    raise AssertionError


def place_of(ask: Ask) -> Any:
    """Return the round, the position in it, and the steps of the worker that is asked."""
    place = ask({"ask": "place"})
    _PLACE.check(place, "place")
    return place
