"""Transports survive any bytes and any lengths that arrive."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import distributed_c10d

from lightning_gc.core.flow import Exchange, Gather, MeanShard, Reply, Request, join
from lightning_gc.core.message import Message, as_bytes, joined, reserve
from lightning_gc.exchange.peers import ShardParts
from lightning_gc.exchange.validation import check_agreement
from lightning_gc.transports import Simulated, Transport
from lightning_gc.transports.base import Checksummed, check_lengths, laid_out, lengths_of
from lightning_gc.transports.distributed import (
    MAX_TEXT,
    broadcast_text,
    gather_text,
    set_timeout,
)
from lightning_gc.transports.peer_error import MessageError, PeerError

pytestmark = pytest.mark.usefixtures("poisoned")
CPU = torch.device("cpu")
DTYPES = [torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.int32, torch.float64]
ANY = st.integers(-(2**63), 2**63 - 1)
LENGTHS = st.one_of(st.integers(-3, 30), ANY)

often = pytest.mark.parametrize("examples", [200, pytest.param(10_000, marks=pytest.mark.nightly)])


def hold(examples: int, law: Callable[[st.DataObject], None]) -> None:
    once = settings(
        max_examples=examples, derandomize=examples <= 200, database=None, deadline=None
    )
    once(given(st.data())(law))()


def own_payload(data: st.DataObject) -> tuple[Tensor, ...]:
    shapes = st.one_of(st.just(()), st.tuples(st.integers(0, 9)), st.just((2, 3)))
    drawn = data.draw(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=4))
    return tuple(torch.zeros(shape, dtype=dtype) for dtype, shape in drawn)


@often
def test_unpack_takes_any_bytes_and_refuses_too_few(examples: int) -> None:
    def law(data: st.DataObject) -> None:
        own = own_payload(data)
        layout = Message.of(own)
        assert layout.pack(own).numel() == layout.nbytes
        assert layout.nbytes % 16 == 0, "NCCL is slow with other parts"
        assert layout.nbytes - sum(t.nbytes for t in own) == layout.padding < 16
        surplus = data.draw(st.integers(-8, 16))
        size = max(layout.nbytes + surplus, 0)
        tile = data.draw(st.binary(min_size=1, max_size=9))
        message = torch.tensor(list((tile * (size + 1))[:size]), dtype=torch.uint8)
        before = message.clone()
        if size < layout.nbytes:
            with pytest.raises(ValueError, match=f"{layout.nbytes} bytes was expected"):
                layout.unpack(message)
            return
        tensors = layout.unpack(message)
        assert [(t.dtype, t.shape) for t in tensors] == [(t.dtype, t.shape) for t in own]
        for tensor in tensors:
            assert tensor.dtype != torch.bool or as_bytes(tensor).le(1).all()
        assert torch.equal(message, before)

    hold(examples, law)


def test_what_is_no_string_of_bytes() -> None:
    layout = Message.of((torch.zeros(2),))
    for message in (torch.zeros(16), torch.zeros(1, 16, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="16 bytes was expected"):
            layout.unpack(message)


@often
def test_lengths_are_refused_or_make_a_layout_within_limits(examples: int) -> None:
    def law(data: st.DataObject) -> None:
        dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4))
        own = tuple(torch.zeros(data.draw(st.integers(0, 9)), dtype=dtype) for dtype in dtypes)
        limits = tuple(data.draw(st.sampled_from((None, 0, 12))) for _ in own)
        honest = [t.numel() for t in own]
        announced = [
            data.draw(st.one_of(st.just(min(n, limit or n)), LENGTHS))
            for n, limit in zip(honest, limits, strict=True)
        ]
        most = [n if limit is None else limit for n, limit in zip(honest, limits, strict=True)]
        lowest = [n if limit is None else 0 for n, limit in zip(honest, limits, strict=True)]
        if not all(a <= n <= b for a, n, b in zip(lowest, announced, most, strict=True)):
            with pytest.raises(ValueError, match="Worker 3 announces"):
                check_lengths(announced, own, limits, 3)
            return
        check_lengths(announced, own, limits, 3)
        layout = Message.of(own, announced)
        assert layout.nbytes % 16 == 0
        assert 16 <= layout.nbytes <= Message.of(tuple(t.new_zeros(20) for t in own)).nbytes + 16
        sent = tuple(t.new_zeros(n) for t, n in zip(own, announced, strict=True))
        tensors = layout.unpack(layout.pack(sent))
        assert all(t.numel() <= m for t, m in zip(tensors, most, strict=True))

    hold(examples, law)


@often
def test_a_message_of_other_lengths_than_announced_is_refused(examples: int) -> None:
    def law(data: st.DataObject) -> None:
        own = tuple(t for t in own_payload(data) if t.dim() == 1)
        layout = laid_out(own, (9,) * len(own))
        other = [data.draw(st.integers(0, 9), label="announced") for _ in own]
        message = torch.nn.functional.pad(layout.pack(own), (0, 800))
        if other == lengths_of(own):
            assert len(Message.of(own, other).unpack(message)) == len(own)
        else:
            with pytest.raises(ValueError, match=r"does not end after \d+ bytes, as announced"):
                Message.of(own, other).unpack(message)

    hold(examples, law)


def test_the_simulator_checks_lengths_of_exchanges_too() -> None:
    fine, long = torch.zeros(2), torch.zeros(3)
    requests = [Exchange(((fine,), (fine,)), (2,)), Exchange(((fine,), (long,)), (2,))]
    with pytest.raises(ValueError, match="Worker 1 announces 3 elements where at most 2"):
        Simulated(2).fulfil(requests)


class Alike(Transport):
    """Worker 0 of two that send the same; bit 6 of worker 1's first byte is flipped if asked."""

    worker, workers = 0, 2

    def __init__(self, flipped: bool) -> None:
        self.flipped = flipped

    def fulfil(self, request: Request) -> Reply:
        assert isinstance(request, Exchange), "else nothing could be compared"
        mine, theirs = ([t.clone() for t in request.payloads[0]] for _ in range(2))
        if self.flipped:
            as_bytes(theirs[0])[0] ^= 64
        return [mine, theirs]


