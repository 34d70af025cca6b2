"""CompressedHSDP: FSDP2 within nodes, and a compressed exchange of gradients between them.

Joined with the ``ModelParallelStrategy`` of either package in ``for_pytorch_lightning.py`` and
``for_lightning.py``.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch

from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.size_switch import MIN_NUMEL
from lightning_gc.controllers import Controller
from lightning_gc.exchange import Configuration
from lightning_gc.exchange.peers import Peers
from lightning_gc.exchange.validation import warn_of_one_worker
from lightning_gc.lightning.arguments import changed, refuse_unknown
from lightning_gc.lightning.sharded import ShardedStrategy
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.sharded.fsdp_units import has_hooks
from lightning_gc.sharded.shard_exchange import ShardExchange
from lightning_gc.sharded.shard_validation import check_bucket_cap, refuse_whole_gradients
from lightning_gc.sharded.sharded_workers import ShardedWorkers

_OWNER = "CompressedHSDPStrategy"


class CompressedHSDP(ShardedStrategy):
    """HSDP whose replicas exchange compressed gradients.

    The model is sharded by FSDP2 over the S ranks of a node, and each of R nodes has a replica of
    it. A backward pass reduces gradients within the node, dense; then each rank exchanges its
    shard with the same rank of the other nodes, compressed and with error feedback. The
    LightningModule is that of Lightning's ``ModelParallelStrategy``, unchanged: it calls
    ``fully_shard(module, mesh=self.device_mesh["data_parallel"])`` in ``configure_model``, which
    means the node here. By name: ``strategy="compressed_hsdp"`` (bfloat16),
    ``"compressed_hsdp_topk"`` and so on. Untested on several GPUs: see the page "HSDP".

    Args:
        compressor: as for ``CompressedDDPStrategy``, like the next three. It works on shards, each
            with random numbers of its own; a low-rank method factors each shard.
        memory: the error feedback rule. Errors take 4 bytes per element of the shard, as much as a
            moment of Adam's.
        scheme: how payloads become a mean.
        controller: chooses levels, epoch by epoch; it sees whole parameters.
        seed: of the compressor's private random numbers, equal on all ranks.
        replicas: R; it must divide the number of ranks. ``"auto"``: the number of nodes.
        bucket_cap_mb: megabytes of a rank's shard from which on a bucket is full. FSDP2's units are
            joined into buckets; a larger one costs fewer rounds, and begins later.
        state: errors in checkpoints. ``"full"``: every replica's, 4 bytes per parameter and
            replica; runs resume bit for bit, and on another mesh with the errors resharded, or
            their mean. ``"mean"``: their mean over replicas only. ``"off"``: none.
        state_dtype: ``"float32"``, or ``"bfloat16"`` for half the size at the price of rounding.
        min_numel: as for ``CompressedDDPStrategy``, in elements of the full parameter.
        model_parallel_kwargs: as for ``ModelParallelStrategy``: ``save_distributed_checkpoint``,
            ``process_group_backend``, ``timeout``.

    Communication pattern:
        Between nodes one background thread on each rank exchanges buckets over a process group of
        its own, while the backward pass goes on; the pass ends when all means have arrived. With
        ``accumulate_grad_batches`` the node reduces in every micro-batch and nodes exchange in the
        last one only. Parameters without a gradient in a step, in units that took part in none
        either, are exchanged as zeros and get a gradient, maybe of zeros.

    Raises:
        ValueError: what ``CompressedDDPStrategy`` refuses; a number of replicas that does not
            divide the number of ranks; at fit start, on all ranks, a model without ``fully_shard``,
            on another mesh than the node's, with trained parameters outside, tensor parallelism,
            ``CPUOffloadPolicy``, a hook of its own or gradients reduced in float16.
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

    def __init__(
        self,
        compressor: Compressor | str,
        memory: Memory | str | None = None,
        scheme: Scheme | str | None = None,
        controller: Controller | None = None,
        seed: int = 0,
        replicas: int | Literal["auto"] = "auto",
        bucket_cap_mb: float = 25,
        state: Literal["full", "mean", "off"] = "full",
        state_dtype: Literal["float32", "bfloat16"] = "float32",
        min_numel: int = MIN_NUMEL,
        **model_parallel_kwargs: Any,
    ) -> None:
        refuse_unknown(type(self), compressor, model_parallel_kwargs)
        check_settings(_OWNER, replicas, bucket_cap_mb, changed(type(self), model_parallel_kwargs))
        self.replicas, self.bucket_cap_mb = replicas, bucket_cap_mb
        refuse_whole_gradients(_OWNER, controller)
        self._configure(compressor, memory, scheme, controller, seed, state, state_dtype, min_numel)
        self._exchange: ShardExchange | None = None
        super().__init__(**model_parallel_kwargs)

    def _workers_of(self, configuration: Configuration) -> ShardedWorkers:
        return ShardedWorkers(configuration)

    def _replicas_of(self, ranks: int) -> int:
        return replicas_of(_OWNER, self.replicas, ranks, self.num_nodes)

    def _warn_alone(self) -> None:
        alone = f"{_OWNER} has one replica on {self.workers} ranks: nothing is sent between nodes"
        fix = "give replicas=2, say, or Trainer(num_nodes=...)"
        warn_of_one_worker(self.compressor, alone, "gradients", fix)

    @property
    def _connected(self) -> bool:
        return self._exchange is not None

    def _connect(self) -> None:
        """Check the model on all ranks, let replicas start alike, and listen to FSDP2's units."""
        self._close()
        self._failed = False
        self._exchange = ShardExchange(
            self.model,
            self.local_workers,
            self.shard_group,
            self.replicate_group,
            self._device_mesh.mesh.flatten(1).t().tolist(),
            self.root_device,
            mesh_dims=1,
            bucket_cap_mb=self.bucket_cap_mb,
            agreed={"controller": repr(self.controller)},
            timeout=self._timeout,
            before_round=self._prepare_round,
        )
        self._synchronizer, self.parts = self._exchange.synchronizer, self._exchange.parts
        self._on_engines_ready()

    def _peers(self) -> Peers:
        mean = partial(self.reduce, group=self.replicate_group, reduce_op="mean")
        return Peers(self.worker == 0, self.root_device, mean, self.parts)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Add up gradients of micro-batches; nodes exchange in the last one."""
        assert self._exchange is not None
        with self._exchange.buckets.accumulating():
            yield

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        if self._exchange is not None:
            self._exchange.buckets.refuse_interrupted()
        super().pre_backward(closure_loss)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)
        if self._exchange is not None:
            self._exchange.synchronizer.check()

    def figures(self) -> dict[str, float]:
        """Return the bytes that this rank has sent within the node for the last exchange."""
        if self._exchange is None:
            return {}
        return {"node_bytes": float(self._exchange.buckets.node_bytes)}

    def _close(self) -> None:
        if self._exchange is not None:
            self._exchange.buckets.close()
        self._exchange = None
        super()._close()


def check_settings(
    owner: str, replicas: Any, bucket_cap_mb: Any, mesh_arguments: Mapping[str, Any]
) -> None:
    """Raise ValueError for settings that cannot be; RuntimeError for a torch without the hook.

    Args:
        owner: the class, for the sentence.
        replicas: as given, like the next.
        bucket_cap_mb: megabytes.
        mesh_arguments: ``ModelParallelStrategy``'s, but for those with their default, which
            LightningCLI gives.
    """
    if not has_hooks():
        raise RuntimeError(
            f"{owner} needs torch 2.7 or later, whose FSDP2 has set_all_reduce_hook; this is torch "
            f"{torch.__version__}. Install a newer one, or use CompressedDDPStrategy."
        )
    if replicas != "auto" and not (type(replicas) is int and replicas >= 1):
        raise ValueError(
            f"{owner}(replicas={replicas!r}): give the number of replicas of the model, at least "
            f"1, or 'auto', one per node."
        )
    check_bucket_cap(owner, bucket_cap_mb)
    for name, fix in (
        ("data_parallel_size", "it follows from replicas; leave it out"),
        ("tensor_parallel_size", "tensor parallelism has not been tried with it; leave it out"),
    ):
        if name in mesh_arguments:
            raise ValueError(f"{owner}({name}={mesh_arguments[name]!r}): {fix}.")


def replicas_of(owner: str, replicas: Any, ranks: int, nodes: int) -> int:
    """Return R; ValueError if so many replicas cannot share the ranks equally."""
    number = nodes if replicas == "auto" else int(replicas)
    if ranks % number:
        divisors = [str(each) for each in range(1, ranks + 1) if ranks % each == 0]
        raise ValueError(
            f"{owner}(replicas={replicas!r}): {ranks} ranks cannot be shared out equally among "
            f"{number} replicas; use one of {', '.join(divisors)}."
        )
    return number
