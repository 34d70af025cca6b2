"""FSDP2's units: what one reduce-scatter sums, where its parameters lie, and what may replace it.

The one module that reads torch's private names; a test holds each of them to the installed version.
``fully_shard(module)`` makes one unit of the parameters of ``module`` that are in no unit yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from lightning_gc.core import Flow, Gather, Payload, Reply, Request
from lightning_gc.transports.peer_error import PeerError

Hook = Callable[[Tensor], None]


def has_hooks() -> bool:
    """Return whether FSDP2 has the hook in place of its all-reduce, as from torch 2.7 on."""
    return hasattr(FSDPModule, "set_all_reduce_hook")


def has_custom_scatters() -> bool:
    """Return whether FSDP2's reduce-scatter and all-gather can be replaced: from torch 2.9 on."""
    return hasattr(FSDPModule, "set_custom_reduce_scatter")


def refuse_interrupted(running: bool) -> None:
    """Raise RuntimeError if a backward pass is under way; call it between passes.

    An exception within one leaves torch's engine without calling ``after_backward``'s callback.
    """
    if running:
        raise RuntimeError(
            "A backward pass was interrupted by an exception, so its exchange of gradients is "
            "incomplete. Resume from a checkpoint in a new process."
        )


def after_backward(act: Callable[[], None]) -> None:
    """Call ``act`` at the end of the backward pass that is running.

    After FSDP2's own end of the pass, which is queued when the pass begins, and before
    ``backward()`` returns.
    """
    Variable._execution_engine.queue_callback(act)


def in_backward() -> bool:
    """Return whether this thread runs a backward pass, as FSDP2 itself asks."""
    return bool(torch._C._current_graph_task_id() != -1)


class Piece(NamedTuple):
    """Where this rank's shard of a parameter lies in what its unit's reduce-scatter leaves."""

    param: nn.Parameter  # the sharded one, a DTensor
    shape: tuple[int, ...]  # of this rank's shard; may be empty
    start: int  # in the reduced tensor, which is padded to equal lengths
    numel: int


class Column(NamedTuple):
    """Where a parameter lies in a row of a reduce-scatter's input or an all-gather's output.

    There is a row for each rank.
    """

    param: nn.Parameter  # the sharded one
    shape: tuple[int, ...]  # of the largest shard, to which all are padded
    start: int
    stop: int


@dataclass(frozen=True)
class UnitNumbers:
    """Finds ranks that exchange different units: their contents would be mixed silently.

    Args:
        names: of the units, equal on all ranks.
        verified: compare numbers before each exchange, as units may differ in size. The host waits.
    """

    names: Sequence[str]
    verified: bool

    def around(self, name: str, flow: Flow, device: torch.device) -> Flow:
        """Return what to run instead of a unit's ``flow``.

        Communication pattern:
            If ``verified``, one all-gather of 4 bytes per rank, before the flow's own requests.
        """
        if self.verified:
            arrived = yield Gather((self._number(name, device),))
            self._compare(name, arrived)
        yield from flow

    def gather(self, name: str, tensors: Payload) -> Generator[Request, Reply, Reply]:
        """Gather tensors, and on the host the unit's number behind them."""
        if self.verified or tensors[0].device.type != "cpu":
            return (yield Gather(tensors))
        arrived = yield Gather((*tensors, self._number(name, tensors[0].device)))
        self._compare(name, arrived)
        return [payload[:-1] for payload in arrived]

    def _number(self, name: str, device: torch.device) -> Tensor:
        number = self.names.index(name).to_bytes(4, "little")
        return torch.tensor(list(number), dtype=torch.uint8, device=device)

    def _compare(self, name: str, arrived: Reply) -> None:
        for worker, payload in enumerate(arrived):
            number = int.from_bytes(bytes(payload[-1].tolist()), "little")
            if number != self.names.index(name):
                other = self.names[number] if number < len(self.names) else f"unit {number}"
                raise PeerError(
                    f"This rank exchanges {name}, and worker {worker} exchanges {other}. Ranks "
                    f"that use different units would mix their weights and gradients, as in plain "
                    f"FSDP2. Let all ranks use the same units in the same order: give a unit that "
                    f"has nothing to do on a rank an empty batch, and add its output times 0."
                )


