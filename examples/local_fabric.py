"""Train with local steps in Lightning's Fabric; stop within a round, and resume exactly.

python examples/local_fabric.py --steps 20
python examples/local_fabric.py --steps 40    # goes on from step 20
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import nn

from lightning_gc import QSGD, LocalSteps


def train(steps: int, folder: Path, workers: int) -> None:
    """Train to a number of steps."""
    fabric = Fabric(accelerator="cpu", devices=workers, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    net = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 8))
    model = fabric.to_device(net)  # in place of fabric.setup, which wraps it in DDP
    optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))

    with LocalSteps(model, optimizer, QSGD(bits=4), every=8) as local:
        file, first = folder / f"worker{fabric.global_rank}.pt", 0
        if file.exists():
            saved = torch.load(file, weights_only=True)
            local.load_state_dict(saved["local"])  # model and optimizer too
            first = saved["step"]

        for step in range(first, steps):
            data = torch.Generator().manual_seed(1000 * step + fabric.global_rank)
            x = torch.randn(64, 32, generator=data)
            with fabric.autocast():
                loss = nn.functional.mse_loss(model(x), x[:, :8].sin())
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()

        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"local": local.state_dict(), "step": steps}, file)

    sent = local.account().wire_bytes // max(1, steps - first)
    weights = float(sum(p.detach().sum() for p in model.parameters()))
    fabric.print(f"worker 0: {sent:,} bytes a step; loss {loss:.4f}; weights sum to {weights}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("runs/local_fabric"))
    parser.add_argument("--workers", type=int, default=2)
    train(**vars(parser.parse_args()))
