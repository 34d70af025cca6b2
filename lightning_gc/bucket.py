"""Bucket: a flat gradient with its parameter names, shapes, step and random generators."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class Tally:
    """What has been done so far, in plain numbers known without looking at the data.

    Only tensors that went through a codec count as elements; what a ``SizeSwitch`` left dense does
    not.
    """

    grad_bytes: int = 0  # bytes of all gradients, in their own dtype
    elements: int = 0  # elements that codecs were given
    sent: int = 0  # of these, how many they sent (quantisers send all)
    payload_bytes: int = 0  # bytes of these payloads, before the transport multiplies them

    def count(self, elements: int, sent: int, payload: Iterable[Tensor]) -> None:
        """Add that ``sent`` of ``elements`` elements go out in this payload."""
        self.elements += elements
        self.sent += sent
        self.payload_bytes += sum(t.numel() * t.element_size() for t in payload)


@dataclass(frozen=True)
class Bucket:
    """A flat gradient and where it comes from. A unit of transport: no state is ever keyed by it.

    Attributes:
        grad: the local gradient, flat, ``(numel,)``.
        shapes: parameter name -> shape, in the order in which the parameters lie in ``grad``.
        step: number of synchronisation rounds finished before this one.
        seed: the run's seed, equal on all workers.
        worker: this worker's index, ``0 <= worker < workers``.
        workers: how many workers take part.
        state: parameter name -> the compressor's own state for it, owned by the engine.
        phase: 0 for a first encoding, 1 for the second one of a two-shot scheme.
        tally: where codecs' counts of this round are added.
        wanted: false if this worker need not decode the mean, as simulated workers beside the first.
        weights: parameter name -> its value, for memories that read it; else empty.
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

    @property
    def numel(self) -> int:
        """Number of elements of the flat gradient."""
        return self.grad.numel()

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters, in the order of the flat gradient."""
        return tuple(self.shapes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's own shape where the bucket holds one parameter, else the flat one."""
        if len(self.shapes) == 1:
            return next(iter(self.shapes.values()))
        return (self.numel,)

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Yield ``(name, start, stop)`` of every parameter in the flat gradient."""
        start = 0
        for name, shape in self.shapes.items():
            stop = start + math.prod(shape)
            yield name, start, stop
            start = stop

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of ``flat`` by parameter name, in the parameters' own shapes."""
        return {
            name: flat[start:stop].view(self.shapes[name]) for name, start, stop in self.spans()
        }

    def part(self, name: str, start: int, stop: int) -> Bucket:
        """Return the bucket of one parameter that lies at ``grad[start:stop]``."""
        return replace(
            self,
            grad=self.grad[start:stop],
            shapes={name: self.shapes[name]},
            state={name: self.state[name]} if name in self.state else {},
        )

    def shard(self, index: int, size: int) -> Bucket:
        """Return the bucket of shard ``index``, of ``size`` elements, for a two-shot scheme.

        Shards of one tensor get different random numbers, the same on every worker.
        """
        name = "+".join(self.shapes)
        grad = self.grad[index * size : (index + 1) * size]
        return replace(self, grad=grad, shapes={f"{name}#{index}": (size,)}, state={})

    def again(self) -> Bucket:
        """Return this bucket for a second encoding, with private random numbers of its own."""
        return replace(self, phase=1)

    def generator(self, *, shared: bool) -> torch.Generator:
        """Return a fresh random generator on the gradient's device; the global one is never used.

        Args:
            shared: seeded from (seed, names, step), the same on all workers, when true; from
                these and the worker and the phase when false.
        """
        key: tuple[Any, ...] = (self.seed, self.step, *self.shapes)
        if not shared:
            key = (self.worker, self.phase, *key)
        digest = hashlib.blake2b(repr((shared, *key)).encode(), digest_size=8).digest()
        generator = torch.Generator(device=self.grad.device)
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        return generator
