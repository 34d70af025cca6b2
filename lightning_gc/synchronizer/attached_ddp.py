"""AttachedDDP: compressed exchange of a DistributedDataParallel module, without Lightning."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_gc.controllers import Controller
from lightning_gc.synchronizer import Configuration, Synchronizer, Workers
from lightning_gc.synchronizer.attached import Attached
from lightning_gc.synchronizer.attached_settings import check_settings
from lightning_gc.synchronizer.module_hooks import ModuleHook
from lightning_gc.synchronizer.one_worker import warn_of_one_worker
from lightning_gc.synchronizer.parts import Parts
from lightning_gc.synchronizer.two_communicators import warn_of_one_queue
from lightning_gc.synchronizer.validation import (
    refuse_second_hook,
    refuse_sparse_gradients,
    refuse_static_accumulation,
    refuse_unsynchronised,
)
from lightning_gc.synchronizer.verification import Verify


class AttachedDDP(Attached):
    """Handle of a ``DistributedDataParallel`` module, by its communication hook.

    Args:
        ddp: the module; the others as for ``attach``.
        configuration: compressor, memory and scheme.
        controller: or None.
        optimizers: of the module's parameters.
        scaler: of fp16 training.
        timeout: of every collective.
        verify: what workers compare.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        configuration: Configuration,
        controller: Controller | None,
        optimizers: list[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler | None,
        timeout: timedelta | None,
        verify: Verify,
    ) -> None:
        check_settings(configuration, controller, optimizers)
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        refuse_second_hook(ddp)
        refuse_sparse_gradients(ddp.module)
        warn_of_one_queue(ddp)
        workers = Workers(configuration)
        workers.name(ddp.module)
        device = next(iter(workers.names)).device
        synchronizer = Synchronizer(
            workers,
            device,
            ddp.process_group,
            timeout,
            before_round=partial(workers.prepare_round, scaler, optimizers),
            revocable=scaler is not None,
            agreed={"controller": repr(controller)},
            verify=verify,
        )
        group = ddp.process_group
        try:
            super().__init__(
                workers, synchronizer, controller, optimizers, device, group, group, Parts()
            )
            ddp.register_comm_hook(None, ModuleHook(synchronizer.hook).exchange)
        except BaseException:  # such as that of a module that has a hook already
            self._open.discard(self)
            synchronizer.close(failed=True)
            raise
        if workers.first.workers == 1:
            fix = "use more workers, or DDP as it is"
            compressor = configuration.compressor
            warn_of_one_worker(compressor, "One worker: nothing is sent", "gradients", fix)
        # Not by the communication hook, which is not called if all that is trained is new.
        # Before DDP's own collectives, in which this worker would wait for peers that wait for it.
        before = ddp.register_forward_pre_hook(ModuleHook(self._check_before).watch)
        after = ddp.register_forward_hook(ModuleHook(self._refuse_unsynchronised).watch)
        self._watching = (before, after)

    def _check_before(self, ddp: DistributedDataParallel) -> None:
        self._synchronizer.check()
        refuse_static_accumulation(ddp)

    def _refuse_unsynchronised(self, ddp: DistributedDataParallel) -> None:
        refuse_unsynchronised(ddp.module, self._exchanged, self._optimizers)

    def _detach(self) -> None:
        for hook in self._watching:
            hook.remove()
