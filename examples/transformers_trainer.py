"""Train a small GPT-2 with the Trainer of transformers and compressed gradients; resume exactly.

torchrun --nproc-per-node 2 examples/transformers_trainer.py --steps 20
torchrun --nproc-per-node 2 examples/transformers_trainer.py --steps 40    # goes on from step 20
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lightning_gc import TopK
from lightning_gc.huggingface import CompressedGradients


def main(steps: int, folder: Path) -> None:
    """Train to a number of steps; go on from the last checkpoint, if there is one."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.bos_token_id = config.eos_token_id = 0
    model = GPT2LMHeadModel(config)
    tokens = (torch.arange(64)[:, None] + 3 * torch.arange(32)) % 64  # each counts in threes
    data: Any = [{"input_ids": row, "labels": row} for row in tokens.repeat(10, 1)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=20,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        use_cpu=not torch.cuda.is_available(),
        ddp_backend=None if torch.cuda.is_available() else "gloo",
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    CompressedGradients(trainer, TopK(0.01))
    stopped = sorted(folder.glob("checkpoint-*"))
    result = trainer.train(resume_from_checkpoint=str(stopped[-1]) if stopped else None)
    if trainer.is_world_process_zero():
        weights = float(sum(p.detach().sum() for p in model.parameters()))
        loss = result.training_loss
        sent = trainer.state.log_history[-1]["compression/total_wire_bytes"]
        sys.stdout.write(f"{sent:,} bytes; mean loss {loss:.3f}; weights sum to {weights}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("runs/transformers"))
    main(**vars(parser.parse_args()))
