"""Lossless sends every bit, near the exponents' entropy, and trains as Identity does."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_gc import AllGather, Identity, Lossless, TwoShot
from lightning_gc.schemes import Scheme
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from tests.support.codecs import KINDS, apply

DTYPES = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
"""Of a gradient's dtype the bits of mantissa."""


def bits(x: Tensor) -> np.ndarray:
    return x.contiguous().view(torch.int32).numpy().view(np.uint32)


def read(payload: tuple[Tensor, ...], numel: int) -> np.ndarray:
    """Decode by the definition, element by element, from a payload as bytes."""
    known, low_parts, high_parts, tops, lows = (tensor.numpy() for tensor in payload)
    low = len(low_parts) // max(1, -(-numel // 8))
    width = 16 * len(lows) // max(1, -(-len(tops) // 16) * 16)
    high = iter(np.unpackbits(high_parts, bitorder="little"))
    last = np.unpackbits(low_parts, bitorder="little")
    rest = np.unpackbits(lows.view(np.uint8), bitorder="little")
    mantissas = iter(enumerate(tops))
    found = np.zeros(numel, np.uint32)
    for i in range(numel):
        rank = 0
        while not next(high):
            rank += 1
        rank = (rank << low) + sum(int(d) << j for j, d in enumerate(last[i * low :][:low]))
        exponent = int(known[rank])
        if exponent or len(tops) == numel:
            at, top = next(mantissas)
            if width == 16:
                bottom = int(lows.view(np.uint16)[at])
            else:
                digits = rest[at * width : (at + 1) * width]
                bottom = sum(int(d) << j for j, d in enumerate(digits)) << (16 - width)
            found[i] = (int(top) & 128) << 24 | exponent << 23 | (int(top) & 127) << 16 | bottom
    assert next(mantissas, None) is None
    return found


SPECIAL = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, torch.inf, -torch.inf, torch.nan] * 30
)
SPARSE = torch.where(torch.arange(300) % 7 == 0, KINDS["Student t, 2 degrees"], 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*KINDS, "special", "sparse", "one", "none"])
def test_each_bit_arrives(kind: str, dtype: torch.dtype) -> None:
    others = {"special": SPECIAL, "sparse": SPARSE, "one": torch.ones(1), "none": torch.ones(0)}
    x = {**KINDS, **others}[kind].to(dtype).float()
    sent, left, payload = apply(Lossless(), x)
    # Adding to zero makes 0 of -0.
    assert (sent.view(np.uint32) == bits(x + 0.0)).all() or np.isnan(sent).any()
    assert not left.any()
    assert (read(payload, x.numel()) == bits(x)).all()


def patterns(dtype: torch.dtype) -> Tensor:
    """Return all patterns of 16 bits; of float32 the edges of each exponent, and random ones."""
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    ones = [0, *(1 << i for i in range(23))]  # with bit 22 a NaN is quiet
    mantissas = torch.tensor([*ones, *(2**23 - 1 - i for i in ones), 0x3FFFFF, 0x400001])
    edges = torch.arange(512)[:, None] << 23 | mantissas  # sign and exponent
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randint(2**32, (300_000,), generator=draw)
    nans = torch.randint(2**23, (100_000,), generator=draw) | 0xFF << 23
    signs = torch.randint(2, (100_000,), generator=draw) << 31
    return torch.cat([edges.flatten(), numbers, nans | signs]).to(torch.int32).view(dtype)


