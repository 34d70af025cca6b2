"""Auto after a resume: it goes on with its choice, or measures again if other workers train."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gc import SimulatedDDPStrategy
from tests.support.auto import MENU, Scripted
from tests.support.fitting import quiet_trainer, unwarned
from tests.support.models import Books, own_batches


class Other(torch.optim.SGD):
    pass


class WithOther(Books):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Other(self.parameters(), lr=0.01)


def fitted(path: Path, workers: int, epochs: int, model: type[Books], resume: bool) -> Any:
    strategy = SimulatedDDPStrategy("auto", workers=workers, controller=Scripted(allow=MENU))
    trainer = quiet_trainer(strategy, max_epochs=epochs)
    with unwarned():
        trainer.fit(model(), own_batches(0, 40), ckpt_path=str(path) if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    return trainer.strategy


@pytest.mark.parametrize(
    ("workers", "model", "says"),
    [
        (2, Books, "auto: resumed with powersgd."),
        (3, Books, "measures again, since there were 2 workers, and now 3 workers."),
        (2, WithOther, "measures again, since optimizers were SGD, and now Other."),
    ],
)
def test_it_says_whether_its_choice_holds(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    workers: int,
    model: type[Books],
    says: str,
) -> None:
    path = tmp_path / "last.ckpt"
    before = fitted(path, 2, 1, Books, resume=False)
    assert before.control_loop.state["name"] == "powersgd"
    caplog.set_level("INFO", "lightning_gc.core.notices")
    caplog.clear()
    after = fitted(path, workers, 3, model, resume=True).control_loop
    said = [each for each in caplog.messages if each.startswith("auto: ")]
    assert said[0].endswith(says)
    assert after.state["name"] == "powersgd"
    again = [each for each in said if each.startswith("auto: powersgd, since a step takes 0.5 s")]
    assert len(again) == ("again" in says)
    assert after.state["seconds"] > 0.9 * before.control_loop.state["seconds"]
