"""MomentumCorrection: momentum accumulated before compression, with factor masking (DGC)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_gc.compressors.base import Compressor
from lightning_gc.core import Bucket, Flow, Range
from lightning_gc.core.combinations import judge
from lightning_gc.memories.base import GradientExchange, OwnMomentum, State
from lightning_gc.schemes.base import Scheme


@dataclass(frozen=True)
class MomentumCorrection(OwnMomentum):
    """Accumulate each worker's velocity, not its gradient, until it is sent.

    ``u_t = m·u_{t−1} + g_t``, ``v_t = v_{t−1} + u_t``, and v is compressed. With ``nesterov``
    ``u_t = m·(u_{t−1} + g_t)``, ``v_t = v_{t−1} + u_t + g_t``. Where an element of v is sent, that
    of u is set to zero too (*factor masking*): its stale momentum is dropped. A parameter of which
    every element is sent is never masked: nothing is delayed, and that equals SGD with momentum.

    For sparsifiers. A quantiser or a low-rank method sends every element, so all of u would be zero
    after each step: use ``LocalMomentum`` or ``GlobalMomentum`` with these. A
    scheme must encode each worker's own elements, which ``Hierarchical`` does not. ``TwoShot`` and
    ``TwoHop`` give a shard's owner the error of what it encodes for all, and its u is set to zero
    there too, though others may have sent it.

    Use plain SGD without momentum and without weight decay: both are done here, in the right order.
    Or AdamW with ``betas=(0.0, 0.999)``: its weight decay is not part of the gradient.
    Costs two float32 per parameter and worker, and temporarily two more.

    Args:
        momentum: m, in [0, 1). Higher averages over more steps.
        nesterov: Nesterov momentum, as ``torch.optim.SGD(nesterov=True)``.
        clip: maximal L2 norm of a parameter's gradient summed over independent workers: each
            worker's own is clipped to ``clip/√W``. None: no clipping. By parameter, as in the
            authors' code, not over the model, since buckets are exchanged one by one.
        weight_decay: λ of ``g + λ·w``, added after clipping and before the velocity, at least 0.
        masking: where u is set to zero. ``"sent"``: where something was sent, as in the paper and
            the authors' code. ``"sampled"``: where ``|v|`` exceeds the least magnitude of every
            hundredth element of the parameter, as a thesis on the method words it: nearly
            everywhere. ``"none"``: nowhere, so that momentum continues with delayed values.

    Law:
        Nothing is lost of the velocities: ``Σ mean_t + mean over workers of v_T`` is the sum over
        steps of the mean u_t.

    Raises:
        ValueError: a value outside these ranges; at fit start, an optimizer with momentum or weight
            decay; a compressor that is unbiased or no sparsifier, ``Hierarchical``.

    Example:
        >>> from lightning_gc import CompressedDDPStrategy, MomentumCorrection, TopK
        >>> memory = MomentumCorrection(momentum=0.9, nesterov=True, weight_decay=1e-4)
        >>> strategy = CompressedDDPStrategy(TopK(0.001, selection="sampled"), memory=memory)

    Reference:
        Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression", ICLR 2018.
    """

    nesterov: bool = False
    clip: float | None = None
    weight_decay: float = 0.0
    masking: Literal["sent", "sampled", "none"] = "sent"
    limits = {
        "clip": "(0, inf) a norm; 1.0, or None for no clipping",
        "weight_decay": "[0, inf); 0 for none, or 1e-4",
    }

    buffers = ("error", "momentum")
    space = (Range("momentum", 0.1, 0.9),)

    @property
    def reads_weights(self) -> bool:
        return self.weight_decay > 0

    def flow(self, bucket: Bucket, state: State, exchange: GradientExchange) -> Flow:
        velocity, total = state["momentum"], state["error"]
        gradient = self._gradient(bucket, velocity)
        if self.nesterov:
            velocity.add_(gradient).mul_(self.momentum)
            total.add_(gradient)
        else:
            velocity.mul_(self.momentum).add_(gradient)
        total.add_(velocity)
        if self.masking == "none":
            yield from exchange(total)
            return
        before = total.clone()
        yield from exchange(total)
        # Factor masking, unless the whole parameter was sent.
        stays = before == total
        waits = torch.logical_and(stays, before)
        sent = stays.logical_not_()
        for _, start, stop in bucket.spans():
            part = slice(start, stop)
            mask = sent[part] if self.masking == "sent" else _above_sample(before[part])
            velocity[part].masked_fill_(mask & waits[part].any(), 0)

    def _gradient(self, bucket: Bucket, like: Tensor) -> Tensor:
        """Return the gradient, clipped, with weight decay."""
        gradient = bucket.grad.to(like.dtype)
        if self.clip is None and not self.weight_decay:
            return gradient
        gradient = gradient.clone()
        for name, part in bucket.split(gradient).items():
            if self.clip is not None and part.numel():
                most = self.clip / math.sqrt(bucket.workers)
                part.copy_(_clipped(part, most))
            if self.weight_decay and name not in bucket.weights:
                raise ValueError(
                    f"{self} adds weight decay, but the value of {name} is not known: give "
                    f"Engine.flow(weights=...), as strategies do."
                )
            if self.weight_decay:
                part.add_(bucket.weights[name], alpha=self.weight_decay)
        return gradient

    def check(self, compressor: Compressor, scheme: Scheme | None) -> None:
        judge("MomentumCorrection", memory=self, compressor=compressor, scheme=scheme)
        super().check(compressor, scheme)

    def check_optimizer(self, group: Mapping[str, Any]) -> None:
        super().check_optimizer(group)
        decay = not group.get("decoupled_weight_decay") and group.get("weight_decay")
        judge("Optimizer", memory=self, momentum=None, adds=True, decay=decay)

    @classmethod
    def examples(cls) -> tuple[MomentumCorrection, ...]:
        return (cls(), cls(nesterov=True, clip=1.0), cls(masking="sampled"), cls(masking="none"))


def _clipped(part: Tensor, most: float) -> Tensor:
    """Return a gradient scaled to the L2 norm ``most`` if its own is larger."""
    # Squares of 1e-30 and 1e30 leave float32's range; squares of x / max do not.
    largest = part.abs().max()
    unit = part / largest.where(largest > 0, 1.0)
    length = torch.linalg.vector_norm(unit)
    return torch.where(largest * length > most, unit * (most / length), part)


def _above_sample(numbers: Tensor) -> Tensor:
    """Return which magnitudes exceed the least of a sample, of one in a hundred."""
    magnitudes = numbers.abs()
    return magnitudes > magnitudes[::100].sort().values[:1]