def differing(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return where bits differ, ``(numel,)``."""
    kind = torch.int16 if ours.dtype.itemsize == 2 else torch.int32
    return ours.view(kind) != theirs.view(kind)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pattern_is_in_the_message(dtype: torch.dtype) -> None:
    x = patterns(dtype).float()
    sent, out = x.clone(), torch.full_like(x, 7.0)
    bucket = cases.bucket_of(x)
    payload = Lossless().encode(sent, bucket)
    Lossless().whole.receive_all([payload], out, bucket)
    assert not differing(out, x).any()
    assert differing(out, x * 1.0).any() == (dtype != torch.float16)  # signalling NaNs are in it


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_worker_gets_every_pattern_back_but_nan_in_16_bits(dtype: torch.dtype) -> None:
    x = patterns(dtype)
    mean = Lockstep(1, Lossless()).step([{"w": x}]).mean["w"]
    changed = differing(mean, x)
    assert mean.dtype == dtype
    assert changed.any() == (dtype != torch.float32)
    assert not (changed & ~x.isnan()).any()
    assert torch.equal(mean.isnan(), x.isnan())


@pytest.mark.parametrize("scheme", [AllGather(), TwoShot()], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_workers_get_the_mean_of_every_pattern(dtype: torch.dtype, scheme: Scheme) -> None:
    """As the dtype rounds it, which is what ``Identity()`` sends; 0 is 0 in ``TwoShot``."""
    x = patterns(dtype)
    draw = torch.Generator().manual_seed(1)
    for other in (x, x.flip(0), x[torch.randperm(x.numel(), generator=draw)]):
        gradients = [{"w": x.clone()}, {"w": other.clone()}]
        ours = Lockstep(2, Lossless(), scheme=scheme).step(gradients).mean["w"]
        mean = ((x * 0.5).float() + (other * 0.5).float()).to(dtype)
        dense = Lockstep(2, Identity()).step(gradients).mean["w"]
        assert torch.equal(ours.nan_to_num(), dense.nan_to_num())
        assert torch.equal(ours.isnan(), mean.isnan())
        zero = (mean == 0) & isinstance(scheme, TwoShot)
        assert not (differing(ours, mean) & ~mean.isnan() & ~zero).any()
        assert not differing(ours, torch.zeros_like(ours))[zero].any()


def test_zeros_take_a_bit() -> None:
    x = torch.zeros(80_000)
    x[::100] = torch.randn(800, generator=torch.Generator().manual_seed(0))
    _, _, payload = apply(Lossless(), x)
    entropy = 80_000 * 0.081 + 800 * (24 + 2.5)
    assert 8 * sum(t.nbytes for t in payload) < entropy + 80_000


def bound(x: Tensor, mantissa: int) -> float:
    """Return the entropy of the exponents, and a sign and mantissa for each element, in bits."""
    shares = np.bincount(bits(x) >> 23 & 255) / x.numel()
    entropy = -(shares[shares > 0] * np.log2(shares[shares > 0])).sum()
    return float(x.numel() * (entropy + 1 + mantissa))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.body = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        words = (x.abs() * 40).long().clamp(max=99)
        out: Tensor = self.head(self.body(self.embedding(words))[0][:, -1])
        return out


MODELS = {
    "perceptron": lambda: nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 4)),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 12)), nn.Conv1d(1, 16, 3), nn.BatchNorm1d(16), nn.ReLU(),
        nn.Conv1d(16, 16, 3), nn.Flatten(), nn.Linear(128, 4),
    ),
    "words": Words,
}  # fmt: skip


class Training:
    """Trains a model whose gradients are exchanged in a dtype; W workers with their own data."""

    def __init__(
        self,
        model: str,
        workers: int,
        compressor: Identity | Lossless,
        scheme: Scheme | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.module = MODELS[model]()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)
        self.exchange = Lockstep(workers, compressor, scheme=scheme)
        self.dtype, self.draw = dtype, torch.Generator().manual_seed(2)

    def step(self) -> list[dict[str, Tensor]]:
        gradients = []
        for _ in self.exchange.engines:
            x = torch.randn(8, 12, generator=self.draw)
            self.optimizer.zero_grad()
            (self.module(x) - x[:, :4] * x[:, 4:8]).square().mean().backward()
            named = self.module.named_parameters()
            gradients.append({n: p.grad.to(self.dtype) for n, p in named if p.grad is not None})
        mean = self.exchange.step(gradients).mean
        for name, param in self.module.named_parameters():
            param.grad = mean[name].float()
        self.optimizer.step()
        return gradients


CASES = [
    (2, None, torch.float32),
    (3, AllGather(), torch.float32),
    (4, TwoShot(), torch.float32),
    (2, None, torch.float16),
    (4, None, torch.bfloat16),
]


@pytest.mark.parametrize(
    ("model", "workers", "scheme", "dtype"),
    [
        pytest.param(m, *case, marks=() if (m, i) == ("words", 0) else pytest.mark.nightly)
        for m in MODELS
        for i, case in enumerate(CASES)
    ],
)
def test_a_hundred_steps_equal_identity(
    model: str, workers: int, scheme: Scheme | None, dtype: torch.dtype
) -> None:
    ours = Training(model, workers, Lossless(), scheme, dtype)
    dense = Training(model, workers, Identity(), None, dtype)
    coded = allowed = 0.0
    for _ in range(100):
        before = ours.exchange.engines[0].tally.payload_bytes
        (own, *_), _ = ours.step(), dense.step()
        coded += 8 * (ours.exchange.engines[0].tally.payload_bytes - before)
        flat = torch.cat([grad.flatten() for grad in own.values()]).float()
        allowed += bound(flat, DTYPES[dtype])
    for mine, theirs in zip(ours.module.parameters(), dense.module.parameters(), strict=True):
        assert (bits(mine.detach()) == bits(theirs.detach())).all()
    if workers == 2:  # else the tally counts the means of shards too
        assert coded <= 1.05 * allowed


def test_a_step_of_more_workers_equals_identity() -> None:
    draw = torch.Generator().manual_seed(3)
    for workers, scheme, dtype in CASES[1:]:
        x = [{"w": (torch.randn(999, generator=draw) * 1e-6).to(dtype)} for _ in range(workers)]
        mean = Lockstep(workers, Lossless(), scheme=scheme).step(x).mean["w"]
        assert mean.dtype == dtype
        assert torch.equal(mean, Lockstep(workers, Identity()).step(x).mean["w"])


def test_damage_is_refused() -> None:
    x = SPARSE.clone()
    _, _, payload = apply(Lossless(), x)
    known, low, high, tops, lows = payload  # the most frequent exponent is zero's
    out = torch.zeros(300)
    lies = {
        "44 mantissas for 43": (known, low, high, torch.cat([tops, tops[:1]]), lows),
        "42 mantissas for 43": (known, low, high, tops[:-1], lows),
        "exponents": (known[:0], low, high, tops, lows),
        "code": (known[:-1], low, high, tops, lows),
        "marks": (known, low, high[:-1], tops, lows),
        "lengths": (known, low, high, tops, lows[:-1]),
    }
    for match, lie in lies.items():
        with pytest.raises(ValueError, match=match):
            Lossless().decode(lie, out, 1.0, cases.bucket_of(x))
        assert not out.any()


def test_float64_is_refused() -> None:
    with pytest.raises(ValueError, match=r"float64; use Identity"):
        apply(Lossless(), torch.ones(3, dtype=torch.float64))
