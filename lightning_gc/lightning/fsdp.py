"""CompressedFSDP: FSDP2 over all ranks with compressed reduce-scatters and all-gathers.

Joined with the ``ModelParallelStrategy`` of either package in ``for_pytorch_lightning.py`` and
``for_lightning.py``.
"""

from dataclasses import replace
from typing import Literal, Unpack

import torch.distributed as dist

from lightning_gc.attachment.attached import Setup
from lightning_gc.attachment.attached_shards import AttachedScatters
from lightning_gc.checkpoint.shard_store import Mesh
from lightning_gc.checkpoint.side_file_store import Kept
from lightning_gc.compressors import Compressor, Identity
from lightning_gc.controllers import Controller
from lightning_gc.core.combinations import judge
from lightning_gc.core.settings import parted, takes_fields
from lightning_gc.exchange import Compression
from lightning_gc.exchange.automatic import IN_FSDP
from lightning_gc.exchange.validation import ELSEWHERE
from lightning_gc.lightning.arguments import FSDPFields, changed, refuse_unknown
from lightning_gc.lightning.sharded import ShardedStrategy
from lightning_gc.memories import Memory
from lightning_gc.sharded import shard_validation
from lightning_gc.sharded.sharded_workers import FSDPWorkers
from lightning_gc.sharded.unit_gathers import Weights, weights_of
from lightning_gc.sharded.unit_scatters import ReduceScatter
from lightning_gc.sharded.weights_controller import with_weights

_OWNER = "CompressedFSDPStrategy"


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
        shard_validation.refuse_settings(_OWNER, "FSDP", changed(type(self), model_parallel_kwargs))
        shard_validation.check_legs(_OWNER, gradients, weights, hops, workers_per_node)
        self.hops, self.workers_per_node = hops, workers_per_node
        self.weights, self.tensor_parallel_size = weights, tensor_parallel_size
        of_both = Compression(compressor, **parted(model_parallel_kwargs, Compression)[0])
        if gradients is None:
            model_parallel_kwargs["min_numel"] = Compression.min_numel
        scheme = ReduceScatter(workers_per_node or 1)
        super().__init__(compressor, memory, scheme, controller, **model_parallel_kwargs)
        judge("Models in shards", _OWNER, controller=self.controller)
        self._gathers = (
            None
            if weights is None
            else weights_of(_OWNER, weights, of_both.seed, of_both.min_numel)
        )
        self.controller = with_weights(_OWNER, self.controller, weights_controller, self._gathers)
        shard_validation.refuse_errors(_OWNER, self.compressor, self.memory, memory is not None)
        shard_validation.check_tensor_parallel(_OWNER, tensor_parallel_size, self.compressor)
        shard_validation.check_verify(_OWNER, self.verify)

    def _replicas_of(self, ranks: int) -> int:
        return 1

    @property
    def mesh_shape(self) -> Mesh:
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
