"""Train a small GPT-2 with the Trainer of transformers and compressed gradients; resume exactly.

torchrun --nproc-per-node 2 examples/transformers_trainer.py --steps 20
torchrun --nproc-per-node 2 examples/transformers_trainer.py --steps 40    # goes on from step 20
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from lightning_gc import TopK, attach


# --8<-- [start:callback]
class CompressedGradients(TrainerCallback):
    """Compresses the gradients of a Trainer; keeps each worker's errors in its checkpoints.

    Args:
        settings: of ``attach``: the compressor, the memory, and so on.
    """

    def __init__(self, *settings: Any) -> None:
        self.settings = settings
        self.trainer: Any = None  # set it: callbacks are given the model before DDP wraps it
        self.handle: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Attach to the wrapped model; load errors where a run is resumed."""
        optimizer, scaler = self.trainer.optimizer, self.trainer.accelerator.scaler
        self.handle = attach(
            self.trainer.model_wrapped, *self.settings, optimizers=optimizer, scaler=scaler
        )
        if state.global_step:
            saved = torch.load(own(args, state), weights_only=True)
            self.handle.load_state_dict(saved)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Save what this worker has not sent yet; the other workers have other errors."""
        torch.save(self.handle.state_dict(), own(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Log the bytes, and stop the exchange."""
        self.sent = self.handle.account().wire_bytes
        self.handle.close()


def own(args: Any, state: Any) -> Path:
    """Return where this worker keeps its errors in the checkpoint of this step."""
    folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"compression-worker{dist.get_rank()}.pt"


# --8<-- [end:callback]


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
    compressed = CompressedGradients(TopK(0.01))
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[compressed])
    compressed.trainer = trainer
    stopped = sorted(folder.glob("checkpoint-*"))
    result = trainer.train(resume_from_checkpoint=str(stopped[-1]) if stopped else None)
    if trainer.is_world_process_zero():
        weights = float(sum(p.detach().sum() for p in model.parameters()))
        loss = result.training_loss
        found = f"{compressed.sent:,} bytes; mean loss {loss:.3f}; weights sum to {weights}"
        sys.stdout.write(f"{found}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("runs/transformers"))
    main(**vars(parser.parse_args()))
