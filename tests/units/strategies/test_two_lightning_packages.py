"""A strategy is for the Lightning package that the program has imported when it makes the strategy.

Each test runs a user's script in a process of its own: packages that the tests import stay out.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_gc

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="needs both packages of Lightning"
)

LIBRARY = """
import {package} as pl
import torch

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def trainer(strategy, *callbacks):
    return pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, callbacks=list(callbacks), max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )

def train(strategy, *callbacks):
    ours = trainer(strategy, *callbacks)
    ours.fit(Model(), torch.utils.data.DataLoader(torch.randn(16, 64), 4))
    return float(ours.callback_metrics["compression/total_encoding_ratio"])
"""
"""A library whose users see no Lightning package, as scvi-tools is one."""

NAMES = """
from lightning_gc import (
    CompressedDDPStrategy, CompressedFSDPStrategy, CompressedFabricStrategy, CompressedHSDPStrategy,
    CompressionMonitor, LocalStepsStrategy, SimulatedDDPStrategy, SimulatedLocalStepsStrategy, TopK,
)
"""

USES = """
import copy, pickle, sys
import lightning_gc

assert {other!r} not in sys.modules
assert library.train(SimulatedDDPStrategy(TopK(0.1), workers=2), CompressionMonitor()) > 4

class Mine(SimulatedDDPStrategy):
    "A strategy of the user's."
    def __init__(self, workers, **kwargs):
        super().__init__(TopK(0.1), workers=workers, **kwargs)
        self.ended = 0

    def teardown(self):
        super().teardown()
        self.ended += 1

class Watch(CompressionMonitor):
    pass

mine = Mine(workers=2)
for copied in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
    assert type(copied) is type(mine) and copied.ended == 0
assert isinstance(mine, Mine) and isinstance(mine, SimulatedDDPStrategy), type(mine).__mro__
assert (type(mine).__name__, type(mine).__doc__) == ("Mine", "A strategy of the user's.")
assert library.train(mine, Watch()) > 4
assert mine.ended == 1

strategies = [
    CompressedDDPStrategy(TopK(0.1), find_unused_parameters=True),
    LocalStepsStrategy("qsgd", every=2),
    SimulatedLocalStepsStrategy("qsgd", workers=2, every=2),
    CompressedHSDPStrategy("topk", replicas=2),
    CompressedFSDPStrategy("qsgd"),
]
for made in strategies:
    assert isinstance(made, library.pl.strategies.Strategy), type(made).__mro__
    assert isinstance(made, getattr(lightning_gc, type(made).__name__))
    assert isinstance(made, globals()[type(made).__name__])
assert isinstance(CompressionMonitor(), library.pl.Callback)
fabric = sys.modules[{fabric!r}]
with_fabric = fabric.Fabric(accelerator="cpu", devices=1, strategy=CompressedFabricStrategy("topk"))
assert isinstance(with_fabric.strategy, CompressedFabricStrategy)
assert {other!r} not in sys.modules
"""

PACKAGES = {
    "pytorch_lightning": ("lightning_fabric", "lightning.pytorch"),
    "lightning.pytorch": ("lightning.fabric", "pytorch_lightning"),
}


def run(folder: Path, package: str, script: str) -> str:
    (folder / "library.py").write_text(LIBRARY.format(package=package))
    (folder / "script.py").write_text(script)
    path = os.pathsep.join([str(Path(lightning_gc.__file__).parents[1]), str(folder)])
    done = subprocess.run(
        [sys.executable, str(folder / "script.py")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "package", [pytest.param("pytorch_lightning", marks=pytest.mark.nightly), "lightning.pytorch"]
)
def test_names_imported_before_a_library_that_imports_lightning(
    package: str, tmp_path: Path
) -> None:
    fabric, other = PACKAGES[package]
    uses = USES.format(fabric=fabric, other=other)
    run(tmp_path, package, f"{NAMES}\nimport library\n{uses}")


@pytest.mark.nightly  # as documented, and as most examples do
@pytest.mark.parametrize("package", PACKAGES)
def test_names_imported_after_it(package: str, tmp_path: Path) -> None:
    fabric, other = PACKAGES[package]
    uses = USES.format(fabric=fabric, other=other)
    run(tmp_path, package, f"import library\n{NAMES}\n{uses}")


MISTAKES = """
import importlib
import lightning_gc
from lightning_gc import CompressedDDPStrategy, SimulatedDDPStrategy, TopK
import pytorch_lightning  # as a library may do
import library

