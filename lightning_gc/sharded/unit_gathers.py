"""All-gathers of FSDP2's units, compressed: weights, or what they differ by from the known ones.

FSDP2 lets a module bring its own all-gather (``set_custom_all_gather``, torch 2.9). Ours has the
same group, the same stream and the same order of calls as FSDP2's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gc.compressors import COMPRESSORS, Compressor, Float4
from lightning_gc.compressors.base import Codec, Knob
from lightning_gc.compressors.joint import limits_of
from lightning_gc.compressors.wrappers.per_parameter import by_default
from lightning_gc.core import Bucket, Each, Flow, Payload
from lightning_gc.core.flow import undisturbed
from lightning_gc.core.registry import make
from lightning_gc.core.saved_state import FLOATS, NOTHING
from lightning_gc.core.settings import Settings
from lightning_gc.engine.levels import Levels, Requested
from lightning_gc.sharded.fsdp_units import Unit, UnitNumbers, in_backward
from lightning_gc.sharded.sharded_workers import stacked
from lightning_gc.transports.accounting import Recording
from lightning_gc.transports.base import all_gather_bytes
from lightning_gc.transports.distributed import Distributed

_MOST = 0.02
"""Greatest share of a tensor's squared norm that rounding of weights may lose."""


@dataclass(frozen=True)
class WeightDifferences(Settings):
    """Gather the difference between weights and the copy of them that all ranks keep.

    ``ŵ_t = ŵ_{t−1} + C(w_t − ŵ_{t−1})``: all ranks compute with ŵ, and the owner of a shard keeps
    the exact w. The first gather is exact, ``ŵ_0 = w_0``. A later difference is about as large as
    an optimizer step, so 4 bits are enough. What C does not send is in the next difference.

    Each rank keeps ŵ of the whole model: 4 bytes per parameter, or 2 if weights are gathered in
    bfloat16. FSDP2 alone keeps 1/W of that. In return a backward pass gathers nothing: it computes
    with the copy of its forward pass. Use it if a model's weights fit each GPU, but not its
    gradients and optimizer state.

    Args:
        compressor: a quantiser of at least about 4 bits, with an error less than the tensor.

    Example:
        >>> from lightning_gc import QSGD, CompressedFSDPStrategy, Float4, WeightDifferences
        >>> strategy = CompressedFSDPStrategy(QSGD(bits=4), weights=WeightDifferences(Float4()))

    Reference:
        Jia et al., "SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data Parallelism
        for LLM Training", NeurIPS 2024.
    """

    compressor: Compressor = field(default_factory=Float4)


Weights = Compressor | WeightDifferences | str
"""A quantiser, its name, or ``WeightDifferences``: the argument ``weights``."""


@dataclass(frozen=True)
class WeightSettings:
    """Checked settings of the gathers of weights. Made by ``weights_of``.

    Attributes:
        compressor: with its wrappers.
        differences: whether differences are sent.
        seed: of private random numbers.
        knob: the compressor's, with the levels that lose little enough; None: it has no level.
    """

    compressor: Compressor
    differences: bool
    seed: int
    knob: Knob | None = None

    @property
    def in_words(self) -> str:
        """The argument ``weights`` with its wrappers, for checkpoints."""
        inner = repr(self.compressor)
        return f"{WeightDifferences.__name__}({inner})" if self.differences else inner


