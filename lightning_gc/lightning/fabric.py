"""CompressedFabric: Fabric's DDPStrategy with compressed gradient exchange.

Joined with the ``DDPStrategy`` of either package in ``fabric_for_pytorch_lightning.py`` and
``fabric_for_lightning.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_gc.attachment.attached import Attached, AttachedDDP, Setup
from lightning_gc.checkpoint.side_file_store import FabricCheckpoint, Kept
from lightning_gc.compressors import Compressor
from lightning_gc.controllers import Controller
from lightning_gc.core.combinations import judge
from lightning_gc.core.refusal import refuse
from lightning_gc.core.settings import CheckedCalls, parted, takes_fields
from lightning_gc.exchange import Compression, Configuration, WayIn
from lightning_gc.exchange.validation import ELSEWHERE, check_agreement, refuse_lazy
from lightning_gc.exchange.workers import model_in_words
from lightning_gc.flavours import FABRICS, EitherLightning, package_of
from lightning_gc.lightning import arguments
from lightning_gc.lightning.workarounds import Joining, PeerNaming, SingleTrainer
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.transports.distributed import Distributed


@takes_fields(Compression, Kept, but=("state_dtype",))
class CompressedFabric(SingleTrainer, PeerNaming, Joining, EitherLightning, metaclass=CheckedCalls):
    """DDP of Lightning's Fabric that exchanges compressed gradients.

    Use it as ``Fabric(strategy=CompressedFabricStrategy(TopK(density=0.01)))``, or by name:
    ``Fabric(strategy="compressed_ddp_topk")``; the loop need not change. Every module that
    ``fabric.setup`` takes gets what ``attach`` gives a plain ``DistributedDataParallel``, with its
    optimizers and Fabric's gradient scaler.

    Args:
        controller: chooses levels; the loop calls ``fabric.strategy.handle.begin_epoch``.
        state: errors in checkpoints. ``"full"``: ``fabric.save`` writes each worker's errors
            into a separate file, in the folder ``lightning_gc_state`` beside the checkpoint, and
            ``fabric.load`` restores them: runs resume bit for bit. ``"mean"``: the checkpoint
            itself has the mean over workers. ``"off"``: errors begin at zero. If the number of
            workers has changed, each begins with the mean of the errors.
        ddp_kwargs: as for Fabric's ``DDPStrategy``, with the buckets of ``CompressedDDPStrategy``.
            ``fabric.backward`` raises the errors of ``verify``.

    Communication pattern:
        As ``CompressedDDPStrategy``: one background thread and process group for each module.

    Raises:
        ValueError: as ``CompressedDDPStrategy`` and ``attach``.

    Example:
        >>> from lightning_gc import CompressedFabricStrategy, TopK
        >>> CompressedFabricStrategy(TopK(density=0.01)).handles
        ()

    Attributes:
        handles: one for each module that has been set up, as ``attach`` returns it.
    """

    _owner = "Fabric"
    _packages = FABRICS
    elsewhere = ELSEWHERE

    def __init__(
        self,
        compressor: Compressor | str,
        memory: Memory | str | None = None,
        scheme: Scheme | str | None = None,
        controller: Controller | str | None = None,
        **ddp_kwargs: Unpack[arguments.FabricFields],
    ) -> None:
        owner = type(self).__name__
        arguments.refuse_unknown(
            type(self), compressor, ddp_kwargs, DistributedDataParallel.__init__
        )
        arguments.refuse_other_hooks(owner, ddp_kwargs, "Fabric(precision='bf16-mixed')")
        exchanged, kept, others = parted(ddp_kwargs, Compression, Kept)
        self.state = Kept(**kept, owner=owner).state
        self._way = WayIn(
            owner,
            bypassed="Call the module that fabric.setup returned, not the one it was given, and "
            "step after a backward pass outside of fabric.no_backward_sync",
            unused=f"{owner}(..., find_unused_parameters=True)",
            elsewhere="If it is another module's, give that module to fabric.setup.",
        )
        compression = Compression(compressor, memory, scheme, controller, **exchanged)
        self._compression = compression.resolved(self._way)
        self._attached: dict[nn.Module, Attached] = {}  # by the wrapped module
        self._optimizers: list[Optimizer] = []
        super().__init__(**others)

    @property
    def configuration(self) -> Configuration:
        """Compressor, memory and scheme."""
        return self._compression.configuration

    @property
    def controller(self) -> Controller | None:
        """Of levels, or None."""
        return self._compression.controller

    def __repr__(self) -> str:
        """Return class, compressor, and the package that it is for.

        A Trainer shows it where it is given a strategy for Fabric.
        """
        parts = f" with {self.configuration.compressor}" if hasattr(self, "configuration") else ""
        place = f" for Fabric of {package_of(type(self))}"
        trainer = "a Trainer takes CompressedDDPStrategy"
        return f"<{type(self).__name__}{parts}{place}; {trainer}>"

    @property
    def handles(self) -> tuple[Attached, ...]:
        """One for each module that has been set up, in that order."""
        return tuple(self._attached.values())

    @property
    def handle(self) -> Attached:
        """Handle of the one module that has been set up: levels, byte counts, controller.

        Raises:
            ValueError: none has been set up, or several have.
        """
        if len(self._attached) != 1:
            refuse(
                f"{len(self._attached)} modules have been set up by this Fabric; call "
                f"fabric.setup(model, optimizer) first, or take one of strategy.handles"
            )
        return self.handles[0]

    def setup_environment(self) -> None:
        """Join the other workers with a timeout of at least a minute, then set the user's."""
        with self._patiently():
            super().setup_environment()

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], *args: Any, **kwargs: Any
    ) -> Any:
        """Wrap the module, and let its exchange know the optimizers from the first step on.

        If the module is set up again, these replace the optimizers of the phase before.
        """
        if module in self._attached:
            others = (each for each in self._attached if each is not module)
            shared = {id(optimizer) for each in others for optimizer in self._optimizers_of(each)}
            own = {id(optimizer) for optimizer in self._optimizers_of(module)} - shared
            self._optimizers = [each for each in self._optimizers if id(each) not in own]
        self._know(optimizers)
        return super().setup_module_and_optimizers(module, optimizers, *args, **kwargs)

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap the module in ``DistributedDataParallel`` and compress what that exchanges."""
        own, memory = self._optimizers_of(module), self.configuration.memory
        judge("Training loop", memory=memory, way="Fabric", optimizers=own)
        refuse_lazy(module)
        # DDP broadcasts by the own sizes of each.
        check_agreement({}, Distributed(), self.root_device, model_in_words(module))
        with arguments.bucket_size(self, module, waits=self.configuration.waits(self.world_size)):
            ddp: DistributedDataParallel = super().setup_module(module)
        before = self._attached.pop(module, None)
        if before is not None:  # set up again, as for another phase of training
            before.close()
        setup = Setup.of_loop(
            self._way,
            self._compression,
            own,
            module,
            scaler=getattr(self.precision, "scaler", None),
            timeout=self._timeout,
        )
        self._attached[module] = AttachedDDP(ddp, setup).watch()
        return ddp

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let the exchange of its parameters know the optimizer."""
        self._know([optimizer])
        for module, handle in self._attached.items():
            if optimizer in self._optimizers_of(module):
                handle.add_optimizer(optimizer)
        given: Optimizer = super().setup_optimizer(optimizer)
        return given

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass; raise what has gone wrong in the exchange before a step is made.

        Within ``fabric.no_backward_sync`` nothing is exchanged.
        """
        super().backward(*args, **kwargs)
        for handle in self.handles:
            handle.check()

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save ``state``, and each worker's errors in files next to it."""
        handles = self._handles_in(state) if self.state != "off" else {}
        if not handles:
            super().save_checkpoint(path, state, storage_options, filter)
            return

        def write(there: Any, content: dict[str, Any]) -> None:
            super(CompressedFabric, self).save_checkpoint(there, content, storage_options, filter)

        self._checkpoint(handles).save(path, state, write, storage_options)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load ``state``, and this worker's errors."""
        left: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        if isinstance(state, dict) and state:
            self._checkpoint(self._handles_in(state)).restore(path, left)
        return left

    def teardown(self) -> None:
        for handle in self.handles:
            handle.close()
        self._attached.clear()
        super().teardown()

    def _know(self, optimizers: list[Optimizer]) -> None:
        known = {id(optimizer) for optimizer in self._optimizers}
        self._optimizers += [each for each in optimizers if id(each) not in known]

    def _optimizers_of(self, module: nn.Module) -> list[Optimizer]:
        """Return the optimizers that train a parameter of the module."""
        own = set(module.parameters())
        return [
            optimizer
            for optimizer in self._optimizers
            if any(p in own for group in optimizer.param_groups for p in group["params"])
        ]

    def _handles_in(self, state: Mapping[str, Any]) -> dict[str, Attached]:
        """Return the handles of modules in ``state``, by the modules' names there."""
        modules = {n: getattr(v, "module", v) for n, v in state.items() if isinstance(v, nn.Module)}
        return {name: self._attached[m] for name, m in modules.items() if m in self._attached}

    def _checkpoint(self, handles: dict[str, Attached]) -> FabricCheckpoint:
        return FabricCheckpoint(handles, self, self.state)
