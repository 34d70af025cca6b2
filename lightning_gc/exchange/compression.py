"""Compression: what workers exchange and how, which every way in takes as arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypedDict

from lightning_gc.compressors import COMPRESSORS, Compressor
from lightning_gc.compressors.wrappers.per_parameter import by_default
from lightning_gc.compressors.wrappers.size_switch import MIN_NUMEL
from lightning_gc.controllers import Controller
from lightning_gc.core.registry import make
from lightning_gc.engine import Engine
from lightning_gc.engine.compatibility import (
    choices_of,
    combine,
    default_scheme,
    waits_of_step,
)
from lightning_gc.exchange.automatic import permitted, refuse_auto
from lightning_gc.exchange.validation import check_controller
from lightning_gc.exchange.verification import Verify, verification
from lightning_gc.memories import MEMORIES, Memory
from lightning_gc.schemes import SCHEMES, Scheme


@dataclass(frozen=True)
class WayIn:
    """Words for a strategy or function that takes ``Compression``, for warnings and refusals.

    Args:
        owner: the class or function with these arguments.
        more_workers: advice in the warning of one worker.
        bypassed: advice where an optimizer steps and nothing was exchanged.
        unused: how the user sets ``find_unused_parameters=True``.
        elsewhere: advice where an optimizer trains what is not the module's; maybe empty.
        rounds: whether workers exchange every H steps, so that a controller may set H.
        no_choice: why ``"auto"`` cannot choose here, and what to take; empty: it can.
    """

    owner: str
    more_workers: str = "use more workers, or DDP as it is"
    bypassed: str = (
        "Call the wrapped module itself, ddp(x), not ddp.module or one of its methods. Run the "
        "last backward pass before a step outside of no_sync()"
    )
    unused: str = "DistributedDataParallel(..., find_unused_parameters=True)"
    elsewhere: str = "If another module exchanges it, leave attach(optimizers=...) out."
    rounds: bool = False
    no_choice: str = ""


@dataclass(frozen=True)
class Compression:
    """Settings of an exchange. Every strategy and ``attach`` take these fields as arguments.

    Args:
        compressor: an instance, or a name from the registry.
        memory: the error feedback rule. Default: ``ErrorFeedback()`` for biased compressors,
            ``NoMemory()`` for unbiased ones.
        scheme: how payloads become a mean. Default: ``AllReduce()`` for linear compressors,
            ``AllGatherOrTwoShot()`` for quantisers, ``AllGather()`` for sparsifiers.
        controller: chooses levels, epoch by epoch; None keeps the compressor's own.
        seed: of the compressor's private random numbers, equal on all workers.
        verify: n: in every n-th step workers compare a digest of the mean gradients, and for n > 1
            of the weights, and stop with a ``ReplicaError`` that names who differs, before the
            optimizer's step (on CUDA, one step later). ``"payload"``: as 1, and every message has a
            checksum, so that a damaged one is not decoded but named with its sender. 0: neither.
        min_numel: tensors with fewer elements, and 1-D tensors, are sent uncompressed. 0 compresses
            every tensor, also 1-D ones. ``PerParameter(compressor)`` compresses every tensor too,
            and ``SizeSwitch(compressor, ...)`` has its own limits: with either, only the default is
            allowed. So it is with ``Identity``, ``Cast`` and compressors whose workers vote, such
            as ``SignSGD``, which compress every tensor.

    Raises:
        ValueError: by ``resolved``, a combination that cannot work, an unknown name, a controller
            that cannot set the compressor's knob, an unknown ``verify``.
    """

    compressor: Compressor | str
    memory: Memory | str | None = None
    scheme: Scheme | str | None = None
    controller: Controller | str | None = None
    seed: int = 0
    verify: Verify = 0
    min_numel: int = MIN_NUMEL

    def resolved(self, way: WayIn) -> Resolved:
        """Look names up, fill in defaults, and refuse what cannot work."""
        compressor, controller, owner = self.compressor, self.controller, way.owner
        if way.no_choice:
            refuse_auto(owner, compressor, controller, way.no_choice)
        compressor, memory, controller = permitted(owner, compressor, self.memory, controller)
        configuration = replace(self, compressor=compressor, memory=memory).configured(owner)
        parts = configuration.compressor, configuration.memory
        controller = check_controller(controller, *parts, owner, rounds=way.rounds)
        verification(self.verify, owner)
        return Resolved(configuration, controller, self.verify)

    def configured(self, owner: str) -> Configuration:
        """Return compressor, memory and scheme, without the controller; ``owner``: for messages."""
        if not isinstance(self.seed, int):
            raise ValueError(f"{owner}(seed={self.seed!r}): the seed is a whole number.")
        compressor = make("compressor", self.compressor, COMPRESSORS, Compressor)
        memory, scheme = self.memory, self.scheme
        if memory is not None:
            memory = make("memory", memory, MEMORIES, Memory)
        if scheme is not None:
            scheme = make("scheme", scheme, SCHEMES, Scheme)
        compressor = by_default(compressor, self.min_numel, owner)
        return Configuration(*combine(compressor, memory, scheme), self.seed)


class CompressionFields(TypedDict, total=False):
    """The fields of ``Compression`` that are given by name, for type checkers."""

    seed: int
    verify: Verify
    min_numel: int


@dataclass(frozen=True)
class Configuration:
    """Settings that must be equal on all workers. Made by ``Compression``.

    Attributes:
        compressor: with its wrappers.
        memory: as given, or the compressor's default.
        scheme: as given, or the default; None if the compressor runs its own communication.
        seed: of private random numbers.
    """

    compressor: Compressor
    memory: Memory
    scheme: Scheme | None
    seed: int

    def engine(self, worker: int, workers: int) -> Engine:
        """Return the engine of one of ``workers`` workers."""
        parts = self.compressor, self.memory, self.scheme
        return Engine(*parts, worker=worker, workers=workers, seed=self.seed)

    def waits(self, workers: int) -> bool:
        """Return whether an exchange among W workers can make the host wait for a GPU."""
        return any(
            any(field.varies == "worker" for field in entry.wire(1 << 20))
            or waits_of_step(entry, self.scheme or default_scheme(entry), workers).limit > 0
            for entry in choices_of(self.compressor)
        )

    @property
    def schemes(self) -> list[Scheme]:
        """The scheme, or the schemes of a menu's choices; empty for own communication."""
        found = (self.scheme or default_scheme(each) for each in choices_of(self.compressor))
        return [scheme for scheme in found if scheme is not None]

    def neighbours(self, workers: int) -> int:
        """Return how many consecutive workers are a node: the most of all schemes."""
        return max((scheme.neighbours(workers) for scheme in self.schemes), default=1)

    def in_words(self) -> dict[str, str]:
        """Return ``{name: repr}`` of the settings."""
        return {name: repr(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class Resolved:
    """A compression with objects in place of names.

    Attributes:
        configuration: of the exchange.
        controller: of levels or H, or None.
        verify: what workers compare.
    """

    configuration: Configuration
    controller: Controller | None = None
    verify: Verify = 0
