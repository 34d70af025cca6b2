"""Train with Lightning's Fabric and compressed gradients; stop, and resume exactly.

python examples/fabric.py --steps 40
python examples/fabric.py --steps 80    # goes on from step 40
"""

import argparse
from pathlib import Path

import torch
from lightning_fabric import Fabric
from torch import nn

from lightning_gc import CompressedFabricStrategy, TopK


def train(steps: int, folder: Path, workers: int) -> float:
    """Train to a number of steps; return the sum of the weights, equal on all workers."""
    strategy = CompressedFabricStrategy(TopK(0.01))
    fabric = Fabric(accelerator="cpu", devices=workers, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    net = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 8))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))

    file, first = folder / "fabric.ckpt", 0
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if file.exists():
        fabric.load(file, state)  # errors too, each worker its own
        first = state["step"]

    for step in range(first, steps):
        data = torch.Generator().manual_seed(1000 * step + fabric.global_rank)
        x = torch.randn(64, 32, generator=data)
        loss = nn.functional.mse_loss(model(x), x[:, :8].sin())
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()

    fabric.save(file, state | {"step": steps})
    sent = strategy.handle.account().wire_bytes // max(1, steps - first)
    weights = float(sum(p.detach().sum() for p in net.parameters()))
    fabric.print(f"worker 0: {sent:,} bytes a step; loss {loss:.4f}; weights sum to {weights}")
    return weights


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("runs/fabric"))
    parser.add_argument("--workers", type=int, default=2)
    train(**vars(parser.parse_args()))
