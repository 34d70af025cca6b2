"""Train a small GPT-2 with local steps and Hugging Face Accelerate; resume exactly.

torchrun --nproc-per-node 2 examples/local_accelerate.py --steps 20
torchrun --nproc-per-node 2 examples/local_accelerate.py --steps 40    # goes on from step 20
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_gc import QSGD, LocalSteps

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--folder", type=Path, default=Path("runs/local_accelerate"))
options = parser.parse_args()

accelerator = Accelerator(cpu=not torch.cuda.is_available())
torch.manual_seed(0)
config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
config.bos_token_id = config.eos_token_id = 0
model: Any = GPT2LMHeadModel(config)
# --8<-- [start:local]
model = accelerator.prepare_model(model, evaluation_mode=True)  # does not wrap it in DDP
optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
local = LocalSteps(model, optimizer, QSGD(bits=4), every=8, scaler=accelerator.scaler)
own = options.folder / f"local-worker{accelerator.process_index}.pt"

first = 0
if options.folder.exists():
    accelerator.load_state(str(options.folder))
    saved = torch.load(own, weights_only=True)
    local.load_state_dict(saved["local"])  # last: it sets model and optimizer of this worker
    first = saved["step"]
# --8<-- [end:local]

loss = torch.zeros(())
for step in range(first, options.steps):
    draw = torch.Generator().manual_seed(1000 * step + accelerator.process_index)
    start = torch.randint(64, (8, 1), generator=draw)
    tokens = ((start + 3 * torch.arange(32)) % 64).to(accelerator.device)  # counts in threes
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()

accelerator.save_state(str(options.folder))
torch.save({"local": local.state_dict(), "step": options.steps}, own)
local.finish()  # now all workers have the common weights
sent = local.account().wire_bytes // max(1, options.steps - first)
weights = float(sum(p.detach().sum() for p in model.parameters()))
accelerator.print(
    f"{sent:,} bytes a step; loss {float(loss.detach()):.3f}; weights sum to {weights}"
)
accelerator.end_training()
