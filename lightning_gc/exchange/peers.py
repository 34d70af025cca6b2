"""Peers: what a control loop asks of the other workers."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gc.core import Flow
from lightning_gc.core.copies import Single
from lightning_gc.transports import distributed
from lightning_gc.transports.peer_error import awaiting_peers, naming_peers


class Parts:
    """A worker in one process, which has complete parameters.

    Attributes:
        several: whether the worker has several processes, with a part of its parameters each.
    """

    several = False

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum over the worker's processes."""
        return tensor

    def norms(self, norms: Tensor) -> Tensor:
        """Return the norms of full tensors, given the norms of this process's parts."""
        return norms

    def norms_of(self, norms: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
        """Return the same by name.

        Args:
            norms: parameter name -> norm of this process's part.
            names: of all parameters, in an order that is equal on all processes.
        """
        return dict(norms)


class ShardParts(Single, Parts):
    """A worker with its parameters shared out among the processes of a group.

    Args:
        group: these processes.
        device: one that the group's backend can send from.
        copies: parameter name -> how many of them have the same part of it; by default one. Sums
            without names count each copy.

    Communication pattern:
        Each method is one all-reduce of float64 numbers in the group.
    """

    several = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        copies: Mapping[str, int] | None = None,
    ) -> None:
        self._group, self._device, self._copies = group, device, copies or {}

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum over the group, in float64."""
        there = tensor.to(self._device, torch.float64, copy=True)
        me, ranks = dist.get_rank(self._group), dist.get_process_group_ranks(self._group)
        purpose = (
            f"sums over the shards of a node, whose workers 0, 1, ... are the ranks "
            f"{', '.join(map(str, ranks))}"
        )
        with naming_peers("all-reduce", purpose, me, len(ranks)):
            dist.all_reduce(there, group=self._group)
        return there

    def norms(self, norms: Tensor) -> Tensor:
        """Return the norms of full tensors, in float64."""
        return self.total(norms.double().square()).sqrt()

    def norms_of(self, norms: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
        """Return the same by name; what this process has not, as an empty shard, counts as 0."""
        every = list(names)
        whole = self.norms(
            torch.tensor(
                [norms.get(name, 0.0) for name in every], dtype=torch.float32, device="cpu"
            )
        ).tolist()
        pairs = zip(every, whole, strict=True)
        return {name: norm / math.sqrt(self._copies.get(name, 1)) for name, norm in pairs}


def _alone(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Peers:
    """Communication of the control loop.

    Attributes:
        decides: this process has worker 0, and so the controller that decides.
        device: one that the group's backend can send from.
        mean: returns a tensor's mean over workers; by default, all are in this process.
        parts: sums over the parts of a worker, where several processes have them.
        group: of all processes; None is the default group.
        timed: runs a flow for each worker of this process between two rounds, and returns phase ->
            seconds of the first one; None where that is not possible.
    """

    decides: bool
    device: torch.device
    mean: Callable[[Tensor], Tensor] = _alone
    parts: Parts = Parts()  # noqa: RUF009 - has no state
    group: dist.ProcessGroup | None = None
    timed: Callable[[Sequence[Flow]], Mapping[str, float]] | None = None

    def mean_of(self, rows: Iterable[Sequence[float]]) -> list[float]:
        """Return the mean over workers, in one message; one row per worker of this process."""
        mean: list[float] = self.mean(self._packed(rows)).tolist()
        return mean

    def whole_of(self, rows: Iterable[Sequence[float]]) -> list[float]:
        """Return the mean over workers of sums over elements, for all parts of a worker."""
        mean: list[float] = self.parts.total(self.mean(self._packed(rows))).tolist()
        return mean

    def awaiting(self, until: str) -> contextlib.AbstractContextManager[None]:
        """Say whom this worker waits for, if the body takes long; see ``awaiting_peers``."""
        if not dist.is_initialized():
            return contextlib.nullcontext()
        return awaiting_peers(until, dist.get_rank(self.group), dist.get_world_size(self.group))

    def told_by_decider(self, text: str | None) -> str:
        """Return the text of the process that decides, on all processes."""
        if not dist.is_initialized():
            return text or ""
        return distributed.broadcast_text(text, self.device, self.group)

    def _packed(self, rows: Iterable[Sequence[float]]) -> Tensor:
        return torch.tensor(list(rows), dtype=torch.float64, device=self.device).mean(0)


def take_over(module: nn.Module) -> None:
    """Broadcast parameters and buffers of worker 0.

    Communication pattern:
        One broadcast in the default group per tensor that is not empty. Shapes must be equal.
    """
    broadcast_all((*module.parameters(), *module.buffers()))


def broadcast_all(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Broadcast tensors of the group's first member, one by one; empty ones are left out."""
    source = dist.get_process_group_ranks(group or dist.group.WORLD)[0]
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    with torch.no_grad(), awaiting_peers("begin with the same weights", rank, size):
        for tensor in tensors:
            if tensor.numel():
                flat = tensor.detach().reshape(-1).contiguous()
                # As bytes: Gloo has not every dtype.
                dist.broadcast(flat.view(torch.uint8), src=source, group=group)
                tensor.data.copy_(flat.view(tensor.shape))


