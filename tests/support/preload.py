"""What the fork server imports once for all worker processes."""

import atexit
import gc
import pkgutil

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
from lightning_gc.kernels import dispatch, host

__all__ = ["event_accumulator", "hypothesis", "lightning_gc", "optuna", "pytest", "tests", "torch"]
__all__ += ["pytorch_lightning"]

# Workers inherit the tested kernels; else each worker would need a second to load and test them.
# Threads do not survive a fork, so the test uses one.
_threads = torch.get_num_threads()
torch.set_num_threads(1)
for _family in pkgutil.iter_modules(host.__path__):
    dispatch.compiled(torch.ones(1), _family.name)
torch.set_num_threads(_threads)
# A worker's collector would look through all that is imported, and copy the pages that it touches.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # else nanobind tells of leaks
