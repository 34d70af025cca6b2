"""Without the modules and functions of POSIX one process imports the library and trains."""

import subprocess
import sys

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
"""


def test_simulated_workers_train() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "True 3"
