"""Train with local steps in plain torch; stop within a round, and resume exactly.

torchrun --nproc-per-node 2 examples/local_plain_torch.py --steps 20
torchrun --nproc-per-node 2 examples/local_plain_torch.py --steps 40    # goes on from step 20
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lightning_gc import QSGD, LocalSteps

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--folder", type=Path, default=Path("runs/local_plain_torch"))
options = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 8))  # not wrapped in DDP
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with LocalSteps(model, optimizer, QSGD(bits=4), every=8) as local:
    file, first = options.folder / f"worker{rank}.pt", 0  # each worker has weights of its own
    if file.exists():
        saved = torch.load(file, weights_only=True)
        local.load_state_dict(saved["local"])  # model and optimizer too
        first = saved["step"]

    for step in range(first, options.steps):
        data = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(64, 32, generator=data)
        loss = nn.functional.mse_loss(model(x), x[:, :8].sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # every eighth one exchanges

    options.folder.mkdir(parents=True, exist_ok=True)
    torch.save({"local": local.state_dict(), "step": options.steps}, file)

# Now all workers have the common weights.
sent = local.account().wire_bytes // max(1, options.steps - first)
weights = float(sum(p.detach().sum() for p in model.parameters()))
sys.stdout.write(f"worker {rank}: {sent:,} bytes a step; weights sum to {weights}\n")
dist.destroy_process_group()
