"""CompressedHSDP and CompressedFSDP: FSDP2 with compressed exchanges, between nodes and within.

Joined with the ``ModelParallelStrategy`` of either package in ``for_pytorch_lightning.py`` and
``for_lightning.py``.
"""

import abc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist

from lightning_gc.attachment.attached import Attached, Setup
from lightning_gc.attachment.attached_shards import AttachedScatters, AttachedShards
from lightning_gc.checkpoint import shard_store
from lightning_gc.checkpoint.side_file_store import Kept
from lightning_gc.compressors import Compressor, Identity
from lightning_gc.controllers import Controller
from lightning_gc.core.combinations import judge
from lightning_gc.core.refusal import refuse
from lightning_gc.core.settings import parted, takes_fields
from lightning_gc.exchange import JOINING, Compression
from lightning_gc.exchange.automatic import IN_FSDP
from lightning_gc.exchange.validation import ELSEWHERE
from lightning_gc.lightning.arguments import FSDPFields, HSDPFields, changed, refuse_unknown
from lightning_gc.lightning.base import RealWorker
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.sharded import shard_validation
from lightning_gc.sharded.sharded_workers import FSDPWorkers, ShardedWorkers, replica_mesh
from lightning_gc.sharded.unit_gathers import Weights, weights_of
from lightning_gc.sharded.unit_scatters import ReduceScatter
from lightning_gc.sharded.weights_controller import with_weights

_HSDP, _FSDP = "CompressedHSDPStrategy", "CompressedFSDPStrategy"


