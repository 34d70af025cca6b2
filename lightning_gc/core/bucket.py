"""Bucket: a flat gradient with its parameters' names and shapes, step and random generators."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class Tally:
    """Counts of elements and bytes, known without reading the data.

    ``elements`` and ``sent`` are of tensors that a compressor took, not of those sent whole, such
    as those that a ``SizeSwitch`` leaves alone. Where schemes cut tensors into shards, a tensor of
    fewer elements than workers may count as many as there are shards, for these are padded.
    """

    grad_elements: int = 0  # of all gradients
    grad_bytes: int = 0  # bytes of all gradients, in their own dtype
    elements: int = 0  # given to codecs
    sent: int = 0  # of these, sent (quantisers send all)
    payload_bytes: int = 0  # of codecs' payloads, each counted once
    local_steps: int = 0  # with local steps: optimizer steps up to the last exchange
    local_bytes: int = 0  # bytes of the gradients of all these steps, which plain DDP would send

    @property
    def plain_bytes(self) -> int:
        """Bytes of the gradients that plain DDP would have exchanged."""
        return self.local_bytes or self.grad_bytes

    @property
    def whole(self) -> int:
        """Elements sent whole, not given to a codec. Valid between rounds."""
        return self.grad_elements - self.elements

    @property
    def encoded_bytes(self) -> float:
        """Bytes that the gradients take encoded: payloads, and what is sent whole, once each.

        What is sent whole is taken to have the mean width of all elements. Valid between rounds.
        """
        width = self.grad_bytes / self.grad_elements if self.grad_elements else 0.0
        return self.payload_bytes + self.whole * width

    def count(self, elements: int, sent: int, payload: Iterable[Tensor]) -> None:
        """Count a payload that holds ``sent`` of ``elements`` elements."""
        self.elements += elements
        self.sent += sent
        self.payload_bytes += sum(t.numel() * t.element_size() for t in payload)


@dataclass(frozen=True)
class Bucket:
    """A flat gradient and its origin. A unit of transport: no state is keyed by it.

    Attributes:
        grad: the local gradient, flat, ``(numel,)``.
        shapes: parameter name -> shape, in the order in which the parameters lie in ``grad``.
        step: number of rounds finished before this one.
        seed: the run's seed, equal on all workers.
        worker: this worker's index, from 0.
        workers: W.
        state: parameter name -> the compressor's state for it, owned by the engine: tensors without
            NaN or infinity, numbers, texts, lists and dicts by texts. Checkpoints keep it.
        phase: 0 for a first encoding, 1 for the second one of a two-shot scheme.
        tally: to which codecs add their counts.
        wanted: False if this worker need not decode the mean: simulated workers except worker 0.
        weights: parameter name -> value, for memories that read it; else empty.
        positions: what all workers draw alike in this round, so that decoding need not draw again,
            and what is computed once for all parts. Parts and shards share it.
        before: parameter name -> the compressor's state for it when the round began, of the whole
            model; not to be changed. For methods that treat the model as one.
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
    positions: dict[Hashable, Tensor] = field(default_factory=dict, repr=False)
    before: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)

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
        """The parameter's shape if the bucket holds one parameter, else ``(numel,)``."""
        return next(iter(self.shapes.values())) if len(self.shapes) == 1 else (self.numel,)

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Yield ``(name, start, stop)`` of every parameter in the flat gradient."""
        start = 0
        for name, shape in self.shapes.items():
            stop = start + math.prod(shape)
            yield name, start, stop
            start = stop

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of ``flat`` by parameter name, in the parameters' own shapes."""
        return {name: flat[a:b].view(self.shapes[name]) for name, a, b in self.spans()}

    def part(self, name: str, start: int, stop: int) -> Bucket:
        """Return a bucket of the one parameter at ``grad[start:stop]``."""
        grad, shapes = self.grad[start:stop], {name: self.shapes[name]}
        state = {name: self.state[name]} if name in self.state else {}
        return replace(self, grad=grad, shapes=shapes, state=state)

    def shard(self, index: int, size: int) -> Bucket:
        """Return a bucket of shard ``index``, of ``size`` elements, with other random numbers."""
        name = "+".join(self.shapes)
        grad = self.grad[index * size : (index + 1) * size]
        return replace(self, grad=grad, shapes={f"{name}#{index}": (size,)}, state={})

    def again(self) -> Bucket:
        """Return this bucket for a second encoding, with other private random numbers."""
        return replace(self, phase=1)

    def generator(self, *, shared: bool) -> torch.Generator:
        """Return a new random generator on the gradient's device; the global one is never used.

        On GPUs of different models generators of one seed give different numbers, so with
        ``shared`` the numbers are equal on like devices only; ``generator_seed`` is so on all.
        """
        generator = torch.Generator(device=self.grad.device)
        generator.manual_seed(self.generator_seed(shared=shared))
        return generator

    def generator_seed(self, *, shared: bool) -> int:
        """Return a seed from (seed, names, step); if not ``shared``, also worker and phase."""
        key: tuple[Any, ...] = (self.seed, self.step, *self.shapes)
        if not shared:
            key = (self.worker, self.phase, *key)
        digest = hashlib.blake2b(repr((shared, *key)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def in_memory_order(param: Tensor) -> Tensor:
    """Return a view of a parameter, or its data, whose elements are numbered as in a bucket.

    Buckets hold a gradient's elements as the parameter's lie in memory: with
    ``torch.channels_last`` in another order than its indices have.
    """
    if param.is_contiguous():
        return param
    if torch.empty_like(param, device="meta").stride() != param.stride():
        return param  # with gaps, of which a gradient has none
    return param.as_strided(param.shape, torch.empty(param.shape, device="meta").stride())