_Result = TypeVar("_Result")
_LISTED = 4  # sentences; on a hundred workers one disk is enough to know of


def all_or_raise(
    acts: Mapping[int, Callable[[], str]],
    workers: int,
    gather: Callable[[str], list[str]],
    raises: type[Exception] = RuntimeError,
) -> dict[int, str]:
    """Call every worker's act; return all results, or raise on all workers if one has failed.

    Args:
        acts: worker -> act, of the workers in this process; its exception's text follows
            "Worker 1 of 4".
        workers: W.
        gather: returns a text of each process, given this one's.
        raises: the exception.

    Returns:
        Worker -> result, of all workers that answer.

    Communication pattern:
        One ``gather``.
    """
    results: dict[int, str] = {}
    problems: dict[int, str] = {}
    cause = None
    for worker, act in acts.items():
        try:
            results[worker] = act()
        except Exception as error:
            problems[worker], cause = str(error), error
            break
    for text in gather(json.dumps([results, problems])):
        theirs, failed = json.loads(text)
        results |= {int(worker): result for worker, result in theirs.items()}
        problems |= {int(worker): problem for worker, problem in failed.items()}
    if problems:
        raise raises(_in_words(problems, workers)) from cause
    return results


def on_all_ranks(
    act: Callable[[], str],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    purpose: str = distributed.EXCHANGE,
    raises: type[Exception] = ValueError,
    until: str = "start",
) -> dict[int, str]:
    """Call ``act`` on each rank; return all results by rank, or raise on all ranks.

    Args:
        act: its exception's text follows "Worker 1 of 4" in the error.
        device: one that the group's backend can send from.
        group: of the ranks; None is the default group.
        purpose: what is communicated, for error messages.
        raises: the exception.
        until: what the others have yet to do, for ``gather_text``.
    """
    ranks = distributed.Distributed(group, purpose)
    gather = partial(distributed.gather_text, transport=ranks, device=device, until=until)
    return all_or_raise({ranks.worker: act}, ranks.workers, gather, raises)


def explaining(problem: str, act: Callable[[], _Result]) -> Callable[[], _Result]:
    """Return an act with exceptions that say ``problem`` and why."""

    def explained() -> _Result:
        try:
            return act()
        except Exception as error:
            raise RuntimeError(f"{problem} ({type(error).__name__}: {error}).") from error

    return explained


def _in_words(problems: Mapping[int, str], workers: int) -> str:
    """Return a sentence per problem, with all workers that have it."""
    who: dict[str, list[int]] = {}
    for worker, problem in sorted(problems.items()):
        who.setdefault(problem, []).append(worker)
    sentences = [
        f"Worker {', '.join(map(str, those))} of {workers} {problem}"
        for problem, those in who.items()
    ]
    more = len(sentences) - _LISTED
    return " ".join(sentences[:_LISTED]) + (f" {more} more have failed." if more > 0 else "")
