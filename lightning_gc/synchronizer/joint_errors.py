"""Joint errors: what fails on one worker raises on all, with the same sentences."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch

from lightning_gc.transports.distributed import Distributed, gather_text

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
        acts: worker -> act, of the workers in this process; its exception's text goes on after
            "Worker 1 of 4".
        workers: W.
        gather: returns a text of each process, given this one's.
        raises: the exception.

    Returns:
        Worker -> result, of all workers whose processes answer.

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


def on_all_ranks(act: Callable[[], str], device: torch.device) -> None:
    """Call ``act``; if it fails on any rank of the default group, all raise ValueError.

    Args:
        act: its exception's text goes on after "Worker 1 of 4".
        device: one that the group's backend can send from.
    """
    everybody = Distributed()
    gather = partial(gather_text, transport=everybody, device=device)
    all_or_raise({everybody.worker: act}, everybody.workers, gather, ValueError)


def explaining(problem: str, act: Callable[[], _Result]) -> Callable[[], _Result]:
    """Return an act whose exceptions say ``problem`` and why."""

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