theirs = importlib.import_module({theirs!r})
their_fabric = importlib.import_module({their_fabric!r})

def said(make, *args, **kwargs):
    try:
        make(*args, accelerator="cpu", devices=1, **kwargs)
    except ValueError as error:
        print(error)

class Mine(theirs.SimulatedDDPStrategy):
    pass

wrong = theirs.CompressedDDPStrategy(TopK(0.1))
said(library.pl.Trainer, strategy=wrong)
said(library.pl.Trainer, strategy=Mine(TopK(0.1), workers=2))
said(importlib.import_module({fabric!r}).Fabric,
     strategy=their_fabric.CompressedFabricStrategy(TopK(0.1)))
ours = lightning_gc.CompressedDDPStrategy
both = importlib.import_module({ours!r}).CompressedDDPStrategy, theirs.CompressedDDPStrategy
assert ours in both and not isinstance(wrong, library.pl.strategies.SingleDeviceStrategy)
for each in both:
    assert isinstance(each("topk"), both), each
    assert isinstance(each("topk"), ours) and isinstance(each("topk"), CompressedDDPStrategy)
assert not isinstance(wrong, SimulatedDDPStrategy)
# A callback's package does not matter to a Trainer.
assert library.train(
    importlib.import_module({ours!r}).SimulatedDDPStrategy("topk", workers=2),
    theirs.CompressionMonitor(),
) > 4
# Where a program imports both, pytorch_lightning is taken.
assert type(CompressedDDPStrategy("topk")).__module__.endswith("for_pytorch_lightning")
"""


@pytest.mark.parametrize(
    "package", [pytest.param("pytorch_lightning", marks=pytest.mark.nightly), "lightning.pytorch"]
)
def test_a_strategy_for_the_other_package_is_refused_with_both_import_lines(
    package: str, tmp_path: Path
) -> None:
    fabric, other = PACKAGES[package]
    name = {"pytorch_lightning": "for_pytorch_lightning", "lightning.pytorch": "for_lightning"}
    home = "lightning_gc.lightning."
    script = MISTAKES.format(
        theirs=home + name[other],
        ours=home + name[package],
        fabric=fabric,
        their_fabric=f"{home}fabric_{name[other]}",
    )
    ddp, mine, in_fabric = run(tmp_path, package, script).splitlines()
    for said, cls, public, where, found, wanted in (
        (ddp, "CompressedDDPStrategy", "CompressedDDPStrategy", "", package, other),
        (mine, "Mine", "SimulatedDDPStrategy", "", package, other),
        (
            in_fabric,
            "CompressedFabricStrategy",
            "CompressedFabricStrategy",
            "fabric_",
            fabric,
            PACKAGES[other][0],
        ),
    ):
        assert said == (
            f"This {cls} is for {wanted}, but it was given to {found}. "
            f"For {found}: `from {home}{where}{name[package]} import {public}`. "
            f"For {wanted}: `from {home}{where}{name[other]} import {public}`."
        )


@pytest.mark.parametrize("early", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("lightning.pytorch", "import lightning as L"),
        pytest.param(
            "lightning.pytorch",
            "from lightning.pytorch.callbacks import ModelCheckpoint",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "pytorch_lightning",
            "from pytorch_lightning import Trainer, seed_everything",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_library_that_imports_the_other_package_does_not_decide(
    package: str, line: str, early: bool, tmp_path: Path
) -> None:
    """In both directions; the names may have been imported before either package."""
    _, other = PACKAGES[package]
    (tmp_path / "beside.py").write_text(
        f"import {other}\n\nclass Theirs({other}.LightningModule):\n    pass\n\n"
        "def calls(make):\n    return make()\n"
    )
    ours = {"pytorch_lightning": "for_pytorch_lightning", "lightning.pytorch": "for_lightning"}
    names = NAMES.strip()
    script = f"""
{names if early else ""}
import sys
{line}
import beside
{"" if early else names}
assert {other!r} in sys.modules

def made():
    return CompressedDDPStrategy(TopK(0.1)), SimulatedDDPStrategy("topk", workers=2)

home = "lightning_gc.lightning.{ours[package]}"
for each in (*made(), *beside.calls(made), CompressionMonitor()):
    assert home in {{base.__module__ for base in type(each).__mro__}}, type(each).__mro__

import importlib
pl = importlib.import_module({package!r})
by_name = pl.Trainer(accelerator="cpu", devices=1, strategy="compressed_ddp", logger=False)
assert type(by_name.strategy).__module__ == home
"""
    run(tmp_path, package, script)
