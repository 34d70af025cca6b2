"""Situations from public reports: equal to plain DDP, or refused in a sentence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.nn.utils import clip_grad_value_, parametrizations
from torch.utils.checkpoint import checkpoint

from lightning_gc import Identity, PerParameter, PowerSGD, TopK, attach
from lightning_gc.compressors import Compressor
from tests.support.fitting import ddp, digest, fit, unwarned
from tests.support.models import Plain, common_batches
from tests.support.processes import run_in_processes, said

pytestmark = pytest.mark.processes
Module = DistributedDataParallel


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 4))


def normed() -> nn.Sequential:
    made = net()
    made[0] = parametrizations.weight_norm(made[0])
    made[2] = parametrizations.spectral_norm(made[2])
    return made


def pictures() -> nn.Module:
    body = nn.Sequential(nn.Unflatten(1, (4, 2, 2)), nn.Conv2d(4, 80, 1), nn.Conv2d(80, 4, 2))
    made: Any = nn.Sequential(body, nn.Flatten())
    return made.to(memory_format=torch.channels_last)  # type: ignore[no-any-return]


class Recomputed(nn.Module):
    """Computes one layer twice, by checkpoints, and shares its weight with another."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.twice, self.tied = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.last = nn.Linear(32, 4)
        self.reentrant = reentrant
        if not reentrant:
            self.tied.weight = self.twice.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tied(self.first(x).tanh()).tanh()
        for _ in range(2):
            hidden = checkpoint(self.twice, hidden, use_reentrant=self.reentrant).tanh()
        out: Tensor = self.last(hidden)
        return out


def loss(module: Any, x: Tensor) -> Tensor:
    error: Tensor = (module(x) - x[:, :4]).square().mean()
    return error


def plainly(module: Module, x: Tensor) -> None:
    loss(module, x).backward()


def scaled(module: Module, x: Tensor) -> None:
    """Change gradients in place, and look for NaN."""
    with torch.autograd.set_detect_anomaly(True):
        loss(module, x).backward()
    clip_grad_value_(module.parameters(), 1e-3)
    for param in module.parameters():
        assert param.grad is not None
        param.grad.mul_(2)


def penalised(module: Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    (loss(module, x.detach()) + slope.square().mean()).backward()


def looked_ahead(module: Module, x: Tensor) -> None:
    """Validate before each step, and throw away the graph of a forward pass."""
    module.eval()
    with torch.inference_mode():
        module(x)
    module.train()
    module(x)
    loss(module, x).backward()


Situation = tuple[Callable[[], nn.Module], Callable[..., None], dict[str, Any]]
SITUATIONS: dict[str, Situation] = {
    # pytorch#61470
    "weight_norm and spectral_norm": (normed, plainly, {}),
    # pytorch#121594, pytorch#24005
    "checkpoint": (lambda: Recomputed(False), plainly, {}),
    "reentrant checkpoint": (lambda: Recomputed(True), plainly, {"static_graph": True}),
    # pytorch#70222, pytorch#47163
    "channels_last": (pictures, plainly, {}),
    # pytorch pull request 44344, fairscale#354
    "gradients are views": (net, scaled, {"gradient_as_bucket_view": True}),
    # pytorch#24005
    "gradient penalty": (net, penalised, {}),
    # pytorch#57776
    "unused forward passes": (net, looked_ahead, {}),
}


def trained(worker: int, name: str, compressor: Compressor | None) -> tuple[str, int]:
    """Return a digest of the weights after six steps, and the bytes sent by us."""
    make, step, options = SITUATIONS[name]
    torch.manual_seed(0)
    inner = make()
    module = DistributedDataParallel(inner, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    handle: Any = attach(module, compressor, optimizers=optimizer) if compressor else None
    for i, x in enumerate(torch.randn(6, 8, 16, generator=torch.Generator().manual_seed(worker))):
        optimizer.zero_grad(set_to_none=i % 2 == 0)
        step(module, x)
        optimizer.step()
    sent = handle.account().wire_bytes if handle else 0
    if handle:
        handle.close()
    return digest(inner), sent


def all_situations(worker: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    ways: dict[str, Compressor | None] = {
        "plain": None,
        "Identity": Identity(),
        "TopK": PerParameter(TopK(0.1)),
        "PowerSGD": PowerSGD(1),
    }
    with unwarned():
        return {n: {w: trained(worker, n, c) for w, c in ways.items()} for n in SITUATIONS}


def test_ways_to_train_are_those_of_plain_ddp() -> None:
    """``Identity`` has its bits, others keep workers equal."""
    one, two = run_in_processes(all_situations, 2)
    assert one == two
    for name, found in one.items():
        plain, sent = found.pop("plain")
        assert (found["Identity"][0], sent) == (plain, 0), name
        assert all(sent > 0 for _, sent in found.values()), name
        assert all(found[way][0] != plain for way in ("TopK", "PowerSGD")), name


def native_precision(worker: int) -> str:
    dist.init_process_group("gloo")
    types = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    module = DistributedDataParallel(net(), mixed_precision=types)
    with pytest.raises(RuntimeError) as caught:
        attach(module, TopK(0.1))
    return str(caught.value)


def test_ddps_own_mixed_precision_is_answered_by_name() -> None:
    """It registers a communication hook (pytorch pull request 92882)."""
    for text in run_in_processes(native_precision, 2):
        assert "DDP's mixed_precision" in text
        assert "use torch.autocast instead" in text


class Manual(Plain):
    """Optimises by hand; ``raw``: with ``loss.backward()``, which Lightning does not follow."""

    raw = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.step()  # without gradients, as before a schedule's first step
        error = self.loss(batch, batch_idx)
        if self.raw:
            error.backward()
        else:
            self.manual_backward(error)
        optimizer.step()
        optimizer.zero_grad()


class Raw(Manual):
    raw = True


class Spare(Plain):
    """Has a layer that no loss reaches, and leaves its passes to the Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.nn.Linear(8, 8)


class RawLater(Manual):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.raw = batch_idx == 1
        return super().training_step(batch, batch_idx)


def by_hand(worker: int) -> tuple[int, list[str]]:
    with unwarned():
        left = fit(ddp(TopK(0.1)), Manual, common_batches(16, 4), devices=2)
        texts = [
            said(fit, ddp(TopK(0.1)), module, common_batches(16, 4), devices=2)
            for module in (Raw, RawLater, Spare)
        ]
    return left["rounds"][0], texts


def test_a_backward_pass_that_exchanges_nothing_is_refused() -> None:
    """Workers drifted apart without a word (Lightning#9237), in all steps or in a later one."""
    for rounds, texts in run_in_processes(by_hand, 2):
        assert rounds == 2
        spare = texts.pop()
        assert "DDP waits for the gradients of extra.weight and extra.bias" in spare
        assert "CompressedDDPStrategy(..., find_unused_parameters=True)" in spare
        assert "manual_backward" not in spare
        for text in texts:
            assert text.startswith("RuntimeError: SGD.step was called, but no gradient has been")
            assert "self.manual_backward(loss) instead of loss.backward()" in text
