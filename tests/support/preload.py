"""What the fork server imports once for all worker processes."""

import hypothesis
import optuna
import pytest
import pytorch_lightning
import torch
import torch.distributed
from tensorboard.backend.event_processing import event_accumulator

import lightning_gc
import lightning_gc.bench.benchmark
import lightning_gc.testing.contracts
import tests.support.resuming
import tests.support.simulation

__all__ = ["event_accumulator", "hypothesis", "lightning_gc", "optuna", "pytest", "tests", "torch"]
__all__ += ["pytorch_lightning"]
