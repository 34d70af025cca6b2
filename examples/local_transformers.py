"""Train a small GPT-2 with local steps and the Trainer of transformers; resume exactly.

torchrun --nproc-per-node 2 examples/local_transformers.py --steps 20
torchrun --nproc-per-node 2 examples/local_transformers.py --steps 40    # goes on from step 20
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from lightning_gc import QSGD, LocalSteps
from lightning_gc.huggingface import resumed_from, saved_to


# --8<-- [start:callback]
class LocalTraining(TrainerCallback):
    """Gives a Trainer local steps; keeps each worker's state in its checkpoints.

    Args:
        trainer: it has not trained yet.
        settings: of ``LocalSteps``: the compressor, and so on.
        options: such as ``every``.
    """

    def __init__(self, trainer: Any, *settings: Any, **options: Any) -> None:
        self.trainer, self.settings, self.options = trainer, settings, options
        self.local: Any = None
        prepare = trainer.accelerator.prepare_model
        trainer.accelerator.prepare_model = partial(prepare, evaluation_mode=True)  # without DDP
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin with worker 0's weights, or go on where a run is resumed."""
        if self.local is not None:  # of a training that an exception has ended
            self.local.end(failed=True)
        trainer, scaler = self.trainer, self.trainer.accelerator.scaler
        parts = trainer.model, trainer.optimizer, *self.settings
        self.local = LocalSteps(*parts, scaler=scaler, **self.options)
        if state.global_step:
            self.local.load_state_dict(torch.load(own(resumed_from(trainer)), weights_only=True))

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Save this worker's state; the other workers have other weights."""
        folder = saved_to(self.trainer)
        folder.mkdir(parents=True, exist_ok=True)  # on its own disk this worker may be first
        torch.save(self.local.state_dict(), own(folder))

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Make the last exchange: the model has the common weights then, or the best ones."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self.local.reset()  # they have been loaded, and need no exchange
        self.local.finish()


def own(folder: Path) -> Path:
    """Return where this worker keeps its state in a checkpoint."""
    return folder / f"local-worker{dist.get_rank()}.pt"


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
        average_tokens_across_devices=False,  # else it communicates in every step
        use_cpu=not torch.cuda.is_available(),
        ddp_backend=None if torch.cuda.is_available() else "gloo",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    local = LocalTraining(trainer, QSGD(bits=4), every=8)
    stopped = sorted(folder.glob("checkpoint-*"))
    result = trainer.train(resume_from_checkpoint=str(stopped[-1]) if stopped else None)
    if trainer.is_world_process_zero():
        sent, loss = local.local.account().wire_bytes, result.training_loss
        weights = float(sum(p.detach().sum() for p in model.parameters()))
        sys.stdout.write(f"{sent:,} bytes; mean loss {loss:.3f}; weights sum to {weights}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("runs/local_transformers"))
    main(**vars(parser.parse_args()))
