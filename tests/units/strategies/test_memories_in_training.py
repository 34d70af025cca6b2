"""Memories move weights in a Trainer as their formulas say, and refuse optimizers that clash."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import OnExceptionCheckpoint
from torch import Tensor

from lightning_gc import (
    GlobalMomentum,
    LocalMomentum,
    MomentumCorrection,
    NoMemory,
    PerParameter,
    StepAhead,
    TopK,
)
from lightning_gc.compressors.sparsifiers.sparse_codec import JointSelection
from lightning_gc.lightning.for_pytorch_lightning import SimulatedDDPStrategy
from tests.support.fitting import quiet_trainer, unwarned
from tests.support.models import PlainSGD, common_batches

EVERYWHERE = PerParameter(TopK(0.05))


class Notes:
    """What all workers have seen; without ``__dict__``, it is not taken for each worker's own."""

    __slots__ = ("forward_at", "step_from")

    def __init__(self) -> None:
        self.forward_at: list[Tensor] = []
        self.step_from: list[Tensor] = []


class Watching(PlainSGD):
    """Notes the weights that its forward passes see, and those that its optimizer steps from."""

    def __init__(self) -> None:
        super().__init__()
        self._notes = Notes()

    @property
    def forward_at(self) -> list[Tensor]:
        return self._notes.forward_at

    @property
    def step_from(self) -> list[Tensor]:
        return self._notes.step_from

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.forward_at.append(self.head.weight.detach().clone())
        return super().loss(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.step_from.append(self.head.weight.detach().clone())


def train(
    memory: Any,
    module: pl.LightningModule,
    compressor: Any = EVERYWHERE,
    workers: int = 2,
    **more: Any,
) -> None:
    strategy = SimulatedDDPStrategy(compressor, memory, workers=workers)
    trainer = quiet_trainer(strategy, **{"limit_train_batches": 6, **more})
    with unwarned():
        trainer.fit(module, common_batches())


@pytest.mark.parametrize("arguments", [{}, {"nesterov": True}, {"weight_decay": 0.01}])
def test_momentum_correction_of_everything_is_sgd_with_momentum(arguments: dict[str, Any]) -> None:
    """Trained by Lightning: density 1 with the memory's momentum, and torch's own without it."""
    torch.manual_seed(0)
    ours, theirs = PlainSGD(), PlainSGD(momentum=0.9, **arguments)
    theirs.load_state_dict(ours.state_dict())
    torch.manual_seed(1)
    train(MomentumCorrection(0.9, **arguments), ours, PerParameter(TopK(1.0)))
    torch.manual_seed(1)
    train(NoMemory(), theirs, PerParameter(TopK(1.0)))
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
def test_a_step_ahead_and_back(alpha: float) -> None:
    """Each worker's forward pass is at w − α·γ·e of its own; the optimizer steps from w."""
    torch.manual_seed(0)
    module = Watching()
    errors: list[Tensor] = []

    class Note(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            if engines := module.trainer.strategy.engines:  # type: ignore[attr-defined]
                known = engines[len(errors) % 2].errors()
                zero = torch.zeros_like(module.head.weight)
                errors.append(known.get("head.weight", zero).clone())

    train(StepAhead(alpha), module, callbacks=[Note()])
    assert len(errors) == len(module.forward_at) == 12
    assert len(module.step_from) == 6
    for number, seen in enumerate(module.forward_at):
        expected = module.step_from[number // 2] - alpha * module.rate * errors[number]
        assert torch.equal(seen, expected) or torch.allclose(seen, expected, rtol=1e-6, atol=1e-8)
    assert any(error.any() for error in errors)
    moved = [not torch.equal(s, module.step_from[n // 2]) for n, s in enumerate(module.forward_at)]
    assert any(moved) == (alpha > 0)


@pytest.mark.parametrize("every", [1, 3])
def test_all_step_ahead_to_the_same_place_once_errors_are_averaged(every: int) -> None:
    """Three workers: after every n-th step their forward passes see the same bits."""
    torch.manual_seed(0)
    module = Watching()
    train(StepAhead(average_every=every), module, workers=3)
    assert len(module.forward_at) == 18
    for step in range(6):
        first, *others = module.forward_at[3 * step : 3 * step + 3]
        common = all(torch.equal(other, first) for other in others)
        assert common == (step % every == 0), step  # in step 0 there are no errors yet
        assert torch.equal(first, module.step_from[step]) == (step == 0)  # it has moved


class Breaks(Watching):
    """Fails in the fourth step."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().loss(batch, batch_idx)
        if len(self.forward_at) == 8:
            if self.where == "forward":
                raise RuntimeError(self.where)
            if self.where == "backward":
                loss.register_hook(self.breaks)
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        if len(self.forward_at) == 8 and self.where == "between":
            raise RuntimeError(self.where)

    def breaks(self, *_: Any) -> None:
        raise RuntimeError(self.where)


def fourth_step_from() -> Tensor:
    """Return the weights with which the fourth step begins."""
    torch.manual_seed(0)
    clean = Watching()
    train(StepAhead(), clean, limit_train_batches=4)
    return clean.step_from[3]


@pytest.mark.parametrize("where", ["forward", "between", "backward"])
def test_an_exception_leaves_nothing_moved(where: str, tmp_path: Any) -> None:
    """In the middle of a forward pass, of a backward pass, and between them; saved and not."""
    for saving in ([OnExceptionCheckpoint(tmp_path, where)], []):
        torch.manual_seed(0)
        module = Breaks(where)
        with pytest.raises(RuntimeError, match=where):
            train(StepAhead(), module, callbacks=saving, default_root_dir=str(tmp_path))
        assert not torch.equal(module.head.weight, module.forward_at[-1])
        assert len(module.step_from) == 3
        assert torch.equal(module.head.weight, fourth_step_from())
    saved = torch.load(tmp_path / f"{where}.ckpt", weights_only=True)
    assert torch.equal(saved["state_dict"]["head.weight"], fourth_step_from())


@pytest.mark.parametrize(
    ("memory", "arguments", "word"),
    [
        (MomentumCorrection(), {"momentum": 0.9}, "momentum=0,"),
        (MomentumCorrection(), {"weight_decay": 1e-4}, "weight_decay=0.0001"),
        (GlobalMomentum(), {"momentum": 0.9}, "momentum=0,"),
        (LocalMomentum(), {"momentum": 0.9}, "momentum=0,"),
    ],
)
def test_optimizers_that_do_it_too_are_refused(
    memory: Any, arguments: dict[str, Any], word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        train(memory, PlainSGD(**arguments))


class WithAdam(PlainSGD):
    def __init__(self, kind: Any, **arguments: Any) -> None:
        super().__init__()
        self.kind, self.arguments = kind, arguments

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), **self.arguments)


def test_adam_has_momentum() -> None:
    with pytest.raises(ValueError, match="betas"):
        train(MomentumCorrection(), WithAdam(torch.optim.Adam))


def test_adam_without_momentum_is_none_too_many() -> None:
    """Decay that is no part of the gradient is the optimizer's; any other the memory's."""
    none = (0.0, 0.999)
    train(GlobalMomentum(), WithAdam(torch.optim.Adam, betas=none, weight_decay=0.1))
    group = {"betas": none, "weight_decay": 0.1, "decoupled_weight_decay": True}
    MomentumCorrection().check_optimizer(group)
    with pytest.raises(ValueError, match=r"weight_decay=0\.1"):
        MomentumCorrection().check_optimizer(group | {"decoupled_weight_decay": False})


def test_where_workers_vote_all_tensors_do() -> None:
    """A learning rate for signs would leave what goes dense next to where it was."""
    module = PlainSGD()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    train(None, module, "sign_sgd", limit_train_batches=1)
    for now, was in zip(module.parameters(), before, strict=True):
        moved = (now.detach() - was).abs() / module.rate
        assert ((moved - 1).abs().lt(1e-3) | (moved == 0)).all()
        assert moved.any()


@pytest.mark.parametrize(("memory", "decoded"), [(MomentumCorrection(), 1), (GlobalMomentum(), 2)])
def test_simulated_workers_decode_what_somebody_looks_at(
    memory: Any, decoded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One decodes for all, unless each remembers the mean."""
    calls: list[Any] = []
    plain = JointSelection.decode

    def counted(*arguments: Any) -> None:
        calls.append(arguments)
        plain(*arguments)

    monkeypatch.setattr(JointSelection, "decode", counted)
    train(memory, PlainSGD(), limit_train_batches=1)
    assert len(calls) == decoded * 2  # what two workers have sent of the one bucket
