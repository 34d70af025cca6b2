"""Train a small GPT-2 with Hugging Face Accelerate and compressed gradients; resume exactly.

torchrun --nproc-per-node 2 examples/accelerate_loop.py --steps 20
torchrun --nproc-per-node 2 examples/accelerate_loop.py --steps 40    # goes on from step 20
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_gc import TopK, attach

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--folder", type=Path, default=Path("runs/accelerate"))
options = parser.parse_args()

accelerator = Accelerator(cpu=not torch.cuda.is_available())
torch.manual_seed(0)
config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
config.bos_token_id = config.eos_token_id = 0
model: Any = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ddp, optimizer = accelerator.prepare(model, optimizer)  # wraps the model in DDP
handle = attach(ddp, TopK(0.01), optimizers=optimizer, scaler=accelerator.scaler)


# --8<-- [start:errors]
def own(folder: str) -> Path:
    """Return where this worker keeps its errors; the other workers have other ones."""
    return Path(folder) / f"compression-worker{accelerator.process_index}.pt"


def save_errors(models: list[Any], weights: list[Any], folder: str) -> None:
    """Save what this worker has not sent yet."""
    torch.save(handle.state_dict(), own(folder))


def load_errors(models: list[Any], folder: str) -> None:
    """Load what this worker had not sent."""
    handle.load_state_dict(torch.load(own(folder), weights_only=True))


accelerator.register_save_state_pre_hook(save_errors)
accelerator.register_load_state_pre_hook(load_errors)
# --8<-- [end:errors]

first = 0
if options.folder.exists():
    accelerator.load_state(str(options.folder))
    first = int((options.folder / "step.txt").read_text())

loss = torch.zeros(())
for step in range(first, options.steps):
    draw = torch.Generator().manual_seed(1000 * step + accelerator.process_index)
    start = torch.randint(64, (8, 1), generator=draw)
    tokens = ((start + 3 * torch.arange(32)) % 64).to(accelerator.device)  # counts in threes
    loss = ddp(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()

accelerator.save_state(str(options.folder))
if accelerator.is_main_process:
    (options.folder / "step.txt").write_text(str(options.steps))
sent = handle.account().wire_bytes // max(1, options.steps - first)
weights = float(sum(p.detach().sum() for p in model.parameters()))
accelerator.print(
    f"{sent:,} bytes a step; loss {float(loss.detach()):.3f}; weights sum to {weights}"
)
handle.close()
accelerator.end_training()