def test_shards_of_a_mean_have_checksums_too() -> None:
    request = MeanShard((torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0, 6.0])))
    found = Checksummed(Alike(flipped=False)).fulfil(request)
    assert [shard.tolist() for shard in found] == [[1.0, 2.0], [5.0]]
    with pytest.raises(MessageError, match="message of worker 1 does not match"):
        Checksummed(Alike(flipped=True)).fulfil(request)


class Says(Transport):
    """Answers any gather with these texts."""

    def __init__(self, *texts: bytes) -> None:
        self.texts = texts
        self.worker, self.workers = 0, len(texts)

    def fulfil(self, request: Request) -> Reply:
        assert isinstance(request, Gather)
        assert request.limits == (MAX_TEXT,)
        return [[torch.tensor(list(text), dtype=torch.uint8)] for text in self.texts]


@often
def test_any_bytes_make_a_text(examples: int) -> None:
    def law(data: st.DataObject) -> None:
        said = data.draw(st.lists(st.binary(max_size=40), min_size=1, max_size=4))
        heard = gather_text("mine", Says(*said), CPU)
        assert heard == [text.decode(errors="replace") for text in said]

    hold(examples, law)


def test_a_worker_of_another_version_says_less() -> None:
    said = Says(b"compressor=TopK()\nseed=0", b"compressor=TopK()")
    with pytest.raises(ValueError, match="Worker 1 has nothing more, but worker 0 has seed=0"):
        check_agreement({}, said, CPU)  # type: ignore[arg-type]


