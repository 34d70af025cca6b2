"""Where tests train: on the CPU over Gloo, or with ``TESTS_ACCELERATOR=cuda`` on GPUs over NCCL.

`tests/gpu` sets the variable. With one GPU, tests of two workers train one, over NCCL all the same.
"""

import os

import pytest
import torch

DEVICE = os.environ.get("TESTS_ACCELERATOR", "cpu")
BACKEND = "nccl" if DEVICE == "cuda" else "gloo"
WORKERS = 2 if DEVICE == "cpu" else min(2, torch.cuda.device_count())

needs_two = pytest.mark.skipif(WORKERS < 2, reason="needs two GPUs")
