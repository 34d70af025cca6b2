"""A device assert within an exchange ends the process with a message, and soon."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SCRIPT = """
import pytorch_lightning as pl, torch
from pytorch_lightning.demos.boring_classes import BoringModel
from lightning_gc import CompressedDDPStrategy, Identity
from lightning_gc.transports.accounting import Recording

run, steps = Recording.run, []
def broken(self, flow, device):
    steps.append(0)
    if len(steps) == 3:
        torch.zeros(4, device=device)[torch.full((1,), 9, device=device)]
    run(self, flow, device)
Recording.run = broken
pl.Trainer(accelerator="cuda", devices=1, strategy=CompressedDDPStrategy(Identity()), max_epochs=1,
    logger=False, enable_checkpointing=False, enable_progress_bar=False).fit(BoringModel())
"""


def test_the_process_ends_and_says_why(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode != 0
    assert "device-side assert" in said, said[-3000:]
