"""CompressedDDP: Lightning's DDPStrategy with compressed gradient exchange.

Joined with the ``DDPStrategy`` of either package in ``for_pytorch_lightning.py`` and
``for_lightning.py``.
"""

from functools import partial
from typing import Any, Unpack

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_gc.attachment.attached import AttachedDDP
from lightning_gc.checkpoint.side_file_store import Kept
from lightning_gc.compressors import Compressor
from lightning_gc.controllers import Controller
from lightning_gc.core.combinations import judge
from lightning_gc.core.settings import takes_fields
from lightning_gc.exchange import Compression
from lightning_gc.exchange.validation import check_agreement
from lightning_gc.exchange.workers import model_in_words
from lightning_gc.lightning.arguments import (
    DDPFields,
    bucket_size,
    refuse_other_hooks,
    refuse_unknown,
)
from lightning_gc.lightning.base import RealWorker
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.transports.distributed import Distributed


@takes_fields(Compression, Kept)
class CompressedDDP(RealWorker):
    """DDP that exchanges compressed gradients.

    Use it as ``Trainer(strategy=CompressedDDPStrategy(TopK(density=0.01)))``; the LightningModule
    need not change. Works on CPU over Gloo and on CUDA over NCCL, with every launcher and all other
    arguments of ``DDPStrategy``. By name: ``strategy="compressed_ddp"`` (bfloat16, the safe
    choice), ``"compressed_ddp_topk"`` and so on, after ``import lightning_gc``.

    Args:
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
        **ddp_kwargs: Unpack[DDPFields],
    ) -> None:
        refuse_unknown(type(self), compressor, ddp_kwargs, DistributedDataParallel.__init__)
        refuse_other_hooks("CompressedDDPStrategy", ddp_kwargs, "Trainer(precision='bf16-mixed')")
        super().__init__(compressor, memory, scheme, controller, **ddp_kwargs)

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
        automatic = self.lightning_module.automatic_optimization
        # The first step, which Lightning before 2.6 does not synchronise then.
        old = not hasattr(self, "_pl_static_graph_delay_done")
        judge("static_graph", static_graph=ddp.static_graph, automatic=automatic, old=old)
        self._attach(partial(AttachedDDP, ddp))

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        if self._attached is not None and self.lightning_module.automatic_optimization:
            self._attached.before_pass()
        super().pre_backward(closure_loss)
