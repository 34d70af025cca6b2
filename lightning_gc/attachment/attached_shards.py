"""Attached models in shards: the exchange between replicas (HSDP), and reduce-scatters (FSDP)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_gc.attachment.attached import Attached, Setup, peers_of
from lightning_gc.exchange import validation
from lightning_gc.exchange.kernel_compilation import compile_kernels
from lightning_gc.exchange.peers import ShardParts, on_all_ranks
from lightning_gc.exchange.verification import verification
from lightning_gc.exchange.workers import plain_name
from lightning_gc.sharded.fsdp_units import Unit, UnitNumbers, units_of
from lightning_gc.sharded.shard_exchange import ShardExchange, share_copies
from lightning_gc.sharded.shard_validation import Way, refuse_model
from lightning_gc.sharded.sharded_workers import FSDPWorkers, ShardedWorkers
from lightning_gc.sharded.unit_gathers import UnitGathers, WeightSettings
from lightning_gc.sharded.unit_scatters import UnitScatters
from lightning_gc.transports.accounting import Recorder, Recording, WithWeights
from lightning_gc.transports.distributed import Distributed, gather_text


class AttachedShards(Attached):
    """Handle of an FSDP2 model whose replicas exchange compressed shards.

    Args:
        model: on which ``fully_shard`` was called last.
        setup: as for ``Attached``; its workers are ``ShardedWorkers``.
        mesh: of replicas and shards, in this order, and maybe of tensor-parallel ranks.
        bucket_cap_mb: megabytes of a rank's shards from which on a bucket is full.
        replicating: units whose own all-reduce over replicas is switched off until ``close``.
    """

    def __init__(
        self,
        model: nn.Module,
        setup: Setup,
        mesh: DeviceMesh,
        bucket_cap_mb: float,
        replicating: Sequence[Unit] = (),
    ) -> None:
        workers, self._replicating = setup.workers, replicating
        assert isinstance(workers, ShardedWorkers)
        for unit in replicating:
            unit.stay_within_node()
        try:
            self._exchange = ShardExchange(
                model,
                workers,
                mesh,
                setup.device,
                way="attach" if replicating else "HSDP",
                bucket_cap_mb=bucket_cap_mb,
                agreed=setup.agreed,
                timeout=setup.timeout,
                before_round=setup.prepare_round,
                common=setup.weights,
                verify=setup.compression.verify,
            )
        except BaseException:
            self._replicate()
            raise
        peers = peers_of(setup.device, mesh.get_group(0), None, self._exchange.parts)
        synchronizer = self._exchange.synchronizer
        super().__init__(model, setup, replace(peers, timed=synchronizer.timed), synchronizer)

    def _warn_alone(self) -> None:
        alone = f"{self._setup.way.owner} has one replica on {dist.get_world_size()} ranks"
        validation.warn_of_one_worker(
            self._workers.configuration.compressor,
            f"{alone}: nothing is sent between nodes",
            "gradients",
            self._setup.way.more_workers,
        )

    def accumulating(self) -> AbstractContextManager[None]:
        """Return a context in which passes add up gradients, and replicas exchange none."""
        return self._exchange.buckets.accumulating()

    def before_pass(self) -> None:
        """Refuse a pass after one that was interrupted."""
        self._exchange.buckets.refuse_interrupted()

    def figures(self) -> dict[str, float]:
        """Return the bytes that this rank has sent within the node for the last exchange."""
        return {"node_bytes": float(self._exchange.buckets.node_bytes)}

    def _replicate(self) -> None:
        for unit in self._replicating:
            unit.replicate()

    def _detach(self) -> None:
        self._exchange.buckets.close()
        self._replicate()


class AttachedScatters(Attached):
    """Handle of an FSDP2 model whose ranks compress its reduce-scatters, and its all-gathers.

    Args:
        model: on which ``fully_shard`` was called last.
        setup: as for ``Attached``; its workers are ``FSDPWorkers``.
        group: over which FSDP2 shards.
        weights: settings of the gathers of weights; None: FSDP2's own gathers.
        tensors: the tensor-parallel group; None: ``group`` has all ranks.
    """

    _workers: FSDPWorkers

    def __init__(
        self,
        model: nn.Module,
        setup: Setup,
        group: dist.ProcessGroup,
        weights: WeightSettings | None = None,
        tensors: dist.ProcessGroup | None = None,
    ) -> None:
        workers, device = setup.workers, setup.device
        assert isinstance(workers, FSDPWorkers)
        validation.refuse_unknown_device(device)
        ways: list[Way] = ["FSDP"] if weights is None else ["FSDP", "gathers"]
        check = partial(refuse_model, model, dist.get_process_group_ranks(group), *ways)
        on_all_ranks(partial(check, tensors=tensors), device)
        workers.stand(group, tensors)
        workers.name(model)
        units = units_of(model)
        agreed = _agreed(setup, units, weights)
        agreed["tensor-parallel ranks"] = repr(workers.tensor_ranks)
        validation.check_agreement(agreed, Distributed(), device, workers.model)
        verified = verification(setup.compression.verify, setup.way.owner)
        numbers = UnitNumbers([unit.name for unit in units], bool(setup.compression.verify))
        near = workers.configuration.neighbours(workers.shards)
        transport = Distributed(group, "a reduce-scatter of gradients", near)
        recording = Recording(verified.transport(transport) if verified else transport)
        self._gathers: UnitGathers | None = None
        accounts: list[Recorder] = [recording]
        kept = setup.checkpoint_parts
        if weights is not None:
            kept.settings["weights"] = weights.in_words
            gathering = Distributed(group, "an all-gather of weights")
            gathered = Recording(verified.transport(gathering) if verified else gathering)
            self._gathers = UnitGathers(
                units,
                {param: plain_name(name) for name, param in model.named_parameters()},
                weights,
                gathering,
                gathered,
                lambda: workers.first.step,
                numbers,
            )
            workers.gathers = self._gathers
            accounts = [WithWeights(recording, gathered, self._gathers.dense)]
            if weights.differences:
                kept.own[_COPIES] = [self._gathers]
        workers.start(accounts, revocable=False)
        workers.run = gather_text(workers.run, Distributed(), device)[0]
        self._scatters = UnitScatters(
            units, workers, transport, recording, setup.prepare_round, numbers
        )
        share_copies(model, tensors)
        parts = None if tensors is None else ShardParts(tensors, device, workers.copies)
        super().__init__(model, setup, peers_of(device, group, None, parts))

    def reset(self) -> None:
        """Also let the next gathers be exact, which send differences."""
        super().reset()
        if self._gathers is not None:
            self._gathers.forget()

    def _warn_alone(self) -> None:
        warnings.warn(
            f"{self._setup.way.owner} has one rank, so that nothing is exchanged or compressed. "
            f"Give Trainer(devices=2), say.",
            stacklevel=2,
        )

    def before_pass(self) -> None:
        """Refuse a pass after one that was interrupted."""
        self._scatters.refuse_interrupted()

    def _detach(self) -> None:
        self._scatters.close()
        if self._gathers is not None:
            self._gathers.close()
            self._setup.checkpoint_parts.own.pop(_COPIES, None)
            self._workers.gathers = None


_COPIES = "weights"
"""Name of the copies of weights in a worker's own state."""


def _agreed(setup: Setup, units: Sequence[Unit], weights: WeightSettings | None) -> dict[str, str]:
    """Return the settings that must be equal on all ranks, as text."""
    names, configuration = setup.workers.names, setup.workers.configuration
    every = weights is not None
    columns = [(unit, column) for unit in units for column in unit.columns(frozen=every)]
    of_units = {
        f"{unit.name} {unit.dtype} {names.get(column.param, index)}": column.shape
        for index, (unit, column) in enumerate(columns)
    }
    return {
        **configuration.in_words(),
        "units": validation.digest_of(of_units),
        "verify": repr(setup.compression.verify),
        "weights": repr(weights),
        **setup.agreed,
        **compile_kernels(configuration, setup.device),
    }
