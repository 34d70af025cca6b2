"""Define buckets: a flat gradient with parameter names and shapes, the step and random seeds."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_gc.core.segments import Pending


@dataclass
class Tally:
    """Count elements and bytes without reading the data.

    ``elements`` and ``sent`` count compressed tensors only, not tensors sent uncompressed, such as
    small tensors under a ``SizeSwitch``. Schemes that cut tensors into shards pad them. A tensor
    with fewer elements than workers may then count as many elements as shards.
    """

    grad_elements: int = 0  # elements of all gradients
    grad_bytes: int = 0  # bytes of all gradients, in their own dtype
    elements: int = 0  # elements given to codecs
    sent: int = 0  # elements given to codecs and sent (quantisers send all)
    payload_bytes: int = 0  # bytes of codecs' payloads, each counted once
    local_steps: int = 0  # with local steps: optimizer steps up to the last exchange
    local_bytes: int = 0  # gradient bytes of all local steps, which plain DDP would send

    @property
    def plain_bytes(self) -> int:
        """Bytes of the gradients that plain DDP would have exchanged."""
        return self.local_bytes or self.grad_bytes

    @property
    def whole(self) -> int:
        """Elements sent uncompressed, not given to a codec. Valid between rounds."""
        return self.grad_elements - self.elements

    @property
    def encoded_bytes(self) -> float:
        """Bytes of the encoded gradients: payloads plus uncompressed elements, once each.

        An uncompressed element counts the mean width of all elements. Valid between rounds.
        """
        width = self.grad_bytes / self.grad_elements if self.grad_elements else 0.0
        return self.payload_bytes + self.whole * width

    def add(self, other: Tally) -> None:
        """Add the counts of one bucket in one round."""
        self.grad_elements += other.grad_elements
        self.grad_bytes += other.grad_bytes
        self.elements += other.elements
        self.sent += other.sent
        self.payload_bytes += other.payload_bytes

    def count(self, elements: int, sent: int, payload: Iterable[Tensor]) -> None:
        """Count a payload that holds ``sent`` of ``elements`` elements."""
        self.elements += elements
        self.sent += sent
        self.payload_bytes += sum([t.nbytes for t in payload])


@dataclass(frozen=True)
class Bucket:
    """A flat gradient with its parameters, step and worker.

    A bucket is a unit of transport. State is keyed by parameter name, never by bucket.

    Attributes:
        grad: the local gradient, flat, ``(numel,)``.
        shapes: parameter name -> shape, in the order of the parameters in ``grad``.
        step: number of rounds finished before this one.
        seed: the run's seed, equal on all workers.
        worker: this worker's index (rank), from 0.
        workers: W.
        state: parameter name -> the compressor's state for it. The engine owns it, and checkpoints
            keep it. It holds finite tensors, numbers, texts, lists, and dicts with texts as keys.
        phase: 0 for the first encoding, 1 for the second encoding of a two-shot scheme.
        tally: counts of elements and bytes, to which codecs add.
        wanted: False if this worker need not decode the mean: simulated workers except worker 0.
        weights: parameter name -> value, for memories that read it; otherwise empty.
        cache: tensors computed once per round, shared by parts and shards.
        pending: the engine's work, for a codec of whole buckets that ``absorbs`` it; else None.
        before: parameter name -> the compressor's state for it at the start of the round, for the
            full model; read-only. For methods that treat the model as one tensor.
    """

    grad: Tensor
    shapes: Mapping[str, tuple[int, ...]]
    step: int = 0
    seed: int = 0
    worker: int = 0
    workers: int = 1
    state: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    phase: int = 0
    tally: Tally = field(default_factory=Tally)
    wanted: bool = True
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    cache: dict[Hashable, Tensor] = field(default_factory=dict, repr=False)
    before: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    pending: Pending | None = field(default=None, repr=False)

    @property
    def numel(self) -> int:
        """Elements of ``grad``."""
        return self.grad.numel()

    @property
    def names(self) -> tuple[str, ...]:
        """Parameter names, in the order of the flat gradient."""
        return tuple(self.shapes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape if the bucket holds one parameter, otherwise ``(numel,)``."""
        return next(iter(self.shapes.values())) if len(self.shapes) == 1 else (self.numel,)

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Yield ``(name, start, stop)`` of every parameter in the flat gradient."""
        start = 0
        for name, shape in self.shapes.items():
            stop = start + math.prod(shape)
            yield name, start, stop
            start = stop

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of ``flat`` by parameter name, in the parameters' shapes."""
        return {name: flat[a:b].view(self.shapes[name]) for name, a, b in self.spans()}

    def part(self, name: str, start: int, stop: int) -> Bucket:
        """Return a bucket of the single parameter at ``grad[start:stop]``."""
        grad, shapes = self.grad[start:stop], {name: self.shapes[name]}
        state = {name: self.state[name]} if name in self.state else {}
        return replace(self, grad=grad, shapes=shapes, state=state, pending=None)

    def name_of(self, part: str) -> str:
        """Return the name of a part of this bucket."""
        return part

    def shard(self, index: int, size: int) -> Bucket:
        """Return a bucket of shard ``index`` with ``size`` elements and other random numbers."""
        name = "+".join(self.shapes)
        grad = self.grad[index * size : (index + 1) * size]
        return replace(self, grad=grad, shapes={f"{name}#{index}": (size,)}, state={})

    def again(self) -> Bucket:
        """Return this bucket for a second encoding, with other private random numbers."""
        return replace(self, phase=1)

    def generator(self, *, shared: bool) -> torch.Generator:
        """Return a new random generator on the gradient's device, never the global generator.

        GPUs of different models give different numbers for the same seed. With ``shared`` the
        numbers are therefore equal only on equal devices; ``generator_seed`` is equal on all.
        """
        generator = torch.Generator(device=self.grad.device)
        generator.manual_seed(self.generator_seed(shared=shared))
        return generator

    def generator_seed(self, *, shared: bool, name: str | None = None) -> int:
        """Return a seed from (seed, names, step), and from worker and phase if not ``shared``.

        With ``name`` it is the seed of the part with this name.
        """
        names = self.shapes if name is None else (self.name_of(name),)
        key: tuple[Any, ...] = (self.seed, self.step, *names)
        if not shared:
            key = (self.worker, self.phase, *key)
        return _hashed((shared, *key))

    @property
    def shared_key(self) -> int:
        """A seed from (seed, names), equal on all workers, for numbers counted by steps."""
        return _hashed(("key", self.seed, *self.shapes))

    def key(self, name: str) -> int:
        """Return a seed from (seed, worker, phase, name), for numbers that are counted by steps."""
        return _hashed(("key", self.worker, self.phase, self.seed, self.name_of(name)))


def _hashed(key: tuple[Any, ...]) -> int:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def in_memory_order(param: Tensor) -> Tensor:
    """Return a view of a parameter or its data with elements in the order of a bucket.

    Buckets hold a gradient's elements in the parameter's memory order. With
    ``torch.channels_last`` that order differs from the order of indices.
    """
    if param.is_contiguous():
        return param
    if torch.empty_like(param, device="meta").stride() != param.stride():
        return param  # its memory has gaps, but a gradient's memory does not
    return param.as_strided(param.shape, torch.empty(param.shape, device="meta").stride())
