"""A worker that announces false lengths, or sends others, is named; no process is aborted."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gc.core.flow import Exchange, Gather, Payload, Request
from lightning_gc.core.message import Message
from lightning_gc.transports import Distributed, base
from lightning_gc.transports.p2p import PIECE
from lightning_gc.transports.peer_error import PeerError
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes
WORKERS, LIAR, LIMIT = 3, 1, PIECE  # elements of float32: up to four pieces
TIMEOUT = timedelta(seconds=2)


@dataclass(frozen=True)
class Lie:
    """What the liar does in one request; two messages go to others, the third to itself.

    Attributes:
        gathers: in a ``Gather``, not an ``Exchange``.
        true: elements that it has.
        announced: elements that it says it has, to workers 0 to 2 in turn.
        cut: bytes by which each message is shorter than its layout, or longer if negative.
    """

    gathers: bool
    true: int
    announced: tuple[int, int, int]
    cut: int = 0


def request(lie: Lie, worker: int) -> Request:
    numel = lie.true if worker == LIAR else 5
    payload: Payload = (torch.rand(numel), torch.arange(3, dtype=torch.uint8))
    limits = (LIMIT, None)
    return Gather(payload, limits) if lie.gathers else Exchange((payload,) * WORKERS, limits)


@contextmanager
def lying(lie: Lie) -> Iterator[None]:
    """Announce and send something else than an honest worker would."""
    said, pack = iter(lie.announced * 2), Message.pack

    def announce(payload: Payload) -> list[int]:
        return [next(said), *(tensor.numel() for tensor in payload[1:])]

    def send(self: Message, payload: Payload) -> Tensor:
        message = pack(self, payload)
        return torch.nn.functional.pad(message, (0, -min(lie.cut, message.numel())), value=3)

    with (
        mock.patch.object(base, "lengths_of", announce),
        mock.patch.object(Message, "pack", send),
    ):
        yield


def lied_to(worker: int, lies: Sequence[Lie]) -> list[tuple[str, str, float]]:
    """Return for each lie the class of the error and its text, and the seconds that it took."""
    dist.init_process_group("gloo", rank=worker, world_size=WORKERS, timeout=timedelta(seconds=30))
    heard = []
    for lie in lies:
        dist.barrier()  # until all have given up
        transport = Distributed(dist.new_group(timeout=TIMEOUT))
        started, found = time.monotonic(), ("nothing", "")
        try:
            if worker == LIAR:
                with lying(lie):
                    transport.fulfil(request(lie, worker))
            else:
                transport.fulfil(request(lie, worker))
        except PeerError as error:
            found = (type(error).__name__, str(error))
        heard.append((*found, time.monotonic() - started))
    return heard


def check(lies: Sequence[Lie], timeout: float = 90) -> None:
    heard = run_in_processes(lied_to, WORKERS, lies, timeout=timeout)
    for index, lie in enumerate(lies):
        for worker in (0, 2):
            kind, text, seconds = heard[worker][index]
            honest = lie.announced[0 if lie.gathers else worker] == lie.true and lie.cut <= 0
            if not honest:
                assert kind in ("MessageError", "PeerError"), (lie, worker, kind)
                assert f"orker {LIAR} " in text or f"orker {LIAR}," in text, (lie, worker, text)
            elif lie.cut == 0:  # what is surplus is cut off, or ends the next exchange
                assert kind == "nothing", (lie, worker, text)
            assert seconds < 3 * TIMEOUT.total_seconds(), (lie, worker, seconds)


def test_a_liar_is_named() -> None:
    lies = [Lie(True, 6, (n,) * 3) for n in (0, 7, LIMIT, LIMIT + 1, 2**40)]
    lies += [Lie(True, 6, (6, 6, 6), cut) for cut in (8, 48, -PIECE)]
    lies += [Lie(False, 6, (n, 6, m)) for n, m in ((0, 7), (LIMIT + 1, -1), (2**40, 6))]
    lies += [Lie(False, PIECE, (PIECE - 2, PIECE, 1)), Lie(False, 6, (6, 6, 6), 8)]
    lies += [Lie(False, 6, (6, 6, LIMIT))]  # who waits for the rest waits until the timeout
    check(lies)


def drawn(seed: int, number: int) -> list[Lie]:
    draw = random.Random(seed)

    def length() -> int:
        near = (0, 1, 2, 5, 6, 100, PIECE // 4, PIECE // 4 + 9, PIECE // 2, LIMIT)
        return draw.choice([*near, draw.randint(0, LIMIT), LIMIT + 1, -1, 2**40, -(2**62)])

    made = []
    for _ in range(number):
        true = draw.choice((0, 1, 6, 100, PIECE // 4 + 9, LIMIT))
        first = length()
        announced: Any = (first, first, first)
        if draw.random() < 0.5:
            announced = (first, length(), draw.choice((true, length())))
        cut = draw.choice((0, 0, 0, 8, 24, -8, -PIECE, -4096))
        made.append(Lie(draw.random() < 0.5, true, announced, cut))
    return made


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(20))
def test_thirty_random_lies(seed: int) -> None:
    check(drawn(seed, 30), timeout=400)
