"""CompressedFSDP: FSDP2 over all ranks with compressed reduce-scatters.

Joined with the ``ModelParallelStrategy`` of either package in ``for_pytorch_lightning.py`` and
``for_lightning.py``.
"""

from typing import Any, Literal

from lightning_gc.attachment.attached import Setup
from lightning_gc.attachment.attached_shards import AttachedScatters
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.size_switch import MIN_NUMEL
from lightning_gc.exchange import Configuration
from lightning_gc.lightning.arguments import changed, refuse_unknown
from lightning_gc.lightning.sharded import ShardedStrategy
from lightning_gc.memories import Memory
from lightning_gc.sharded.shard_validation import refuse_errors, refuse_settings
from lightning_gc.sharded.sharded_workers import FSDPWorkers
from lightning_gc.sharded.unit_scatters import ReduceScatter

_OWNER = "CompressedFSDPStrategy"


class CompressedFSDP(ShardedStrategy):
    """FSDP whose ranks send each other compressed gradients, and keep no errors.

    The model is sharded by FSDP2 over all W ranks. Where FSDP2 would reduce-scatter the gradient of
    a unit, each rank compresses the part that belongs to each other rank, sends it there, and
    averages in float32 what it gets for its own:
    ``mean_i = 1/W · Σ_j decode(encode(gradient_j[i]))``. The LightningModule is that of Lightning's
    ``ModelParallelStrategy``, unchanged: it calls
    ``fully_shard(module, mesh=self.device_mesh["data_parallel"])`` in ``configure_model``. By name:
    ``strategy="compressed_fsdp"`` (``QSGD(bits=8)``), ``"compressed_fsdp_natural_compression"`` and
    so on. Untested on GPUs: see the page "FSDP".

    Args:
        compressor: an unbiased one, as an instance or a name from the registry: ``QSGD(bits=8)``;
            fewer bits send less and add more noise.
        memory: None, or ``"none"`` for a biased compressor, whose errors are then dropped. Error
            feedback is refused: its errors would be of whole parameters on every rank, 4 bytes
            each, W times the shard.
        seed: of private random numbers, equal on all ranks; each draws its own by its rank, the
            parameter's name and the step. They are all of the state, so runs resume bit for bit.
        verify: ``"payload"``: every message has a checksum, so that a damaged one is not decoded
            but named with its sender. A number of steps is refused: no two ranks have the same
            shard to compare.
        min_numel: as for ``CompressedDDPStrategy``, in elements of the full parameter.
        model_parallel_kwargs: as for ``ModelParallelStrategy``: ``save_distributed_checkpoint``,
            ``process_group_backend``, ``timeout``.

    Communication pattern:
        One all-to-all per unit (each ``fully_shard`` call makes one), when the backward pass has
        finished it, in FSDP2's order and on its process group and stream: ``(W−1)/W`` times the
        payload's bytes. Tensors that go dense are in the same messages, in the dtype in which
        gradients are reduced: as many bytes as in a reduce-scatter. All have the ``timeout``, on
        CUDA a minute at least. The all-gathers of weights stay dense. With
        ``accumulate_grad_batches`` every micro-batch is exchanged, as Lightning's own strategy
        does, each with other random numbers.

    Raises:
        ValueError: a compressor with several rounds (PowerSGD) or that votes, a memory, an
            unknown argument; at fit start, on all ranks, a model without ``fully_shard``, on a mesh
            of other ranks or of two dimensions, with trained parameters outside, tensor
            parallelism, gradients reduced in float16, a custom reduce-scatter or another
            divisor; ranks with other settings or units.
        RuntimeError: torch before 2.9; in a backward pass, parameters that were unfrozen since or,
            with torch before 2.13, that have no gradient; a pass after one that was interrupted.

    Warns:
        UserWarning: a single rank, with which nothing is exchanged.

    Example:
        >>> from lightning_gc import QSGD, CompressedFSDPStrategy
        >>> strategy = CompressedFSDPStrategy(QSGD(bits=8))
        >>> strategy.memory, strategy.scheme
        (NoMemory(), ReduceScatter())

    Reference:
        Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model
        Training", arXiv 2306.10209: one hop of its qgZ.
        ``torch.distributed.fsdp.FSDPModule.set_custom_reduce_scatter``.

    Attributes:
        engine: configuration and step of this rank, once fitting has started.
        recording: the byte and time account of this rank's exchanges, while fitting.
    """

    local_workers: FSDPWorkers
    way_out = "resume from another checkpoint"

    def __init__(
        self,
        compressor: Compressor | str,
        memory: Memory | str | None = None,
        seed: int = 0,
        verify: Literal[0, "payload"] = 0,
        min_numel: int = MIN_NUMEL,
        **model_parallel_kwargs: Any,
    ) -> None:
        refuse_unknown(type(self), compressor, model_parallel_kwargs)
        refuse_settings(_OWNER, "FSDP", changed(type(self), model_parallel_kwargs))
        self._configure(
            compressor, memory, ReduceScatter(), None, seed, "full", "float32", min_numel
        )
        refuse_errors(_OWNER, self.compressor, self.memory, memory is not None)
        if verify not in (0, "payload") or isinstance(verify, bool):
            raise ValueError(
                f"{_OWNER}(verify={verify!r}): each rank gets the mean of another shard, so no two "
                f"ranks can compare. Give 'payload' to compare a checksum of every "
                f"message, or 0."
            )
        self.verify = verify
        super().__init__(**model_parallel_kwargs)

    def _workers_of(self, configuration: Configuration) -> FSDPWorkers:
        return FSDPWorkers(configuration)

    def _replicas_of(self, ranks: int) -> int:
        return 1

    def _attached_to(self, setup: Setup) -> AttachedScatters:
        return AttachedScatters(self.model, setup, self._device_mesh)
