"""Flows that are run together get their own replies, by one request per kind and round."""

import pytest
import torch

from lightning_gc.flow import Exchange, Flow, Gather, Mean, Request, together
from lightning_gc.transports import Simulated

WORKERS = 3


def asking(kind: type, start: float, worker: int, got: list[float]) -> Flow:
    """Ask twice, for other numbers each time; note what the replies add up to."""
    for own in (start + worker, start + 10 * worker):
        number = torch.tensor([own])
        if kind is Mean:
            (mean,) = yield Mean((number,))
            got.append(WORKERS * float(mean))
        elif kind is Gather:
            reply = yield Gather((number,))
            got.append(sum(float(one) for (one,) in reply))
        else:
            reply = yield Exchange(((number,),) * WORKERS)
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


@pytest.mark.parametrize("kinds", [(Mean, Mean, Mean), (Gather, Mean, Gather, Exchange, Exchange)])
def test_each_flow_gets_its_own_replies(kinds: tuple[type, ...]) -> None:
    got: list[list[list[float]]] = []
    requests: list[Request] = []
    flows = []
    for worker in range(WORKERS):
        got.append([[] for _ in kinds])
        each = [asking(k, 100.0 * i, worker, got[worker][i]) for i, k in enumerate(kinds)]
        flows.append(counted(together(each), requests))
    Simulated(WORKERS).run(flows)
    for own in got:
        for i, sums in enumerate(own):
            assert sums == pytest.approx([WORKERS * 100 * i + 3, WORKERS * 100 * i + 30], rel=1e-5)
    assert len(requests) == 2 * len(set(kinds)) * WORKERS
