"""Shards on CUDA: the exchange waits for the streams of FSDP2's hooks, and gradients for the means.

Shown without a GPU, by units, streams, events and futures that keep a log.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gc.core.flow import Flow, Request
from lightning_gc.exchange.workers import Shapes
from lightning_gc.sharded import fsdp_units, shard_exchange
from lightning_gc.sharded.fsdp_units import Piece
from lightning_gc.sharded.shard_exchange import ShardBuckets
from lightning_gc.transports import Recording, Transport
from lightning_gc.transports.background import Background
from tests.support.pretended_cuda import CUDA, PretendedCuda, Stream

ROWS, COLUMNS = 3, 4


class Silent(Transport):
    worker, workers, sent_bytes = 0, 2, 0

    def fulfil(self, request: Request) -> Any:
        raise AssertionError


class PretendedUnit:
    """A unit of one parameter, whose hook the test calls."""

    dtype, divides_itself, keeps_from_replicas = torch.float32, False, False
    ranks = (0, 1)

    def __init__(self, name: str) -> None:
        self.name = name
        self.param = nn.Parameter(torch.zeros(ROWS, COLUMNS))
        self.hook: Callable[[Tensor], None] | None = None

    def pieces(self) -> list[Piece]:
        return [Piece(self.param, (ROWS, COLUMNS), 0, ROWS * COLUMNS)]

    def padded_numel(self) -> int:
        return ROWS * COLUMNS

    def listen(self, hook: Callable[[Tensor], None]) -> None:
        self.hook = hook


class Pass:
    """Backward passes of two units, the second before the first, and what is exchanged in them."""

    def __init__(self, patch: pytest.MonkeyPatch, bucket_bytes: float) -> None:
        self.cuda = PretendedCuda(patch)
        self.reducing = Stream(CUDA, self.cuda)  # FSDP2's, in which it calls hooks
        self.units: Any = [PretendedUnit("first"), PretendedUnit("second")]
        self.background = Background(Recording(Silent()), CUDA)
        self.ends: list[Callable[[], None]] = []
        self.exchanged: list[tuple[str, list[float]]] = []
        patch.setattr(fsdp_units, "after_backward", self.ends.append)
        patch.setattr(fsdp_units, "gradient_of", self.gradient_of)
        names = {unit.param: unit.name for unit in self.units}
        self.buckets = ShardBuckets(
            self.units, names, bucket_bytes, self.submit, self.background.check, lambda: None
        )
        for unit in self.units:
            unit.param.grad = torch.zeros(ROWS, COLUMNS)

    def gradient_of(self, param: nn.Parameter) -> Tensor:
        self.cuda.note(self.cuda.current(), "adds", param)
        assert param.grad is not None
        return param.grad

    def submit(self, flat: Tensor, shapes: Shapes) -> torch.futures.Future[Tensor]:
        return self.background.submit(self.exchange(flat, shapes), flat)

    def exchange(self, flat: Tensor, shapes: Shapes) -> Flow:
        self.cuda.note(self.cuda.current(), "exchanges", flat)
        self.exchanged.append((" ".join(shapes), flat.unique().tolist()))
        flat.add_(100)
        yield from ()

    def run(self) -> None:
        for unit, value in zip(reversed(self.units), (2.0, 1.0), strict=True):
            assert unit.hook is not None
            with torch.cuda.stream(self.reducing):  # type: ignore[arg-type]
                unit.hook(torch.full((ROWS * COLUMNS,), value))
        for end in self.ends:
            end()
        self.ends.clear()

    def order(self, *wanted: tuple[Any, str, Any]) -> list[int]:
        """Return the first places in the log, each after the one before."""
        places: list[int] = []
        for stream, verb, what in wanted:
            places.append(
                next(
                    i
                    for i, (_, s, v, w) in enumerate(self.cuda.log)
                    if s is stream and v == verb and (w is what or what is None)
                    if i > (places[-1] if places else -1)
                )
            )
        return places


def test_a_full_bucket_is_sent_from_the_hooks_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second pass on, when it is known how often units call."""
    tried = Pass(monkeypatch, bucket_bytes=1)
    tried.run()
    tried.cuda.log.clear()
    tried.exchanged.clear()
    tried.run()
    assert tried.background.close()
    assert tried.exchanged == [("second", [2.0]), ("first", [1.0])]
    own, home = tried.background._stream, tried.cuda.current()
    recorded = tried.order((tried.reducing, "records", None))
    event = tried.cuda.log[recorded[0]][3]
    tried.order(
        (tried.reducing, "records", event),
        (own, "waits", event),
        (own, "exchanges", None),
        (own, "completes", None),
        (home, "adds", tried.units[1].param),
    )
    assert not [e for e in tried.cuda.log if e[1] is home and e[2] == "records"]


def test_the_first_pass_is_sent_at_its_end_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """After FSDP2's own end, in which the pass's stream waits for those of its hooks."""
    tried = Pass(monkeypatch, bucket_bytes=1 << 20)
    tried.run()
    assert tried.background.close()
    assert tried.exchanged == [("second first", [1.0, 2.0])]
    own, home = tried.background._stream, tried.cuda.current()
    event = tried.cuda.log[tried.order((home, "records", None))[0]][3]
    tried.order(
        (home, "records", event),
        (own, "waits", event),
        (own, "exchanges", None),
        (own, "completes", None),
        (home, "adds", tried.units[0].param),
    )
    for unit, value in zip(tried.units, (101.0, 102.0), strict=True):
        assert (unit.param.grad == value).all()


def test_an_interrupted_pass_is_refused_not_followed_by_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An exception within a backward pass leaves torch's engine without calling its end."""
    tried = Pass(monkeypatch, bucket_bytes=1)
    tried.run()
    tried.buckets.refuse_interrupted()
    assert tried.units[1].hook is not None
    tried.units[1].hook(torch.ones(ROWS * COLUMNS))
    with pytest.raises(RuntimeError, match="was interrupted by an exception"):
        tried.buckets.refuse_interrupted()
    assert tried.background.close()


def test_what_a_hook_was_given_is_kept_for_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else FSDP2's next reduce-scatter might get its memory while it is being read."""
    kept: list[Tensor] = []
    monkeypatch.setattr(shard_exchange, "used_here", kept.append)
    tried = Pass(monkeypatch, bucket_bytes=1)
    given = torch.ones(ROWS * COLUMNS)
    assert tried.units[1].hook is not None
    tried.units[1].hook(given)
    assert kept[0] is given
    assert not given.any()  # zeros are left to FSDP2
    tried.units[0].hook(torch.ones(ROWS * COLUMNS))
    tried.ends[0]()
    assert tried.background.close()
    assert len(kept) == 2 + len(tried.units)  # and each bucket, which the thread's stream has used
