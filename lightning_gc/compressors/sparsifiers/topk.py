"""Send the elements of greatest magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding import payload_validation
from lightning_gc.compressors.base import Codec, Contraction, Knob
from lightning_gc.compressors.sparsifiers import sampled_threshold, sparse_payload, topk_selection
from lightning_gc.flow import Limits, Payload
from lightning_gc.search_space import Range

_DTYPES: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}
_ROUNDING = 2.0**-8  # of bfloat16, relative


@dataclass(frozen=True)
class TopK(Codec):
    """Send the k = density·numel elements of greatest magnitude; keep the others as the error.

    ``C(x)_i = x_i`` if ``|x_i|`` is among the k largest, else 0.

    Args:
        density: share of elements sent, in (0, 1]. Lower means more compression, more error.
        value_dtype: of values on the wire; what ``"bfloat16"`` rounds off stays in the error.
        selection: ``"exact"`` sends the k largest. ``"sampled"`` sends what reaches a threshold
            which a sample tells: the c largest for some c of at most k, whose number differs
            between workers and steps. Where fewer than 0.8·k reach it, the threshold is
            multiplied by 0.8, four times at most; where more than k do, the k largest of those
            are sent. So c is 0.8·k to k, but on tails so heavy that this does not suffice, and
            on tensors with fewer elements other than zero: zeros are not sent. On tensors of
            one value everywhere it takes as long as ``"exact"``, or longer.

    Wire format:
        ``values     # (k,) value_dtype``
        ``positions  # (coded_bytes(k, numel),) uint8``, Elias-Fano coded, ascending: at most
        ``2 + log2(numel/k)`` bits each and a byte or two. At density 1 % that makes 40.6 bits a
        sent element, or 24.6 with bfloat16. With sampled selection the same for c elements,
        ragged: two lengths of 8 bytes go ahead to every other worker, and an all-gather pads to
        the longest.

    Raises:
        ValueError: ``density`` outside (0, 1], an unknown ``value_dtype`` or ``selection``.

    Example:
        >>> from lightning_gc import TopK
        >>> TopK(density=0.01).at(0.1).density
        0.1

    Reference:
        Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017.
        Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
        Lin et al., "Deep Gradient Compression", ICLR 2018 (the sampled threshold).
    """

    density: float = 0.01
    value_dtype: Literal["float32", "bfloat16"] = "float32"
    selection: Literal["exact", "sampled"] = "exact"

    kind = "sparsifier"
    selects = True
    knob = Knob("density", low=1e-5, high=1.0)
    space = (Range("density", 1e-4, 0.1, scale="log"),)

    def __post_init__(self) -> None:
        name = type(self).__name__
        sparse_payload.check_density(name, self.density)
        if self.value_dtype not in _DTYPES:
            raise ValueError(
                f"{name}(value_dtype={self.value_dtype!r}): use 'float32' or 'bfloat16'. float16 "
                f"would lose gradients below 6e-8 for good."
            )
        if self.selection not in ("exact", "sampled"):
            raise ValueError(
                f"{name}(selection={self.selection!r}): use 'exact' for the k largest elements, or "
                f"'sampled' for about as many in less time."
            )
        object.__setattr__(self, "ragged", self.selection == "sampled")

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take the largest magnitudes."""
        return self.take(buffer, self.choose(buffer, bucket))

    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        """Find the k largest, or about as many."""
        k = sparse_payload.count(self.density, buffer.numel())
        if self.selection == "sampled":
            return sampled_threshold.about_largest(buffer, k, bucket.step)
        return topk_selection.largest(buffer, k)

    def take(self, buffer: Tensor, positions: Tensor) -> Payload:
        """Take these, rounded to ``value_dtype``."""
        return sparse_payload.take(buffer, positions, _DTYPES[self.value_dtype])

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        """Add k elements, or as many as came."""
        k = sparse_payload.count(self.density, out.numel())
        if not self.ragged:
            payload_validation.lengths(payload, k, sparse_payload.index_bytes(k, out.numel()))
        sparse_payload.put(payload, out, scale, most=k)

    def limits(self, numel: int) -> Limits | None:
        """Return none, or k elements at most."""
        if not self.ragged:
            return None
        k = sparse_payload.count(self.density, numel)
        return k, sparse_payload.most_index_bytes(k, numel)

    def bound(self, numel: int) -> Contraction:
        """Return δ = k / numel, reached when all magnitudes are equal; less what is rounded off.

        With sampled selection r / numel, where r elements of the sample reach the threshold: 256,
        say, of k. A tensor that meets it has its r largest elements in the sample and next to
        nothing elsewhere; where the sample is like the tensor, δ is at least 0.8·k / numel.
        """
        sent = sparse_payload.count(self.density, numel)
        if self.selection == "sampled":
            sent = sampled_threshold.rank(sent, numel)
        kept = 1.0 if self.value_dtype == "float32" else 1 - _ROUNDING**2
        return Contraction(kept * sent / numel)

    def sent(self, payload: Payload, numel: int) -> int:
        """Return how many values there are."""
        return payload[0].numel()

    @classmethod
    def examples(cls) -> tuple[TopK, ...]:
        """A sparse and a dense one, one that rounds, and one that samples."""
        return (
            cls(0.1),
            cls(1.0),
            cls(0.1, value_dtype="bfloat16"),
            cls(0.1, selection="sampled"),
        )
