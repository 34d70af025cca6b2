"""Elastic local steps in plain torch: start it several times; add workers and stop them at will.

python examples/local_elastic.py &
python examples/local_elastic.py &
python examples/local_elastic.py       # joins, and leaves the run at Ctrl-C

The first one serves the rendezvous, if ``lightning-gc rendezvous`` does not.
"""

import argparse
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from lightning_gc import QSGD, Elastic, LocalSteps

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--rendezvous", default="127.0.0.1:29400")
parser.add_argument("--workers", type=int, default=2, help="fewest of a round")
parser.add_argument("--number", type=int, help="of a worker that resumes")
parser.add_argument("--folder", type=Path, default=Path("runs/local_elastic"))
options = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
# --8<-- [start:elastic]
signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to leave"))  # an exception leaves the run
elastic = Elastic(options.rendezvous, min_workers=options.workers, number=options.number)

with LocalSteps(model, optimizer, QSGD(bits=4), every=8, elastic=elastic) as local:
    file = options.folder / f"worker{local.number}.pt"
    if file.exists():
        local.load_state_dict(torch.load(file, weights_only=True))

    for step in local.until(options.steps):
        data = torch.Generator().manual_seed(1000 * step + local.number)
        x = torch.randn(64, 32, generator=data)
        loss = nn.functional.mse_loss(model(x), x[:, :8].sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # every eighth one exchanges

    options.folder.mkdir(parents=True, exist_ok=True)
    torch.save(local.state_dict(), file)
# --8<-- [end:elastic]

weights = float(sum(p.detach().sum() for p in model.parameters()))
sys.stdout.write(f"worker {local.number}: weights sum to {weights}\n")
