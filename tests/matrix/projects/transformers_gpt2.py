"""transformers: its Trainer and a small GPT-2, by our callback."""

from pathlib import Path
from typing import Any

import torch
from comparison import compare, seed
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lightning_gc.compressors import Compressor
from lightning_gc.huggingface import CompressedGradients


def fit(compressor: Compressor | None, folder: Path, stop: bool, resume: bool) -> nn.Module:
    """Train for four steps, or for eight."""
    seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2)
    config.bos_token_id = config.eos_token_id = 0
    model = GPT2LMHeadModel(config)
    tokens = (torch.arange(64)[:, None] + 3 * torch.arange(32)) % 64
    data: Any = [{"input_ids": row, "labels": row} for row in tokens.repeat(4, 1)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=4 if stop else 8,
        save_steps=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    if compressor is not None:
        CompressedGradients(trainer, compressor)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4") if resume else None)
    network: nn.Module = model
    return network


if __name__ == "__main__":
    compare(fit)