def weights_of(owner: str, weights: Weights, seed: int, min_numel: int) -> WeightSettings:
    """Look names up and refuse what cannot send weights.

    Args:
        owner: the class or function with these arguments, for error messages.
        weights: as the user has given it.
        seed: of private random numbers.
        min_numel: tensors with fewer elements, and 1-D tensors, are gathered exactly.

    Raises:
        ValueError: not a quantiser of fixed length, or one that loses too much of a weight.
    """
    differences = isinstance(weights, WeightDifferences)
    given = weights.compressor if isinstance(weights, WeightDifferences) else weights
    compressor = make("compressor", given, COMPRESSORS, Compressor)
    method, said = compressor.method, f"{owner}(weights={weights!r})"
    fits = isinstance(method, Codec) and method.traits.kind in ("dense", "quantiser")
    if not fits or not method.traits.conserves or limits_of(cast(Codec, method), 1 << 12):
        raise ValueError(
            f"{said}: every weight must arrive, in a message of fixed length. Use a quantiser such "
            f"as Int8(block_size=256)."
        )
    if method.keeps((64, 64)) is not NOTHING or method.traits.needs_sums:
        raise ValueError(f"{said}: weights have no state from step to step. Use Int8().")
    lost, most = _lost(method), 1.0 if differences else _MOST
    if differences and not lost < most:
        raise ValueError(
            f"{said}: its error may be larger than the difference, so the copies of the weights "
            f"would not follow them. Use WeightDifferences(Float4()), or more bits."
        )
    if not lost < most:
        raise ValueError(
            f"{said}: it may lose {lost:.0%} of a tensor's squared norm in each gather, and "
            f"{_MOST:.0%} are allowed. Use Int8(block_size=256), or "
            f"WeightDifferences({compressor}) for few bits."
        )
    knob = _knob(compressor, most)
    return WeightSettings(by_default(compressor, min_numel, owner), differences, seed, knob)


def _lost(method: Compressor) -> float:
    """Return the greatest share of a tensor's squared norm that rounding may lose."""
    return method.bound(1 << 12).allowed(1.0)


def _knob(compressor: Compressor, most: float) -> Knob | None:
    """Return the knob with the levels that lose less than ``most``, or None without levels."""
    knob = compressor.knob
    if knob is None or not knob.integer:
        return None
    levels = range(int(knob.low), int(knob.high) + 1)
    fits = [level for level in levels if _lost(compressor.at(level).method) < most]
    return replace(knob, low=fits[0], high=fits[-1])


class _Placed(NamedTuple):
    """Where a parameter lies in a row, and what encodes it.

    Attributes:
        name: of the parameter.
        start, stop: its place.
        shape: of the padded shards, one below the other.
        kept: some level compresses it, so its copy is in checkpoints.
        codec: at its present level; None: it is gathered exactly.
    """

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    kept: bool
    codec: Codec | None = None


