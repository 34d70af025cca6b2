"""Train a project's model in two processes with five exchanges, stop, resume, and compare.

Each script of this folder says how its project trains, and calls ``compare``. A script runs alone,
in an environment with the project and the wheel, and imports nothing of the tests.
"""

import argparse
import hashlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_gc import QSGD, Identity, PowerSGD, TopK
from lightning_gc.compressors import Compressor

METHODS: dict[str, Compressor | None] = {
    "plain": None,
    "identity": Identity(),
    "qsgd": QSGD(4),
    "topk": TopK(0.01),
    "powersgd": PowerSGD(2),
}
WORKERS = 2
SECONDS = 900  # of two processes, which train with all methods
Fit = Callable[[Compressor | None, Path, bool, bool], torch.nn.Module]
"""Train: compressor, or None for plain DDP; folder for checkpoints; stop half-way; resume."""


def compare(fit: Fit) -> None:
    """Run the script again as two workers, twice; exit with a sentence per promise that broke."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--phase", choices=("train", "resume"))
    phase = parser.parse_args().phase
    if phase:
        _work(fit, resume=phase == "resume")
        return
    trained, resumed = _started("train"), _started("resume")
    failed = broken(trained, resumed)
    for name in METHODS:
        digests = [found[0][name] for found in (trained, resumed)]
        sys.stdout.write(f"{name:9} trained {digests[0]}, resumed {digests[1]}\n")
    sys.exit("\n".join(failed) or 0)


def broken(trained: list[dict[str, str]], resumed: list[dict[str, str]]) -> list[str]:
    """Return what did not hold, in sentences: digests of each worker's weights, by method."""
    found = []
    for name in METHODS:
        if any(each[0][name] != each[1][name] for each in (trained, resumed)):
            found.append(f"{name}: the two workers end with different weights.")
        if trained[0][name] != resumed[0][name]:
            found.append(f"{name}: the resumed run differs from the uninterrupted one.")
        same = trained[0][name] == trained[0]["plain"]
        if name == "identity" and not same:
            found.append("identity: the weights are not those of plain DDP.")
        if name not in ("plain", "identity") and same:
            found.append(f"{name}: the weights are those of plain DDP, so nothing was compressed.")
    return found


def _started(phase: str) -> list[dict[str, str]]:
    """Run both workers of a phase; return the digest of each one's weights, by method."""
    results = [Path(f"{phase}-{worker}.json") for worker in range(WORKERS)]
    for each in results:
        each.unlink(missing_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(WORKERS), sys.argv[0], "--phase", phase]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    if subprocess.run(command, env=alone, timeout=SECONDS, check=False).returncode:
        sys.exit(f"The workers of the phase {phase!r} failed; their errors are above.")
    return [json.loads(each.read_text()) for each in results]


def _work(fit: Fit, resume: bool) -> None:
    digests = {}
    for name, compressor in METHODS.items():
        folder = Path("checkpoints", name).absolute()
        if resume:
            digests[name] = digest(fit(compressor, folder, False, True))
        else:
            fit(compressor, folder, True, False)
            digests[name] = digest(fit(compressor, folder / "whole", False, False))
    phase = "resume" if resume else "train"
    Path(f"{phase}-{os.environ['RANK']}.json").write_text(json.dumps(digests))


def digest(module: torch.nn.Module) -> str:
    """Return a short hash of all parameters; raise ArithmeticError if one is not finite."""
    found = hashlib.sha256()
    for name, parameter in module.named_parameters():
        if not parameter.isfinite().all():
            raise ArithmeticError(f"{name} is not finite")
        found.update(parameter.detach().contiguous().cpu().numpy().tobytes())
    return found.hexdigest()[:12]


def seed(number: int) -> None:
    """Seed NumPy and torch, differently on each worker."""
    np.random.seed(1000 * number + int(os.environ["RANK"]))
    torch.manual_seed(1000 * number + int(os.environ["RANK"]))


def trainer_settings(
    compressor: Compressor | None,
    folder: Path,
    stop: bool,
    package: str = "lightning.pytorch",
    **options: Any,
) -> dict[str, Any]:
    """Return a quiet Trainer's settings: an epoch, or two.

    Args:
        compressor: or None for Lightning's own DDP.
        folder: where the checkpoint of each epoch goes.
        stop: after the first epoch.
        package: that the project's Trainer is from.
        options: of the strategy.
    """
    from lightning_gc import CompressedDDPStrategy

    callbacks = importlib.import_module(f"{package}.callbacks")
    strategies = importlib.import_module(f"{package}.strategies")

    options["process_group_backend"] = "gloo"
    if compressor is None:
        strategy: Any = strategies.DDPStrategy(**options)
    else:
        strategy = CompressedDDPStrategy(compressor, **options)
    return {
        "accelerator": "cpu",
        "devices": WORKERS,
        "strategy": strategy,
        "max_epochs": 1 if stop else 2,
        "callbacks": [
            callbacks.ModelCheckpoint(folder, save_last=True, save_top_k=0),
            seeded_steps(package),
        ],
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }


def seeded_steps(package: str = "lightning.pytorch") -> Any:
    """Return a callback that seeds each batch by its number: Lightning restores no such state."""
    callbacks: Any = importlib.import_module(f"{package}.callbacks")

    class SeededSteps(callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(
            self, trainer: Any, module: Any, batch: Any, index: int, *given: Any
        ) -> None:
            seed(1 + 1000 * trainer.current_epoch + index)

    return SeededSteps()


def last(folder: Path, resume: bool) -> str | None:
    """Return the checkpoint that a resumed run goes on from."""
    return str(folder / "last.ckpt") if resume else None
