"""CompressedFSDP: FSDP2 over all ranks, whose reduce-scatters are compressed.

Joined with the ``ModelParallelStrategy`` of either package in ``for_pytorch_lightning.py`` and
``for_lightning.py``.
"""

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.size_switch import MIN_NUMEL
from lightning_gc.exchange import Configuration
from lightning_gc.exchange.kernel_compilation import arithmetic, compile_kernels
from lightning_gc.exchange.peers import on_all_ranks
from lightning_gc.exchange.validation import (
    check_agreement,
    digest_of,
    refuse_sparse_gradients,
    refuse_unknown_device,
)
from lightning_gc.lightning.arguments import changed, refuse_unknown
from lightning_gc.lightning.sharded import ShardedStrategy
from lightning_gc.memories import Memory
from lightning_gc.sharded.fsdp_units import Unit, has_custom_scatters, units_of
from lightning_gc.sharded.reduce_scatter import ReduceScatter
from lightning_gc.sharded.shard_validation import refuse_unlike_scatters
from lightning_gc.sharded.sharded_workers import FSDPWorkers
from lightning_gc.sharded.unit_scatters import UnitScatters
from lightning_gc.transports.accounting import Recording
from lightning_gc.transports.distributed import Distributed, gather_text

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
        ValueError: a compressor with rounds of its own (PowerSGD) or that votes, a memory, an
            unknown argument; at fit start, on all ranks, a model without ``fully_shard``, on a mesh
            of other ranks or of two dimensions, with trained parameters outside, tensor
            parallelism, gradients reduced in float16, a reduce-scatter of its own or another
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
        Training", arXiv 2306.10209: qgZ, of which this is one hop.
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
        min_numel: int = MIN_NUMEL,
        **model_parallel_kwargs: Any,
    ) -> None:
        refuse_unknown(type(self), compressor, model_parallel_kwargs)
        check_settings(_OWNER, changed(type(self), model_parallel_kwargs))
        self._configure(
            compressor, memory, ReduceScatter(), None, seed, "full", "float32", min_numel
        )
        check_memory(_OWNER, self.compressor, self.memory, memory is not None)
        self._scatters: UnitScatters | None = None
        super().__init__(**model_parallel_kwargs)

    def _workers_of(self, configuration: Configuration) -> FSDPWorkers:
        return FSDPWorkers(configuration)

    def _replicas_of(self, ranks: int) -> int:
        return 1

    def setup_environment(self) -> None:
        """Join the other ranks; make a mesh whose ``"data_parallel"`` dimension is all of them."""
        super().setup_environment()
        if self.workers == 1:
            warnings.warn(
                f"{_OWNER} has one rank, so that nothing is exchanged or compressed. Give "
                f"Trainer(devices=2), say.",
                stacklevel=2,
            )

    def _warn_alone(self) -> None:
        """It has been warned of: FSDP2 scatters nothing to one rank, so nothing is compressed."""

    @property
    def _connected(self) -> bool:
        return self._scatters is not None

    def _connect(self) -> None:
        """Check the model on all ranks, and take over the reduce-scatters of its units."""
        self._close()
        self._failed = False
        model, device = self.model, self.root_device
        refuse_unknown_device(device)
        workers, group = self.local_workers, self.shard_group
        workers.shard, workers.shards = self.worker, self.workers
        on_all_ranks(partial(self._check_model, dist.get_process_group_ranks(group)), device)
        workers.name(model)
        units = units_of(model)
        self._check_agreement(units)
        transport = Distributed(group, "a reduce-scatter of gradients")
        recording = Recording(transport)
        workers.start([recording], revocable=False)
        compile_kernels(workers.first, device)
        workers.run = gather_text(workers.run, Distributed(), device)[0]
        self._scatters = UnitScatters(units, workers, transport, recording, self._prepare_round)
        self._on_engines_ready()

    def _check_model(self, ranks: list[int]) -> str:
        model = self.model
        refuse_sparse_gradients(model)
        refuse_unlike_scatters(model, ranks)
        return ""

    def _check_agreement(self, units: list[Unit]) -> None:
        workers, device = self.local_workers, self.root_device
        whole = {name: tuple(param.shape) for param, name in workers.names.items()}
        columns = [(unit, column) for unit in units for column in unit.columns()]
        of_units = {
            f"{unit.name} {unit.dtype} {workers.names[column.param]}": column.shape
            for unit, column in columns
        }
        same = workers.configuration.in_words() | {
            "names and shapes of parameters": digest_of(whole),
            "units": digest_of(of_units),
        }
        same |= arithmetic(device, workers.configuration.compressor)
        check_agreement(same, Distributed(), device)

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        if self._scatters is not None:
            self._scatters.refuse_interrupted()
        super().pre_backward(closure_loss)

    def _close(self) -> None:
        if self._scatters is not None:
            self._scatters.close()
        self._scatters = None
        super()._close()


def check_settings(owner: str, mesh_arguments: Mapping[str, Any]) -> None:
    """Raise RuntimeError for a torch that is too old; ValueError for arguments of a mesh.

    Args:
        owner: the class, for the sentence.
        mesh_arguments: ``ModelParallelStrategy``'s, but for those with their default, which
            LightningCLI gives.
    """
    if not has_custom_scatters():
        raise RuntimeError(
            f"{owner} needs torch 2.9 or later, whose FSDP2 has set_custom_reduce_scatter; this is "
            f"torch {torch.__version__}. Install a newer one, or use CompressedHSDPStrategy."
        )
    for name, fix in (
        ("data_parallel_size", "all ranks share the model; leave it out"),
        ("tensor_parallel_size", "tensor parallelism has not been tried with it; leave it out"),
    ):
        if name in mesh_arguments:
            raise ValueError(f"{owner}({name}={mesh_arguments[name]!r}): {fix}.")


def check_memory(owner: str, compressor: Compressor, memory: Memory, given: bool) -> None:
    """Raise ValueError for a memory that keeps anything: errors are of whole parameters here.

    Args:
        owner: the class, for the sentence.
        compressor: with its wrappers.
        memory: as given, or the compressor's own.
        given: whether the user has asked for it.
    """
    if not memory.buffers:
        return
    price = (
        "errors of whole parameters, 4 bytes for each of the model's on every rank, which is what "
        "FSDP is there to save, and which this strategy does not keep"
    )
    if given:
        raise ValueError(
            f"{owner}(memory={memory!r}): it would keep {price}. Leave it out and use an unbiased "
            f"compressor such as QSGD(8), or CompressedHSDPStrategy, whose errors are of shards."
        )
    raise ValueError(
        f"{owner}({compressor.method!r}): this method feeds back its errors by {memory!r}, which "
        f"would be {price}. Use an unbiased one such as QSGD(8), CompressedHSDPStrategy, whose "
        f"errors are of shards, or memory='none' to drop them knowingly."
    )