@often
def test_broadcast_takes_any_length_and_any_bytes(
    examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 0 is played by a function that fills in what it likes."""
    wire: list[Tensor] = []

    def receive(tensor: Tensor, src: int, group: None) -> None:
        assert src == 0
        tensor.copy_(wire.pop(0))

    fakes: dict[str, Any] = {"is_initialized": lambda: True, "get_rank": lambda _: 1}
    fakes |= {"get_world_size": lambda _: 2, "broadcast": receive}
    for name, fake in fakes.items():
        monkeypatch.setattr(dist, name, fake)

    def law(data: st.DataObject) -> None:
        text = data.draw(st.binary(max_size=40))
        length = data.draw(st.one_of(st.just(len(text)), ANY))
        wire[:] = [torch.tensor([length])]
        if length == len(text):
            wire.append(torch.tensor(list(text), dtype=torch.uint8))
            assert broadcast_text(None, CPU) == text.decode(errors="replace")
        elif 0 <= length <= MAX_TEXT:
            return  # as long as it says, then; there is nothing to see
        else:
            with pytest.raises(ValueError, match=r"announces a text of .* where 0\.\.16,777,216"):
                broadcast_text(None, CPU)

    hold(examples, law)


def test_without_other_workers_a_text_is_its_own_broadcast() -> None:
    assert broadcast_text("alone", CPU) == "alone"


def test_sums_over_shards_name_the_ranks_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of the ranks 4 and 5; which of all it is says nothing of whom it waits for."""

    def fail(tensor: Tensor, group: Any, **_: Any) -> None:
        raise RuntimeError("gloo: Connection closed by peer")

    fakes = {"get_rank": lambda group=None: 5 if group is None else 1, "all_reduce": fail}
    fakes |= {"get_world_size": lambda group=None: 8 if group is None else 2}
    for name, fake in {**fakes, "get_process_group_ranks": lambda group: [4, 5]}.items():
        monkeypatch.setattr(dist, name, fake)
    node: Any = object()
    with pytest.raises(PeerError, match=r"Worker 1: all-reduce with worker 0 .* the ranks 4, 5\."):
        ShardParts(node, CPU).total(torch.ones(1))


def test_known_lengths_are_not_sent() -> None:
    """Joined with a request of fixed lengths, they stay known. With unknown ones they do not."""
    payloads = [(torch.zeros(n),) for n in (2, 5)]
    known = [Gather(payload, (9,), [(2,), (5,)]) for payload in payloads]
    unknown = [Gather(payload, (9,)) for payload in payloads]
    fixed = Gather((torch.zeros(3),))
    sent = []
    for requests in (known, unknown):
        network = Simulated(2)
        network.fulfil(requests)
        sent.append(network.sent_bytes)
    # 2 and 5 numbers, padding and seal; the length. Each message has its own size.
    assert sent == [[8 + 8, 24 + 8], [8 + 8 + 8, 24 + 8 + 8]]
    both = join([known[0], fixed])
    assert isinstance(both, Gather)
    assert both.lengths == [[2, 3], [5, 3]]
    neither = join([known[0], unknown[0]])
    assert isinstance(neither, Gather)
    assert neither.lengths is None


def test_known_lengths_are_checked() -> None:
    requests = [Gather((torch.zeros(n),), (9,), [(2,), (4,)]) for n in (2, 5)]
    with pytest.raises(PeerError, match="Worker 1 has sent"):
        Simulated(2).fulfil(requests)


def test_only_neighbours_are_joined_without_a_copy() -> None:
    values, flag = reserve([(torch.float32, 3), (torch.float32, 1)], CPU)
    both = joined([values, flag])
    assert both.data_ptr() == values.data_ptr()
    assert both.shape == (4,)
    flat = torch.zeros(8)
    for apart in ([flat[:2], flat[3:5]], [flat[4:], flat[:4]], [flat[:2], torch.zeros(2)]):
        assert joined(apart).data_ptr() != apart[0].data_ptr()


@pytest.mark.parametrize("public", [True, False], ids=["2.14", "before"])
def test_a_timeout_is_set_by_the_public_name_where_there_is_one(
    public: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From torch 2.14 on the private name warns, and later versions may lack it."""
    calls = list[tuple[str, timedelta]]()
    monkeypatch.delattr(dist, "set_timeout", raising=False)
    monkeypatch.delattr(distributed_c10d, "_set_pg_timeout", raising=False)
    home, name = (dist, "set_timeout") if public else (distributed_c10d, "_set_pg_timeout")
    monkeypatch.setattr(home, name, lambda t, group: calls.append((name, t)), raising=False)
    set_timeout(timedelta(seconds=5))
    assert calls == [(name, timedelta(seconds=5))]
