"""A kill at any moment of a save leaves a checkpoint of that name that loads, with its files."""

import itertools
import json
import os
import random
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.io import AsyncCheckpointIO

from lightning_gc import PerParameter, TopK
from lightning_gc.core.saved_state import checksum
from lightning_gc.lightning.for_pytorch_lightning import SimulatedDDPStrategy
from tests.support.damage import NAME, Ends, resume, save
from tests.support.fitting import Crashed, ddp, quiet_trainer
from tests.support.models import common_batches
from tests.support.processes import hold_port, preloaded

pytestmark = pytest.mark.processes
OTHER = Path("/dev/shm")


def dies_while_saving(folder: str, step: int, at: int) -> None:
    """Save again under the old name; die when a file is about to be put in place."""
    put, done = os.replace, itertools.count()

    def replace(here: Any, there: Any) -> None:
        if next(done) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        put(here, there)

    os.replace = replace  # type: ignore[assignment]
    save(Path(folder), step=step)


@pytest.mark.parametrize(
    "step",
    [2, pytest.param(3, marks=pytest.mark.nightly)],
    ids=["a later step", "the same step"],
)
@pytest.mark.parametrize("at", [0, 1, 2], ids=["first file", "second file", "checkpoint"])
def test_the_checkpoint_before_is_whole(tmp_path: Path, step: int, at: int) -> None:
    path = save(tmp_path, step=step)
    whole = resume(path)
    process = preloaded().Process(target=dies_while_saving, args=(str(tmp_path), 3, at))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    with warnings.catch_warnings():
        assert resume(path) == whole
    save(tmp_path)  # removes what the dead one has left
    assert len(list(tmp_path.rglob("*-worker*"))) == 2
    assert not list(tmp_path.rglob("*.part"))


class Wide(pl.LightningModule):
    """Large enough for a file to take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 600), torch.nn.Linear(600, 600))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class SavesAlways(pl.Callback):
    """Saves twice after every step, always under the same name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[str] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        for _saved in range(2):
            trainer.save_checkpoint(self.folder / NAME)
            if trainer.global_step >= 2:  # from here on there is one before
                (self.folder / f"ready{trainer.global_rank}").touch()
        self.seen.append(checksum(trainer.strategy.engine.state_dict()))


STEPS = 30


def saves_always(worker: int, port: int, folder: str, elsewhere: str, later: bool) -> None:
    """Train as one of two workers; leave a list of what the state was after each step."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2")
    os.environ.update(RANK=str(worker), LOCAL_RANK=str(worker), NODE_RANK="0", TMPDIR=elsewhere)
    tempfile.tempdir = None
    torch.set_num_threads(1)
    torch.manual_seed(0)
    saves = SavesAlways(Path(folder))
    plugins: Any = [AsyncCheckpointIO()] if later else []
    trainer = quiet_trainer(
        ddp(PerParameter(TopK(0.1))), callbacks=[saves], devices=2, plugins=plugins
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Wide(), common_batches(2 * STEPS * 4, 4))
    Path(folder, f"seen{worker}").write_text(json.dumps(saves.seen))


class Workers:
    """Two workers that save all the time."""

    def __init__(self, folder: Path, elsewhere: Path, later: bool) -> None:
        self.folder = folder
        self.held = hold_port()
        port = self.held.getsockname()[1]
        self.processes = [
            preloaded().Process(
                target=saves_always, args=(worker, port, str(folder), str(elsewhere), later)
            )
            for worker in range(2)
        ]
        for process in self.processes:
            process.start()

    def ready(self) -> None:
        deadline = time.monotonic() + 60
        while not all((self.folder / f"ready{worker}").exists() for worker in range(2)):
            assert time.monotonic() < deadline, "nothing is saved"
            time.sleep(0.005)

    def kill(self, draw: random.Random) -> None:
        """Kill both at once, or one a little later than the other."""
        later = draw.choice([0.0, draw.uniform(0, 0.05)])
        for process in draw.sample(self.processes, 2):
            process.kill()
            time.sleep(later)

    def end(self) -> None:
        for process in self.processes:
            process.join(60)
        self.held.close()


def restored(path: Path) -> list[str]:
    """Resume with simulated workers, and return the checksum of each one's state."""
    ours = SimulatedDDPStrategy(PerParameter(TopK(0.1)), workers=2)
    trainer = quiet_trainer(ours, callbacks=[Ends()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(Crashed):
            trainer.fit(Wide(), common_batches(2 * STEPS * 4, 4), ckpt_path=path)
    said = [str(warning.message) for warning in caught]
    assert not [text for text in said if text.startswith(("Error state", "Resumed with"))]
    return [checksum(engine.state_dict()) for engine in ours.engines]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder for TMPDIR in another file system than that of the checkpoints."""
    if not OTHER.is_dir() or OTHER.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs /dev/shm, on another file system than the test's folder")
    folder = Path(tempfile.mkdtemp(dir=OTHER))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_100_kills(tmp_path: Path, elsewhere: Path, capsys: Any) -> None:
    """At random moments, with a TMPDIR from which no file can be renamed."""
    draw, steps = random.Random(0), []
    (tmp_path / "undisturbed").mkdir()
    whole = Workers(tmp_path / "undisturbed", elsewhere, later=False)
    whole.end()
    seen = [json.loads((tmp_path / "undisturbed" / f"seen{i}").read_text()) for i in range(2)]
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        workers = Workers(folder, elsewhere, later=number % 4 == 3)
        workers.ready()
        time.sleep(draw.uniform(0, 0.7))
        workers.kill(draw)
        workers.end()
        step = torch.load(folder / NAME, weights_only=True)["lightning_gc"]["step"]
        assert restored(folder / NAME) == [theirs[step - 1] for theirs in seen], number
        steps.append(step)
        shutil.rmtree(folder)
    with capsys.disabled():
        print(f"100 kills: resumed at steps {min(steps)} to {max(steps)}")  # noqa: T201
