"""CompressedDDP: Lightning's DDPStrategy with compressed gradient exchange.

Joined with the ``DDPStrategy`` of either package in ``for_pytorch_lightning.py`` and
``for_lightning.py``.
"""

from functools import partial
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_gc.attachment.attached import AttachedDDP
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.size_switch import MIN_NUMEL
from lightning_gc.controllers import Controller
from lightning_gc.core.combinations import judge
from lightning_gc.exchange.validation import check_agreement
from lightning_gc.exchange.verification import Verify, verification
from lightning_gc.exchange.workers import model_in_words
from lightning_gc.lightning.arguments import bucket_size, refuse_other_hooks, refuse_unknown
from lightning_gc.lightning.base import RealWorker
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.transports.distributed import Distributed


class CompressedDDP(RealWorker):
    """DDP that exchanges compressed gradients.

    Use it as ``Trainer(strategy=CompressedDDPStrategy(TopK(density=0.01)))``; the LightningModule
    need not change. Works on CPU over Gloo and on CUDA over NCCL, with every launcher and all other
    arguments of ``DDPStrategy``. By name: ``strategy="compressed_ddp"`` (bfloat16, the safe
    choice), ``"compressed_ddp_topk"`` and so on, after ``import lightning_gc``.

    Args:
        compressor: an instance, or a name from the registry.
        memory: the error feedback rule. Default: ``ErrorFeedback()`` for biased compressors,
            ``NoMemory()`` for unbiased ones.
        scheme: how payloads become a mean. Default: ``AllReduce()`` for linear compressors,
            ``AllGatherOrTwoShot()`` for quantisers, ``AllGather()`` for sparsifiers.
        controller: chooses levels, epoch by epoch; None keeps the compressor's own.
        seed: of the compressor's private random numbers, equal on all workers.
        state: errors in checkpoints. ``"full"``: every worker's, each in its own file in the folder
            ``lightning_gc_state`` beside the checkpoint, 4 bytes per parameter and worker; runs
            resume bit for bit. ``"mean"``: their mean, in the checkpoint itself, 4 bytes per
            parameter in all; the errors' mean over workers is preserved, not each worker's own.
            ``"off"``: none; errors begin at zero.
        state_dtype: ``"float32"``, or ``"bfloat16"`` for half the size at the price of rounding.
        verify: n: in every n-th step workers compare a digest of the mean gradients, and for n > 1
            of the weights, and stop with a ``ReplicaError`` that names who differs, before the
            optimizer's step (on CUDA, one step later). ``"payload"``: as 1, and every message has a
            checksum, so that a damaged one is not decoded but named with its sender. 0: neither.
        min_numel: tensors with fewer elements, and 1-D tensors, are sent uncompressed. 0 compresses
            every tensor, also 1-D ones. ``PerParameter(compressor)`` compresses every tensor too,
            and ``SizeSwitch(compressor, ...)`` has its own limits: with either, only the default is
            allowed. So it is with ``Identity``, ``Cast`` and compressors with a vote, such
            as ``SignSGD``, which compress every tensor.
        ddp_kwargs: as for ``DDPStrategy``: ``find_unused_parameters``, ``static_graph``,
            ``bucket_cap_mb``, ``start_method``, ``process_group_backend``, ``timeout``, ... Without
            ``bucket_cap_mb`` a GPU may get larger buckets than DDP's, by the model's size and by
            whether the method makes the host wait.

    Communication pattern:
        The hook queues each bucket for one background thread and returns a future at once; the
        thread has its own process group, so it never interleaves with DDP's collectives. All of its
        collectives have the strategy's ``timeout``; before the first, workers have at least a
        minute to join. With NCCL that is a second communicator beside DDP's, which is idle in a
        backward pass but for ``SyncBatchNorm`` and ``find_unused_parameters``; with these
        ``CUDA_DEVICE_MAX_CONNECTIONS=1`` is warned of. A dead or late peer is a ``PeerError`` over
        Gloo; NCCL's watchdog ends the process, see ``Distributed``.

    Raises:
        ValueError: a combination that cannot work, an unknown name, a communication hook of your
            own, an unknown argument or ``verify``, a controller that cannot set the compressor's
            knob, a strategy object that already belongs to a Trainer; at fit start, sparse
            embedding gradients, or workers that differ: in configuration, in versions of torch or
            Triton, or, with a low-rank method, in the model of their devices.
        RuntimeError: in a backward pass, a parameter that was unfrozen, added or replaced after the
            fit began, as by ``BaseFinetuning``; DDP would not exchange its gradient. Before an
            optimizer's step, gradients that have not been exchanged, as after ``loss.backward()``
            instead of ``self.manual_backward(loss)``.

    Warns:
        UserWarning: one worker: gradients are compressed, but nothing is sent.

    Example:
        >>> from lightning_gc import CompressedDDPStrategy, TopK
        >>> strategy = CompressedDDPStrategy(TopK(density=0.01), start_method="spawn")
        >>> strategy.memory, strategy.scheme
        (ErrorFeedback(decay=1.0, lr_aware=False, gain=1.0), AllGather())

    Attributes:
        engine: state and configuration, once fitting has started; kept between fits.
        recording: the byte and time account of this worker, while fitting.
    """

    def __init__(
        self,
        compressor: Compressor | str,
        memory: Memory | str | None = None,
        scheme: Scheme | str | None = None,
        controller: Controller | str | None = None,
        seed: int = 0,
        state: Literal["full", "mean", "off"] = "full",
        state_dtype: Literal["float32", "bfloat16"] = "float32",
        verify: Verify = 0,
        min_numel: int = MIN_NUMEL,
        **ddp_kwargs: Any,
    ) -> None:
        refuse_unknown(type(self), compressor, ddp_kwargs, DistributedDataParallel.__init__)
        refuse_other_hooks("CompressedDDPStrategy", ddp_kwargs, "Trainer(precision='bf16-mixed')")
        self._configure(compressor, memory, scheme, controller, seed, state, state_dtype, min_numel)
        verification(verify, "CompressedDDPStrategy")
        self.verify = verify
        super().__init__(**ddp_kwargs)

    def _setup_model(self, model: Any) -> DistributedDataParallel:
        """Wrap the module, after workers have compared theirs: DDP broadcasts by the own sizes."""
        check_agreement({}, Distributed(), self.root_device, model_in_words(model))
        waits = self.checkpoint_parts.workers.configuration.waits(self.world_size)
        with bucket_size(self, model, waits=waits):
            ddp: DistributedDataParallel = super()._setup_model(model)
        return ddp

    def _register_ddp_hooks(self) -> None:
        """Attach to the wrapped module; Lightning registers hooks on CUDA only."""
        ddp = self.model
        assert isinstance(ddp, DistributedDataParallel)
        self._refuse_static_manual(ddp)
        self._attach(partial(AttachedDDP, ddp))

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        if self._attached is not None and self.lightning_module.automatic_optimization:
            self._attached.before_pass()
        super().pre_backward(closure_loss)

    def _refuse_static_manual(self, ddp: DistributedDataParallel) -> None:
        automatic = self.lightning_module.automatic_optimization
        # The first step, which Lightning before 2.6 does not synchronise then.
        old = not hasattr(self, "_pl_static_graph_delay_done")
        judge("static_graph", static_graph=ddp.static_graph, automatic=automatic, old=old)
