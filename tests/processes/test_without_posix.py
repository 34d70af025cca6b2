"""Without the modules and functions of POSIX one process trains, and the rest is refused."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys
import torch
for name in ("fcntl", "resource", "pty", "termios", "pwd", "grp"):
    sys.modules[name] = None
for name in ("register_at_fork", "nice", "fork", "killpg", "setsid", "getpgid"):
    delattr(os, name)
import lightning_gc
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_gc.kernels import dispatch
strategy = lightning_gc.SimulatedDDPStrategy(lightning_gc.QSGD(4), workers=2, min_numel=0)
quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
trainer = Trainer(strategy=strategy, max_steps=3, accelerator="cpu", **quiet)
trainer.fit(BoringModel())
with dispatch._locked() as mine:
    print(mine(), trainer.global_step)
from lightning_gc.elastic.roll_file import RollFile
from lightning_gc.tuning.experiment import Experiment
from pathlib import Path
for refused in (
    lambda: RollFile(Path(sys.argv[1], "roll.jsonl")),
    lambda: Experiment("a", build=None, metric="loss", devices=2),
):
    try:
        refused()
    except ValueError as error:
        print(error)
"""


def test_simulated_workers_train(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    trained, roll, tuning = done.stdout.splitlines()[-3:]
    assert trained == "True 3"
    assert "no fcntl to lock files. Start the rendezvous on Linux" in roll
    assert tuning.startswith("devices=2 needs os.killpg")