class Unit:
    """One unit of FSDP2.

    Args:
        name: of its module.
        module: that ``fully_shard`` was called on.
        group: torch's private object with the unit's parameters.
    """

    def __init__(self, name: str, module: FSDPModule, group: Any) -> None:
        self.name = name or "the whole model"
        self._module, self._group = module, group
        self._replicated: Any = None  # what says that there are replicas, while it is put aside
        self._own_scatter: Any = None  # FSDP2's, while it is replaced, as the next one
        self._own_gather: Any = None
        self._fills_itself = False  # zeros for parameters without a gradient, if it is not told to
        self._empty: list[Any] = []  # torch's trained parameters without elements, while set aside

    @property
    def ranks(self) -> list[int]:
        """Global ranks that hold its shards."""
        mesh = self._group.mesh_info
        if not hasattr(mesh, "shard_process_group"):
            return [dist.get_rank()]
        return dist.get_process_group_ranks(mesh.shard_process_group)

    @property
    def replicates(self) -> bool:
        """Whether FSDP2 averages over replicas itself, as on a mesh of two dimensions."""
        return hasattr(self._group.mesh_info, "replicate_process_group")

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh that ``fully_shard`` was given."""
        mesh: DeviceMesh = self._group.mesh_info.mesh
        return mesh

    def stay_within_node(self) -> None:
        """Reduce gradients over the shards only, on a mesh of replicas and shards.

        Parameters stay on that mesh. Before the first forward pass, or between two steps.
        """
        both = self._group.mesh_info
        self._set_mesh_info(FSDPMeshInfo(both.mesh, shard_mesh_dim=both.shard_mesh_dim))
        self._replicated = both

    def replicate(self) -> None:
        """Undo ``stay_within_node``."""
        if self._replicated is not None:
            self._set_mesh_info(self._replicated)
        self._replicated = None

    def _set_mesh_info(self, info: Any) -> None:
        if self._group.post_forward_mesh_info is self._group.mesh_info:  # frees after the forward
            self._group.post_forward_mesh_info = info
        self._group.mesh_info = info

    @property
    def device(self) -> torch.device:
        """Where gradients are reduced, also if parameters are offloaded to the host."""
        device: torch.device = self._group.device
        return device

    @property
    def offloads(self) -> bool:
        """Whether gradients are moved to the host as soon as they are reduced."""
        return bool(getattr(self._group.offload_policy, "pin_memory", None) is not None)

    @property
    def hooked(self) -> bool:
        """Whether somebody else has set the hook."""
        return self._group._all_reduce_hook is not None

    @property
    def scattered(self) -> bool:
        """Whether somebody else has replaced the reduce-scatter."""
        comm = getattr(self._group, "_reduce_scatter_comm", None)
        return comm is not None and type(comm).__name__ != "DefaultReduceScatter"

    @property
    def gathered(self) -> bool:
        """Whether somebody else has replaced the all-gather."""
        comm = getattr(self._group, "_all_gather_comm", None)
        return comm is not None and type(comm).__name__ != "DefaultAllGather"

    @property
    def gathered_dtypes(self) -> set[torch.dtype]:
        """The types in which parameters are gathered; FSDP2 gathers several as bytes."""
        cast = self._group.mp_policy.param_dtype
        own = {param.dtype for param in self.params}
        return {cast if cast and each.is_floating_point else each for each in own}

    @property
    def gathers_itself(self) -> bool:
        """Whether a parameter brings its own form for the all-gather, as torchao's float8 does."""
        name = "fsdp_pre_all_gather"
        return any(hasattr(each._sharded_local_tensor, name) for each in self._group.fsdp_params)

    @property
    def shares_its_module(self) -> bool:
        """Whether its module has other units too, between which a reduce-scatter cannot tell."""
        return len(_groups(self._module)) > 1

    @property
    def divides_itself(self) -> bool:
        """Whether the hook gets a sum that is divided later, or by another number."""
        factor = getattr(self._group, "gradient_divide_factor", None)
        forced = getattr(self._group, "force_sum_reduction_for_comms", False)
        return factor is not None or bool(forced)

    @property
    def keeps_from_replicas(self) -> bool:
        """Whether the user has switched the all-reduce over replicas off."""
        return not self._group.all_reduce_grads

    @property
    def dtype(self) -> torch.dtype:
        """The type in which gradients are reduced."""
        policy = self._group.mp_policy
        own = next(iter(self.params)).dtype
        dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or own
        return dtype

    @property
    def params(self) -> list[nn.Parameter]:
        """All sharded parameters, frozen ones too."""
        return [each.sharded_param for each in self._group.fsdp_params]

    def stands_in(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that take the sharded ones' places within a pass.

        They are unsharded, or between the passes in shards of a smaller group.
        """
        for each in self._group.fsdp_params:
            yield from _places_of(each)

    def pieces(self) -> list[Piece]:
        """Return the pieces of all parameters that are trained now, in their order.

        A parameter without elements has none. Each has as many elements as the largest shard,
        padding at its end.
        """
        found, start = [], 0
        for each in self._group.fsdp_params:
            if each.sharded_param.requires_grad and each.sharded_param.numel():
                shape = tuple(each.sharded_size)
                found.append(Piece(each.sharded_param, shape, start, math.prod(shape)))
                start += each.padded_sharded_param_size.numel()
        return found

    def columns(self, *, frozen: bool = False) -> list[Column]:
        """Return the places of all parameters that are trained now, in their order.

        A parameter without elements has none.

        Args:
            frozen: the others too, as an all-gather has all of them.
        """
        found, start = list[Column](), 0
        for each in self._group.fsdp_params:
            if (frozen or each.sharded_param.requires_grad) and each.sharded_param.numel():
                shape = tuple(each.padded_sharded_param_size)
                stop = start + math.prod(shape)
                found.append(Column(each.sharded_param, shape, start, stop))
                start = stop
        return found

    def padded_numel(self) -> int:
        """Return the length of the reduced tensor if all trained parameters are in it."""
        return max((column.stop for column in self.columns()), default=0)

    def listen(self, hook: Hook) -> None:
        """Call ``hook`` with each reduced tensor; parameters without a gradient are zeros in it."""
        self._module.set_all_reduce_hook(hook)
        self._fill_unused()

    def scatter_by(self, comm: Any) -> None:
        """Let ``comm``, of the interface of torch's ``ReduceScatter``, do the reduce-scatters.

        Parameters without a gradient are zeros in them.
        """
        self._own_scatter = self._group._reduce_scatter_comm
        self._module.set_custom_reduce_scatter(comm)
        self._fill_unused()

    def gather_by(self, comm: Any) -> None:
        """Let ``comm``, of the interface of torch's ``AllGather``, do the all-gathers."""
        self._own_gather = self._group._all_gather_comm
        self._module.set_custom_all_gather(comm)

    def reshard(self) -> None:
        """Free gathered parameters, between two passes, so that the next pass gathers again."""
        self._module.reshard()

    def forget(self) -> None:
        """Call no hook any more."""
        self._group._all_reduce_hook = None
        self._leave_unused()

    def scatter_itself(self) -> None:
        """Let FSDP2 do its own reduce-scatters again."""
        self._group._reduce_scatter_comm = self._own_scatter
        self._leave_unused()

    def gather_itself(self) -> None:
        """Let FSDP2 do its own all-gathers again."""
        self._group._all_gather_comm = self._own_gather

    def _fill_unused(self) -> None:
        self._fills_itself = getattr(self._group, "reduce_scatter_unused_params", False)
        self._group.reduce_scatter_unused_params = True  # no torch before 2.13 reads it
        params = [each for each in self._group.fsdp_params if each.sharded_param.requires_grad]
        self._empty = [each for each in params if not each.sharded_param.numel()]
        self._train_empty(False)  # FSDP2 cannot reduce-scatter an empty gradient

    def _leave_unused(self) -> None:
        self._group.reduce_scatter_unused_params = self._fills_itself
        self._train_empty(True)
        self._empty = []

    def _train_empty(self, on: bool) -> None:
        for each in self._empty:
            for param in (each.sharded_param, *_places_of(each)):
                param.requires_grad_(on)


def fills_unused() -> bool:
    """Return whether FSDP2 can reduce zeros for parameters without a gradient: from 2.13 on."""
    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def _places_of(param: Any) -> list[nn.Parameter]:
    """Return what takes the place of torch's object of a sharded parameter within a pass."""
    found = [getattr(param, n, None) for n in ("_unsharded_param", "_sharded_post_forward_param")]
    return [each for each in found if each is not None]


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units in the order of their modules, the outermost first."""
    units: dict[int, Unit] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            for group in _groups(module):
                units.setdefault(id(group), Unit(name, module, group))
    return list(units.values())


def _groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # since 2.12
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def gradient_of(param: nn.Parameter) -> Tensor:
    """Return this rank's part of a sharded parameter's gradient; zeros at first."""
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    local: Tensor = param.grad.to_local()  # type: ignore[attr-defined]
    return local
