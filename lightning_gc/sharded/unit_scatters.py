"""UnitScatters: compresses the reduce-scatters of FSDP2's units, each in one all-to-all.

FSDP2 lets a module bring its own reduce-scatter (``set_custom_reduce_scatter``, torch 2.9). Ours
has the same group, the same stream and the same order of calls as FSDP2's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gc.sharded.fsdp_units import (
    Column,
    Unit,
    after_backward,
    fills_unused,
    refuse_interrupted,
)
from lightning_gc.sharded.sharded_workers import FSDPWorkers, stacked
from lightning_gc.transports.accounting import Recording
from lightning_gc.transports.distributed import Distributed


class UnitScatters:
    """Does the reduce-scatters of a model's units while it lives.

    Args:
        units: of the model.
        workers: this rank's engine, by ``ReduceScatter``, and names of parameters.
        transport: over all ranks of the shards.
        recording: of the same transport; its account.
        before_round: called before the first exchange of each backward pass.

    Communication pattern:
        One all-to-all for each reduce-scatter of FSDP2, in its order: units as the backward pass
        finishes them. A unit that no rank has used yet is left out, as FSDP2 leaves it out; one
        that is reduced twice in a pass draws the same random numbers twice, unbiased as ever.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        workers: FSDPWorkers,
        transport: Distributed,
        recording: Recording,
        before_round: Callable[[], None],
    ) -> None:
        self._workers, self._before_round = workers, before_round
        self._transport, self._recording = transport, recording
        self._units = [unit for unit in units if unit.columns()]
        self._pass: list[tuple[str, ...]] | None = None  # names in each exchange of this pass
        for unit in self._units:
            unit.scatter_by(UnitScatter(unit, workers.names, self._exchange))

    def _exchange(self, grad: Tensor, shapes: Mapping[str, tuple[int, ...]], group: Any) -> None:
        """Replace this rank's shards in ``grad`` by their means over all ranks."""
        if self._pass is None:
            self._pass = []
            after_backward(self._finish)
            self._before_round()
        self._pass.append(tuple(shapes))
        # FSDP2's, which may be another one than the mesh's: `set_separate_reduce_scatter_group`.
        self._transport.group = group
        self._recording.run(self._workers.flow(self._workers.first, grad, shapes), grad.device)

    def _finish(self) -> None:
        """End a pass, and with it a round: the next one has other random numbers."""
        layout, self._pass = self._pass or [], None
        self._workers.end_round(layout)

    def refuse_interrupted(self) -> None:
        """Raise RuntimeError if a backward pass has begun that never ended; call it between passes.

        Its round would never end, and all further steps would draw the same random numbers.
        """
        refuse_interrupted(self._pass is not None)

    def close(self) -> None:
        """Let FSDP2 do its own reduce-scatters again."""
        for unit in self._units:
            unit.scatter_itself()


class UnitScatter:
    """One unit's reduce-scatter: what torch calls a ``ReduceScatter``.

    Args:
        unit: whose gradients these are.
        names: sharded parameter -> name, of all that are trained.
        exchange: given the flat gradient ``(numel,)``, parameter after parameter, shapes by name
            and a process group, replaces this rank's shards in it by their means.
    """

    # On CUDA, with FSDP2's streams (torch 2.9 to 2.13; read, and not run on several GPUs):
    #
    # - Order. FSDP2 makes its reduce-scatter stream current, lets it wait for the copies into
    #   `input_tensor`, and calls. All that is done here, and each collective, is queued on that
    #   stream from the thread that FSDP2 calls in, in the place of FSDP2's own reduce-scatter and
    #   on the same communicator. So collectives have the same order on all ranks as without us, no
    #   second communicator competes, and what FSDP2 queues next (the cast, `.grad`, the event for
    #   the optimizer) comes after. The backward pass goes on beside it; the host waits only where a
    #   compressor does, or its message lengths vary.
    # - Lifetime. `input_tensor` belongs to another stream; FSDP2 keeps it until the event that it
    #   records after this call, and it is only read before. `output_tensor` and whatever is
    #   allocated here belong to the current stream, which is the one that uses them, so memory
    #   that is freed is given again in that stream's order. A collective, which runs on a stream of
    #   the backend's, is waited for by the current one before it goes on.

    def __init__(
        self,
        unit: Unit,
        names: Mapping[Tensor, str],
        exchange: Callable[[Tensor, Mapping[str, tuple[int, ...]], Any], None],
    ) -> None:
        self._unit, self._names, self._exchange = unit, names, exchange

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for input or output, as FSDP2 itself would get it."""
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Leave the mean over ranks of their row for this rank in ``output_tensor``.

        Args:
            output_tensor: ``(k,)``.
            input_tensor: ``(W·k,)``: a row of all parameters' shards for each rank.
            group: of all ranks.
            op: AVG; others are refused.
            async_op: FSDP2 leaves it out.

        Raises:
            RuntimeError: the parameters are not those of the beginning of the fit, or the result
                would not be a mean.
        """
        columns = self._unit.columns()
        me, workers = dist.get_rank(group), dist.get_world_size(group)
        self._refuse(columns, input_tensor.numel() // workers, op)
        rows = input_tensor.view(workers, -1)
        parts = [rows[:, column.start : column.stop].reshape(-1) for column in columns]
        grad = torch.cat(parts)
        names = [self._names[column.param] for column in columns]
        shapes = [stacked(column.shape, workers) for column in columns]
        self._exchange(grad, dict(zip(names, shapes, strict=True)), group)
        for column in columns:  # in `grad` a parameter's rows follow each other
            mine = grad[workers * column.start : workers * column.stop].view(workers, -1)[me]
            output_tensor[column.start : column.stop] = mine

    def _refuse(self, columns: Sequence[Column], numel: int, op: Any) -> None:
        unit = self._unit
        if any(column.param not in self._names for column in columns):
            raise RuntimeError(
                f"A parameter of {unit.name} was unfrozen, added or replaced after the fit began, "
                f"when ranks agreed on names and shapes. Change the model between two fits."
            )
        if op != dist.ReduceOp.AVG:
            raise RuntimeError(
                f"{unit.name} has set_gradient_divide_factor or "
                f"set_force_sum_reduction_for_comms since the fit began, with which FSDP2 asks for "
                f"no mean. Leave both at their defaults."
            )
        if numel != columns[-1].stop:
            since = "" if fills_unused() else ", or use torch 2.13 or later"
            raise RuntimeError(
                f"Of {unit.name} {columns[-1].stop} elements of a shard are trained, but the "
                f"backward pass has {numel}: parameters without a gradient are left out, and "
                f"nothing says which. Let all of them take part in the loss{since}."
            )
