"""Flows that are run together get their own replies, by one request per kind and round."""

import pytest
import torch

from lightning_gc.core.flow import Exchange, Flow, Gather, Mean, Request, together
from lightning_gc.transports import Simulated


def asking(kind: type, start: float, worker: int, workers: int, got: list[float]) -> Flow:
    """Ask twice, for other numbers each time; note what the replies add up to."""
    for own in (start + worker, start + 10 * worker):
        number = torch.tensor([own])
        if kind is Mean:
            (mean,) = yield Mean((number,))
            got.append(workers * float(mean))
        elif kind is Gather:
            reply = yield Gather((number,))
            got.append(sum(float(one) for (one,) in reply))
        else:
            reply = yield Exchange(((number,),) * workers)
            got.append(sum(float(one) for (one,) in reply))


def counted(flow: Flow, requests: list[Request]) -> Flow:
    request = next(flow, None)
    while request is not None:
        requests.append(request)
        reply = yield request
        try:
            request = flow.send(reply)
        except StopIteration:
            request = None


def replies(kinds: tuple[type, ...], workers: int) -> tuple[list[list[list[float]]], list[Request]]:
    """Return what each flow of each worker has got, and all requests."""
    got: list[list[list[float]]] = []
    requests: list[Request] = []
    flows = []
    for worker in range(workers):
        got.append([[] for _ in kinds])
        each = [asking(k, 100.0 * i, worker, workers, got[-1][i]) for i, k in enumerate(kinds)]
        flows.append(counted(together(each, workers), requests))
    Simulated(workers).run(flows)
    return got, requests


@pytest.mark.parametrize("kinds", [(Mean, Mean, Mean), (Gather, Mean, Gather, Exchange, Exchange)])
@pytest.mark.parametrize("workers", [2, 3])
def test_each_flow_gets_its_own_replies(kinds: tuple[type, ...], workers: int) -> None:
    """Of two workers, a small mean beside a gather is gathered."""
    got, requests = replies(kinds, workers)
    ranks = sum(range(workers))
    for own in got:
        for i, sums in enumerate(own):
            wanted = [workers * 100 * i + ranks, workers * 100 * i + 10 * ranks]
            assert sums == pytest.approx(wanted, rel=1e-5)
    asked = set(kinds) - ({Mean} if workers == 2 and Gather in kinds else set())
    assert len(requests) == 2 * len(asked) * workers
    assert {type(request) for request in requests} == asked


def test_a_large_mean_is_not_gathered() -> None:
    def mean() -> Flow:
        yield Mean((torch.zeros(1 << 16), torch.zeros(1)))

    def gather() -> Flow:
        yield Gather((torch.zeros(1),))

    assert isinstance(next(together([mean(), gather()], 2)), Mean)
