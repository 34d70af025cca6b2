"""What the fork server imports once for all worker processes."""

import pytorch_lightning
import torch
import torch.distributed

import lightning_gc
import lightning_gc.bench.command

__all__ = ["lightning_gc", "pytorch_lightning", "torch"]