class ShardedStrategy(RealWorker, abc.ABC):
    """R replicas of a model, each in shards on S·T ranks: their mesh, checks and checkpoints.

    A subclass connects to FSDP2's units when a fit begins.

    Attributes:
        tensor_parallel_size: T.
    """

    local_workers: ShardedWorkers
    tensor_parallel_size: int
    way_out = "give the strategy state='off', with which errors begin at zero"
    _kind_of_store = shard_store.ShardStore

    @abc.abstractmethod
    def _replicas_of(self, ranks: int) -> int:
        """Return R; ValueError if so many replicas cannot share the ranks."""

    @abc.abstractmethod
    def _attached_to(self, setup: Setup) -> Attached:
        """Check the model on all ranks, and listen to FSDP2's units."""

    def _setup_distributed(self) -> None:
        """Join the other ranks with a timeout of at least a minute, then set the user's."""
        with self._patiently():
            super()._setup_distributed()

    def setup_environment(self) -> None:
        """Join the other ranks; make a mesh with a replica as its ``"data_parallel"`` dimension."""
        ranks, tensor_ranks = self.num_nodes * self.num_processes, self.tensor_parallel_size
        if ranks % tensor_ranks:
            refuse(
                f"{type(self).__name__}(tensor_parallel_size={tensor_ranks}): {ranks} ranks are "
                f"not a multiple of it; use one of {', '.join(map(str, divisors_of(ranks)))}"
            )
        replicas = self._replicas_of(ranks // tensor_ranks)
        self._data_parallel_size, self._tensor_parallel_size = ranks, 1
        super().setup_environment()
        kind, timeout = self.root_device.type, self._timeout
        if kind == "cuda" and timeout is not None:  # ranks compile kernels at unlike times
            timeout = max(timeout, JOINING)
        shards = ranks // replicas // tensor_ranks
        self._device_mesh = replica_mesh(kind, replicas, shards, timeout, tensor_ranks)
        self.lightning_module._device_mesh = self._device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Each rank has its own data, also within one replica; tensor-parallel ranks share them."""
        ranks = self.tensor_parallel_size
        return {"num_replicas": self.workers // ranks, "rank": self.worker // ranks}

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn == "fit":
            self._attach(self._attached_to)

    @property
    def mesh_shape(self) -> shard_store.Mesh:
        """R, S and T."""
        replicas, shards, tensor_ranks = self._device_mesh.shape
        return replicas, shards, tensor_ranks

    @property
    def replicate_group(self) -> dist.ProcessGroup:
        """The ranks that have this rank's shards."""
        group: dist.ProcessGroup = self._device_mesh.get_group("replicate")
        return group

    @property
    def distributed_form(self) -> bool:
        """Whether a checkpoint is a folder."""
        return bool(self._save_distributed_checkpoint)

    @property
    def shard_parts(self) -> dict[str, shard_store.ShardPart]:
        """This rank's part of every trained parameter."""
        return self.local_workers.parts

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Restore weights and optimizers, and in a fit our state: Lightning has no later call.

        Raises:
            RuntimeError: on all ranks, before anything is loaded, if files are not those that were
                saved, or if torch could run code that they bring.
        """
        weights_only = args[0] if args else kwargs.get("weights_only")
        load = partial(super().load_checkpoint, checkpoint_path, *args, **kwargs)
        loaded: dict[str, Any] = self._store.load(
            checkpoint_path, weights_only, self._attached is not None, load
        )
        return loaded

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        if self._attached is not None:
            self._attached.before_pass()
        super().pre_backward(closure_loss)


def divisors_of(number: int) -> list[int]:
    """Return the numbers by which a number can be divided, itself the last."""
    return [each for each in range(1, number + 1) if number % each == 0]


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
        shard_validation.refuse_settings(_HSDP, "HSDP", changed(type(self), model_parallel_kwargs))
        if replicas != "auto" and not (type(replicas) is int and replicas >= 1):
            why = "give the number of replicas of the model, at least 1, or 'auto', one per node"
            refuse(_HSDP, why, replicas=replicas)
        shard_validation.check_bucket_cap(_HSDP, bucket_cap_mb)
        self.replicas, self.bucket_cap_mb = replicas, bucket_cap_mb
        self.tensor_parallel_size = tensor_parallel_size
        super().__init__(compressor, memory, scheme, controller, **model_parallel_kwargs)
        judge("Models in shards", _HSDP, controller=self.controller)
        shard_validation.check_tensor_parallel(_HSDP, tensor_parallel_size, self.compressor)

    def _replicas_of(self, ranks: int) -> int:
        return replicas_of(_HSDP, self.replicas, ranks, self.num_nodes)

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


@takes_fields(Compression, Kept, but=("compressor", "scheme", "state_dtype"))
class CompressedFSDP(ShardedStrategy):
    """FSDP that exchanges compressed gradients, compressed weights, or both.

    The model is sharded by FSDP2 over W ranks: all, or with ``tensor_parallel_size`` T those that
    have the same part of each layer. Where FSDP2 would reduce-scatter the gradient of
    a unit, each rank compresses the part that belongs to each other rank, sends it there, and
    averages in float32 what it gets for its own:
    ``mean_i = 1/W · Σ_j decode(encode(gradient_j[i]))``. Where FSDP2 would gather the weights of a
    unit, each rank compresses its shard, and all compute with the same decoded weights. The owner
    of a shard keeps its exact weights, which the optimizer steps and checkpoints hold.

    The LightningModule for Lightning's ``ModelParallelStrategy`` does not change: it calls
    ``fully_shard(module, mesh=self.device_mesh["data_parallel"])`` in ``configure_model``. By name:
    ``strategy="compressed_fsdp"`` (``QSGD(bits=8)``), ``"compressed_fsdp_natural_compression"`` and
    so on. Untested on GPUs: see the page "FSDP".

    Args:
        gradients: an unbiased compressor, as an instance or a name from the registry:
            ``QSGD(bits=8)``; fewer bits send less and add more noise. None: uncompressed.
        weights: a quantiser that loses little, such as ``Int8(block_size=256)``, or
            ``WeightDifferences()``, which keeps a copy of all weights on each rank. None:
            uncompressed, by FSDP2 itself. 1-D weights and those under ``min_numel`` are gathered
            exactly: biases, norms and small embeddings.
        controller: chooses levels of ``gradients``, as for ``CompressedHSDPStrategy``.
        weights_controller: chooses levels of ``weights``, between epochs: ``Schedule``,
            ``Plan`` or ``DynamicBitWidth``. It needs a quantiser with a level, such as
            ``weights=Uniform(8, block_size=64)``. None: weights keep their level.
        memory: error feedback in 8 bits, ``NarrowResidual("int8")``, at the price of 1.03 bytes per
            parameter of the model on every rank. Wider errors are refused: W times the shard, they
            would undo FSDP. None, or ``"none"`` for a biased compressor: errors are dropped.
        hops: 1, or 2: gradients are averaged within each node first, and their means are compressed
            again and exchanged between nodes. That sends 1/L of the bytes to other nodes.
        workers_per_node: L of two hops. None: the Trainer's ``devices``, divided by T.
        seed: of private random numbers, equal on all ranks; each draws its own by its rank, the
            parameter's name and the step. Runs resume bit for bit.
        state: errors in checkpoints. ``"full"``: every rank's, 4 bytes per parameter and rank.
            ``"mean"``: their mean. ``"off"``: none. No memory, no errors.
        verify: ``"payload"``: every message has a checksum, so that a damaged one is not decoded
            but named with its sender. Before each exchange ranks compare the number of the unit,
            which costs a message of 4 bytes. Ranks that use different units end with their names.
            A number of steps is refused: no two ranks have the same
            shard to compare.
        min_numel: as for ``CompressedDDPStrategy``, in elements of the full parameter; of parallel
            tensors, in elements of what a rank has.
        tensor_parallel_size: T, as for ``CompressedHSDPStrategy``.
        model_parallel_kwargs: as for ``ModelParallelStrategy``: ``save_distributed_checkpoint``,
            ``process_group_backend``, ``timeout``.

    Communication pattern:
        One all-to-all per unit (each ``fully_shard`` call makes one), when the backward pass has
        finished it, in FSDP2's order and on its process group and stream: ``(W−1)/W`` times the
        payload's bytes. Tensors that go dense are in the same messages, in the dtype in which
        gradients are reduced: as many bytes as in a reduce-scatter. All have the ``timeout``, on
        CUDA a minute at least. With ``weights``, one all-gather of payloads for each of FSDP2's:
        before the forward pass, and before the backward pass if the unit was resharded. With
        ``accumulate_grad_batches`` every micro-batch is exchanged, as Lightning's own strategy
        does, each with other random numbers.

    Raises:
        ValueError: nothing to compress, a compressor with several rounds (PowerSGD) or that votes,
            a memory of more than 8 bits, weights by a method that loses too much of them, a
            controller without a level to set, an unknown argument; at fit start, on all ranks, a
            model without ``fully_shard``, on a mesh of other ranks or of two dimensions, with
            trained parameters outside, tensors that T ranks cannot share equally, gradients reduced
            in float16, a custom reduce-scatter or another divisor; ranks with other settings or
            units.
        PeerError: ranks exchange different units, with ``verify="payload"``; on the host, with
            ``weights``, if the units have equal sizes.
        RuntimeError: torch before 2.9; in a backward pass, parameters that were unfrozen since or,
            with torch before 2.13, that have no gradient; a pass after one that was interrupted.

    Warns:
        UserWarning: a single rank, with which nothing is exchanged.

    Example:
        >>> from lightning_gc import QSGD, CompressedFSDPStrategy, Int8
        >>> strategy = CompressedFSDPStrategy(QSGD(bits=4), weights=Int8(block_size=256))
        >>> strategy.memory, strategy.scheme
        (NoMemory(), ReduceScatter(workers_per_node=1))

    Reference:
        Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model
        Training", arXiv 2306.10209: qwZ and qgZ. Errors in 8 bits: Xie et al., "LoCo", 2024.
        ``torch.distributed.fsdp.FSDPModule.set_custom_reduce_scatter``, ``set_custom_all_gather``.

    Attributes:
        engine: configuration and step of this rank, once fitting has started.
        recording: the byte and time account of this rank's exchanges, while fitting.
    """

    local_workers: FSDPWorkers
    way_out = "resume from another checkpoint"
    elsewhere = ELSEWHERE | {"compressor": "; it has two: write gradients=... or weights=..."}

    _way = replace(ShardedStrategy._way, no_choice=IN_FSDP)
    _kind = FSDPWorkers

    def __init__(
        self,
        gradients: Compressor | str | None = None,
        memory: Memory | str | None = None,
        *,
        weights: Weights | None = None,
        controller: Controller | str | None = None,
        weights_controller: Controller | str | None = None,
        hops: Literal[1, 2] = 1,
        workers_per_node: int | None = None,
        tensor_parallel_size: int = 1,
        **model_parallel_kwargs: Unpack[FSDPFields],
    ) -> None:
        compressor: Compressor | str = Identity() if gradients is None else gradients
        refuse_unknown(type(self), compressor, model_parallel_kwargs)
        shard_validation.refuse_settings(_FSDP, "FSDP", changed(type(self), model_parallel_kwargs))
        shard_validation.check_legs(_FSDP, gradients, weights, hops, workers_per_node)
        self.hops, self.workers_per_node = hops, workers_per_node
        self.weights, self.tensor_parallel_size = weights, tensor_parallel_size
        of_both = Compression(compressor, **parted(model_parallel_kwargs, Compression)[0])
        if gradients is None:
            model_parallel_kwargs["min_numel"] = Compression.min_numel
        scheme = ReduceScatter(workers_per_node or 1)
        super().__init__(compressor, memory, scheme, controller, **model_parallel_kwargs)
        judge("Models in shards", _FSDP, controller=self.controller)
        self._gathers = (
            None if weights is None else weights_of(_FSDP, weights, of_both.seed, of_both.min_numel)
        )
        self.controller = with_weights(_FSDP, self.controller, weights_controller, self._gathers)
        shard_validation.refuse_errors(_FSDP, self.compressor, self.memory, memory is not None)
        shard_validation.check_tensor_parallel(_FSDP, tensor_parallel_size, self.compressor)
        shard_validation.check_verify(_FSDP, self.verify)

    def _replicas_of(self, ranks: int) -> int:
        return 1

    @property
    def mesh_shape(self) -> shard_store.Mesh:
        """W, 1 and T: each rank has errors of full parameters, or of its blocks of them."""
        _, workers, tensor_ranks = self._device_mesh.shape
        return workers, 1, tensor_ranks

    @property
    def replicate_group(self) -> dist.ProcessGroup:
        """The ranks over which FSDP2 shards."""
        group: dist.ProcessGroup = self._device_mesh.get_group("data_parallel")
        return group

    def setup_environment(self) -> None:
        """Join the other ranks; know how many of them a node has."""
        if self.hops == 2 and self.workers_per_node is None:
            workers = self.local_workers
            near = max(self.num_processes // self.tensor_parallel_size, 1)
            scheme = self.scheme = ReduceScatter(near)
            workers.configuration = replace(workers.configuration, scheme=scheme)
        super().setup_environment()

    def _attached_to(self, setup: Setup) -> AttachedScatters:
        mesh, parallel = self._device_mesh, self.tensor_parallel_size > 1
        tensors = mesh.get_group("tensor_parallel") if parallel else None
        return AttachedScatters(
            self.model, setup, mesh.get_group("data_parallel"), self._gathers, tensors
        )