class UnitGathers:
    """Does the all-gathers of a model's units while it lives.

    The owner of a shard keeps its exact weights. All ranks compute with the same decoded weights,
    the owner too.

    Args:
        units: of the model.
        names: sharded parameter -> name, frozen ones too.
        settings: of the gathers.
        transport: over all ranks of the shards.
        recording: of the same transport; its account.
        step: returns the number of finished backward passes.
        numbers: of the units.

    Attributes:
        settings, step, numbers: as given.
        workers: W.

    Communication pattern:
        One all-gather for each of FSDP2's, in its order: ``(W−1)`` times the payload's bytes. On
        the host a message ends in the unit's number.
        Differences: none in a backward pass.
    """

    structure = Each(FLOATS)
    """What ``own_state`` returns."""

    def __init__(
        self,
        units: Sequence[Unit],
        names: Mapping[Tensor, str],
        settings: WeightSettings,
        transport: Distributed,
        recording: Recording,
        step: Callable[[], int],
        numbers: UnitNumbers,
    ) -> None:
        self.settings, self.step, self.workers = settings, step, transport.workers
        self.numbers = numbers
        self._transport, self._recording = transport, recording
        self._dense_bytes = 0
        self._names, self._levels = names, Levels(settings.compressor, knob=settings.knob)
        self._units = [unit for unit in units if unit.params]
        self._gathers = [
            UnitGather(unit.name, list(self._parts(unit)), self) for unit in self._units
        ]
        for unit, gather in zip(self._units, self._gathers, strict=True):
            unit.gather_by(gather)

    def _parts(self, unit: Unit) -> Iterator[_Placed]:
        for column in unit.columns(frozen=True):
            name, whole = self._names[column.param], stacked(column.shape, self.workers)
            kept = column.param.is_floating_point() and self._levels.takes(whole)
            part = _Placed(name, column.start, column.stop, whole, kept)
            yield part._replace(codec=self._codec(part))

    def _codec(self, part: _Placed) -> Codec | None:
        compressor = self._levels.compressor_of(part.name, part.shape) if part.kept else None
        return None if compressor is None else cast(Codec, compressor.method)

    def set_levels(self, given: Requested | None) -> Requested | None:
        """Use levels from the next gather on; None: the compressor's own. Return them, clamped.

        Call it between two passes, equally on all ranks. Units that a pass has left gathered are
        resharded, so that all weights of the next pass have the new levels.
        """
        if given is None:
            self._levels.forget()
        else:
            self._levels.set(*given)
        for unit, gather in zip(self._units, self._gathers, strict=True):
            parts = [part._replace(codec=self._codec(part)) for part in gather.parts]
            if parts != gather.parts:
                gather.parts = parts
                unit.reshard()
        return self._levels.requested()

    def levels(self) -> dict[str, float | None]:
        """Return the level of every weight that is compressed; None: uncompressed for now.

        Empty if the compressor has no level.
        """
        if self.settings.knob is None:
            return {}
        parts = [part for gather in self._gathers for part in gather.parts if part.kept]
        return {part.name: None if part.codec is None else part.codec.level for part in parts}

    def sizes(self) -> dict[str, int]:
        """Return the elements of the same weights."""
        sizes = {name: param.numel() for param, name in self._names.items()}
        return {name: sizes[name] for name in self.levels()}

    def run(self, name: str, flow: Flow, rows: Tensor, group: Any) -> None:
        """Run the flow of a gather.

        Args:
            name: of the unit.
            flow: made by a unit.
            rows: the gathered weights, a row for each rank of the group.
            group: FSDP2's, of all ranks, or of fewer with ``reshard_after_forward=int``.
        """
        self._dense_bytes += all_gather_bytes(rows[0].numel() * rows.element_size(), len(rows))
        transport = self._transport
        transport.group = group
        transport.worker, transport.workers = dist.get_rank(group), len(rows)
        self._recording.run(self.numbers.around(name, flow, rows.device), rows.device)

    def dense(self) -> int:
        """Return the bytes of the gathers so far if they were uncompressed."""
        return self._dense_bytes

    def forget(self) -> None:
        """Let the next gathers be exact, as for weights from elsewhere."""
        for gather in self._gathers:
            gather.forget()

    def own_state(self) -> dict[str, Any]:
        """Return the copies of this rank's own shards, by parameter name."""
        return {name: kept for each in self._gathers for name, kept in each.kept().items()}

    def over_workers(self, state: Any, mean: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return no copies: shards have no mean, and the next gathers are exact."""
        return {}

    def load_own_states(self, states: Sequence[Any]) -> None:
        """Resume from ``own_state()``; without it, the next gathers are exact."""
        self.forget()
        if len(states) == 1:
            for gather in self._gathers:
                gather.resume(states[0])

    def close(self) -> None:
        """Let FSDP2 do its own all-gathers again."""
        for unit in self._units:
            unit.gather_itself()


class UnitGather:
    """One unit's all-gather: what torch calls an ``AllGather``.

    Args:
        name: of the unit.
        parts: of a row, with their codecs at present.
        leg: runs the flow.
    """

    # On CUDA, with FSDP2's streams (torch 2.9 to 2.13; read, and not run on several GPUs): FSDP2
    # makes its all-gather stream current, lets it wait for the copies into `input_tensor`, calls,
    # and records the event that the copies out of `output_tensor` wait for. All that is done here
    # is queued on that stream. `output_tensor` belongs to the copy-in stream; FSDP2 keeps it until
    # its event, as for its own all-gather.

    def __init__(self, name: str, parts: Sequence[_Placed], leg: UnitGathers) -> None:
        self.name, self.parts, self._leg = name, parts, leg
        self._known: Tensor | None = None  # (W, k): what all ranks have
        self._own = 0  # this rank's row
        self._saved: dict[str, Tensor] = {}  # of a checkpoint, this rank's

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the output, as FSDP2 itself would get it."""
        return torch.empty(*size, dtype=dtype, device=device)

    @undisturbed(inference=True)  # a validation's
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fill ``output_tensor`` with the decoded shards of all ranks.

        Args:
            output_tensor: ``(W·k,)``, a row for each rank.
            input_tensor: ``(k,)``, this rank's row of it.
            group: of all ranks, or of fewer with ``reshard_after_forward=int``.
            async_op: not used: the call has ended when it returns, on CUDA in its stream's order.
        """
        own, workers = dist.get_rank(group), dist.get_world_size(group)
        if not self.parts:  # all parameters are empty
            return
        rows = output_tensor.view(workers, -1)
        if workers == self._leg.workers:
            self._own = own
            flow = self._flow(rows)
        else:  # decoded weights, which the forward pass has cut
            flow = self._exact(rows, own)
        self._leg.run(self.name, flow, rows, group)

    def _flow(self, rows: Tensor) -> Flow:
        """Replace all rows by what was decoded of them."""
        if not self._leg.settings.differences:
            yield from self._gathered(rows[self._own], rows)
            return
        if self._known is None:
            yield from self._begin(rows)
        elif not in_backward():
            yield from self._follow(rows[self._own], self._known)
        assert self._known is not None
        rows.copy_(self._known)

    def _begin(self, rows: Tensor) -> Flow:
        """Gather exact weights; after a resume the copies of then, and the difference to them."""
        own, saved, self._saved = rows[self._own].clone(), self._saved, {}
        with torch.inference_mode(False):  # a validation may come first
            known = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        known[self._own] = own
        for part in self.parts:
            if part.name in saved:
                known[self._own, part.start : part.stop] = saved[part.name].to(known)
        yield from self._exact(known, self._own)
        self._known = known
        if saved:
            yield from self._follow(own, known)

    def _follow(self, own: Tensor, known: Tensor) -> Flow:
        """Gather differences and add them to the copies."""
        change = own.clone()
        for part in self.parts:
            if part.codec is not None:
                change[part.start : part.stop] -= known[self._own, part.start : part.stop]
        yield from self._gathered(change, known, add=True)

    def _exact(self, rows: Tensor, own: int) -> Flow:
        """Gather rows as they are."""
        arrived = yield from self._leg.numbers.gather(self.name, (rows[own],))
        for row, (payload,) in zip(rows, arrived, strict=True):
            row.copy_(payload)

    def _gathered(self, own: Tensor, out: Tensor, *, add: bool = False) -> Flow:
        """Gather a row of each rank: write exact parts to ``out``, and decoded ones, or add."""
        tensors, counts = list[Tensor](), list[int]()
        for part in self.parts:
            row = own[part.start : part.stop]
            payload: Payload = (row,)
            if part.codec is not None:
                buffer = row.to(torch.float32, copy=True)
                payload = part.codec.encode(buffer, self._bucket(part, buffer, self._own))
            tensors += payload
            counts.append(len(payload))
        arrived = yield from self._leg.numbers.gather(self.name, tuple(tensors))
        for sender, message in enumerate(arrived):
            begin = 0
            for part, count in zip(self.parts, counts, strict=True):
                payload = tuple(message[begin : begin + count])
                begin += count
                there = out[sender, part.start : part.stop]
                if part.codec is None:
                    there.copy_(payload[0])
                    continue
                decoded = there.float() if add else torch.zeros_like(there, dtype=torch.float32)
                bucket = self._bucket(part, decoded, sender)
                part.codec.whole.receive(payload, decoded, 1.0, bucket, sender)
                there.copy_(decoded)

    def _bucket(self, part: _Placed, flat: Tensor, worker: int) -> Bucket:
        """Return the bucket of one rank's shard, with this shard's random numbers."""
        leg = self._leg
        shapes = {f"{part.name}@": (flat.numel(),)}  # not the numbers that its gradient draws
        step, seed = leg.step(), leg.settings.seed
        return Bucket(flat, shapes, step, seed, worker=worker, workers=leg.workers)

    def forget(self) -> None:
        """Let the next gather be exact."""
        self._known, self._saved = None, {}

    def kept(self) -> dict[str, Tensor]:
        """Return this rank's own part of the copy, by parameter name."""
        if self._known is None:
            return dict(self._saved)
        own = self._known[self._own]
        return {
            part.name: own[part.start : part.stop].float().clone()
            for part in self.parts
            if part.kept
        }

    def resume(self, state: Mapping[str, Tensor]) -> None:
        """Begin with this rank's part of a checkpoint's copy, if it has all of the unit."""
        sizes = {part.name: part.stop - part.start for part in self.parts if part.kept}
        if all(name in state and state[name].numel() == n for name, n in sizes.items()):
            self._saved = {name: state[name] for name in sizes}
