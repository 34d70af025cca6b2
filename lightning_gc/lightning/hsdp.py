"""CompressedHSDP: FSDP2 within nodes, and a compressed exchange of gradients between them.

Joined with the ``ModelParallelStrategy`` of either package in ``for_pytorch_lightning.py`` and
``for_lightning.py``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, Unpack

from lightning_gc.attachment.attached import Setup
from lightning_gc.attachment.attached_shards import AttachedShards
from lightning_gc.checkpoint.side_file_store import Kept
from lightning_gc.compressors import Compressor
from lightning_gc.controllers import Controller
from lightning_gc.core.combinations import judge
from lightning_gc.core.refusal import refuse
from lightning_gc.core.settings import takes_fields
from lightning_gc.exchange import Compression
from lightning_gc.lightning.arguments import HSDPFields, changed, refuse_unknown
from lightning_gc.lightning.sharded import ShardedStrategy, divisors_of
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.sharded import shard_validation
from lightning_gc.sharded.sharded_workers import ShardedWorkers

_OWNER = "CompressedHSDPStrategy"


@takes_fields(Compression, Kept)
class CompressedHSDP(ShardedStrategy):
    """HSDP that exchanges compressed gradients between replicas.

    The model is sharded by FSDP2 over the S ranks of a node, and each of R nodes has a replica of
    it. A backward pass reduces gradients within the node, dense; then each rank exchanges its shard
    with the same rank of the other nodes, compressed and with error feedback. The LightningModule
    is the same as for Lightning's ``ModelParallelStrategy``: it calls
    ``fully_shard(module, mesh=self.device_mesh["data_parallel"])`` in ``configure_model``, which
    means the node here. With ``tensor_parallel_size`` T, T ranks of a node have each layer
    together, as ``parallelize_module`` cuts it over ``self.device_mesh["tensor_parallel"]``, and
    FSDP2 shards what each of them has. By name: ``strategy="compressed_hsdp"`` (bfloat16),
    ``"compressed_hsdp_topk"`` and so on. Untested on several GPUs: see the page "HSDP".

    Args:
        compressor: an instance, or a name from the registry. It works on shards, each with its own
            random numbers; a low-rank method factors each shard.
        memory: the error feedback rule, the compressor's default if left out. Errors take 4 bytes
            per element of the shard, as much as a moment of Adam's.
        controller: chooses levels, epoch by epoch; it sees full parameters.
        replicas: R; R·T must divide the number of ranks. ``"auto"``: the number of nodes.
        tensor_parallel_size: T; consecutive ranks, which get the same batches.
        bucket_cap_mb: megabytes of a rank's shard from which on a bucket is full. FSDP2's units are
            joined into buckets; a larger one costs fewer rounds, and begins later.
        state: errors in checkpoints. ``"full"``: every replica's, 4 bytes per parameter and
            replica; runs resume bit for bit, and on another mesh with the errors resharded, or
            their mean. ``"mean"``: their mean over replicas only. ``"off"``: none.
        verify: as for ``CompressedDDPStrategy``: replicas compare the means and weights of their
            shards. Ranks that have them stop with a ``ReplicaError``, all others with a
            ``PeerError``.
        min_numel: as for ``CompressedDDPStrategy``, in elements of the full parameter; of parallel
            tensors, in elements of what a rank has.
        model_parallel_kwargs: as for ``ModelParallelStrategy``: ``save_distributed_checkpoint``,
            ``process_group_backend``, ``timeout``.

    Communication pattern:
        Between nodes one background thread on each rank exchanges buckets over a process group of
        its own, while the backward pass continues; the pass ends when all means have arrived. With
        ``accumulate_grad_batches`` the node reduces in every micro-batch and nodes exchange in the
        last one only. Parameters without a gradient in a step, in units that took part in none
        either, are exchanged as zeros and get a gradient, maybe of zeros.

    Raises:
        ValueError: what ``CompressedDDPStrategy`` refuses; a number of replicas that does not
            divide the number of ranks; at fit start, on all ranks, a model without ``fully_shard``,
            on another mesh than the node's, with trained parameters outside, tensors that T ranks
            cannot share equally, ``CPUOffloadPolicy``, another all-reduce hook or gradients reduced
            in float16; with parallel tensors, a method that looks at the whole model, as ModelTopK.
        RuntimeError: torch before 2.7; in a backward pass, parameters that were unfrozen since or,
            with torch before 2.13, that have no gradient.

    Warns:
        UserWarning: a single replica, with which gradients are compressed, but nothing is sent.

    Example:
        >>> from lightning_gc import CompressedHSDPStrategy, TopK
        >>> strategy = CompressedHSDPStrategy(TopK(density=0.01), replicas=2)
        >>> strategy.memory, strategy.scheme
        (ErrorFeedback(decay=1.0, lr_aware=False, gain=1.0), AllGather())

    Attributes:
        engine: state and configuration of this rank's shards, once fitting has started.
        recording: the byte and time account of this rank's leg between nodes, while fitting.
    """

    _way = replace(
        ShardedStrategy._way, more_workers="give replicas=2, say, or Trainer(num_nodes=...)"
    )
    _kind = ShardedWorkers

    def __init__(
        self,
        compressor: Compressor | str,
        memory: Memory | str | None = None,
        scheme: Scheme | str | None = None,
        controller: Controller | str | None = None,
        *,
        replicas: int | Literal["auto"] = "auto",
        bucket_cap_mb: float = 25,
        tensor_parallel_size: int = 1,
        **model_parallel_kwargs: Unpack[HSDPFields],
    ) -> None:
        refuse_unknown(type(self), compressor, model_parallel_kwargs)
        shard_validation.refuse_settings(_OWNER, "HSDP", changed(type(self), model_parallel_kwargs))
        if replicas != "auto" and not (type(replicas) is int and replicas >= 1):
            why = "give the number of replicas of the model, at least 1, or 'auto', one per node"
            refuse(_OWNER, why, replicas=replicas)
        shard_validation.check_bucket_cap(_OWNER, bucket_cap_mb)
        self.replicas, self.bucket_cap_mb = replicas, bucket_cap_mb
        self.tensor_parallel_size = tensor_parallel_size
        super().__init__(compressor, memory, scheme, controller, **model_parallel_kwargs)
        judge("Models in shards", _OWNER, controller=self.controller)
        shard_validation.check_tensor_parallel(_OWNER, tensor_parallel_size, self.compressor)

    def _replicas_of(self, ranks: int) -> int:
        return replicas_of(_OWNER, self.replicas, ranks, self.num_nodes)

    def _attached_to(self, setup: Setup) -> AttachedShards:
        return AttachedShards(self.model, setup, self._device_mesh, self.bucket_cap_mb)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Add up gradients of micro-batches; nodes exchange in the last one."""
        assert isinstance(self._attached, AttachedShards)
        with self._attached.accumulating():
            yield


def replicas_of(owner: str, replicas: Any, ranks: int, nodes: int) -> int:
    """Return R; ValueError if so many replicas cannot share the ranks equally."""
    number = nodes if replicas == "auto" else int(replicas)
    if ranks % number:
        refuse(
            f"{owner}(replicas={replicas!r}): {ranks} ranks cannot be shared out equally among "
            f"{number} replicas; use one of {', '.join(map(str, divisors_of(ranks)))}"
        )
    return number
