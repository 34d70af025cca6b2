"""Scheme: base class of the communication patterns by which codecs' payloads become a mean."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import Collective, Compressor, dense
from lightning_gc.compressors.joint import Joint, WholeCodec
from lightning_gc.core import Bucket, Exchange, Flow, Limits, Payload
from lightning_gc.core.combinations import judge
from lightning_gc.core.settings import Settings


class Scheme(Settings, abc.ABC):
    """Turns a codec into a flow. Knows no codec by name.

    Laws, each held by a test of the same number in ``lightning_gc.testing``:

    1. The result is the mean over workers of what each sent: what the scheme itself rounds away is
       added to one worker's error.
    2. All workers decode the result from the same bytes, so replicas stay bit-identical.
    3. A codec that cannot work is refused at construction.

    Attributes:
        averages: payloads are averaged before decoding, so the codec must be linear.
        averages_first: what is encoded is a mean over several workers' gradients.
        cuts: tensors may be cut into shards, each with its own payload.
        scatters: each worker gets its own shard of each parameter's mean, as with FSDP, and what is
            sent dense goes through ``dense`` too.
        waits: how often the scheme itself makes the host wait for an accelerator, for each bucket;
            besides, every message of varying length does so once.
    """

    averages: bool = False
    averages_first: bool = False
    cuts: bool = False
    scatters: bool = False
    waits: int = 0

    @abc.abstractmethod
    def flow(self, codec: WholeCodec, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        """Move the payload out of ``buffer``, exchange it and write the mean to ``out``."""

    def dense(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        """Send ``buffer`` as it is, and write the mean to ``out``."""
        yield from dense(buffer, out)

    def joint(self, workers: int) -> Joint:
        """Return how parameters of a bucket may share a payload among W workers.

        ``"parts"`` if the result is the same where parts of a tensor are encoded together.
        ``"shards"`` if a tensor is cut into W equal shards, and the result is the same where shards
        of several tensors are encoded together. ``"ranges"`` if the scheme cuts each part where
        selected elements lie. ``"no"`` otherwise.
        """
        return "no"

    def encodings(self, workers: int) -> int:
        """Return how many times a worker encodes a tensor, or a part of it, in a step."""
        return 1

    def neighbours(self, workers: int) -> int:
        """Return how many workers with consecutive numbers are a node, to whom bytes are free."""
        return 1

    def misplaced(self, hosts: Sequence[str]) -> str | None:
        """Return what is wrong with workers on these machines, in worker order; None: nothing."""
        return None

    def check(self, compressor: Compressor) -> None:
        """Raise ValueError if the compressor cannot be used with this scheme."""
        own_rounds = isinstance(compressor.method, Collective)
        judge("Scheme", scheme=self, compressor=compressor, own_rounds=own_rounds)


@dataclass(frozen=True)
class NodeScheme(Scheme):
    """A scheme that averages in each node first; consecutive workers are a node."""

    workers_per_node: int = 8
    limits = {"workers_per_node": "[1, inf) each machine's number of workers"}

    cuts = True

    def check(self, compressor: Compressor) -> None:
        super().check(compressor)
        judge("Hierarchical and TwoHop", scheme=self, compressor=compressor)


def padded(flat: Tensor, index: int, size: int) -> tuple[Tensor, Tensor]:
    """Return shard ``index`` and its copy padded to ``size``, or twice itself if it is full."""
    shard = flat[index * size : (index + 1) * size]
    short = size - shard.numel()
    return shard, torch.nn.functional.pad(shard, (0, short)) if short else shard


def unpad(whole: Tensor, shard: Tensor) -> None:
    """Copy a padded shard back, if it is one."""
    if whole is not shard:
        shard.copy_(whole[: shard.numel()])


def toward(
    receivers: Sequence[int], payloads: Sequence[Payload], workers: int, limits: Limits
) -> Exchange:
    """Return the request that sends each receiver its payload, and others nothing."""
    nothing = tuple(tensor[:0] for tensor in payloads[0])
    to_all = [nothing] * workers
    for receiver, payload in zip(receivers, payloads, strict=True):
        to_all[receiver] = payload
    return Exchange(tuple(to_all), limits)


def book(buffer: Tensor, start: int, error: Tensor, times: int) -> None:
    """Add an encoding's error to the worker's own, so many times, from ``start`` on.

    An element with a sum beyond float32 becomes zero, as the engine does with kept errors.
    """
    mine = buffer[start : start + error.numel()]
    # NaN and overflow from other workers are in the payload, and are added to no error.
    mine.add_(error[: mine.numel()].nan_to_num_(0.0, 0.0, 0.0), alpha=times)
    mine.nan_to_num_(0.0, 0.0, 0.0)
