"""Train a DistributedDataParallel module with compressed gradients, in plain torch; resume exactly.

torchrun --nproc-per-node 2 examples/plain_torch.py --steps 40
torchrun --nproc-per-node 2 examples/plain_torch.py --steps 80    # goes on from step 40
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import TopK, attach

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--folder", type=Path, default=Path("runs/plain_torch"))
options = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 8)))
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
handle = attach(ddp, TopK(0.01), optimizers=optimizer)

file, first = options.folder / f"worker{rank}.pt", 0  # each worker has errors of its own
if file.exists():
    saved = torch.load(file, weights_only=True)
    ddp.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    handle.load_state_dict(saved["compression"])
    first = saved["step"]

for step in range(first, options.steps):
    data = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(64, 32, generator=data)
    loss = nn.functional.mse_loss(ddp(x), x[:, :8].sin())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

options.folder.mkdir(parents=True, exist_ok=True)
saved = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
torch.save(saved | {"compression": handle.state_dict(), "step": options.steps}, file)
sent = handle.account().wire_bytes // max(1, options.steps - first)
weights = float(sum(p.detach().sum() for p in ddp.parameters()))
sys.stdout.write(f"worker {rank}: {sent:,} bytes a step; weights sum to {weights}\n")
handle.close()
dist.destroy_process_group()
