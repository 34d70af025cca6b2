"""Tell what a reader of a result wants to know of the machine and of the sources."""

import functools
import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
PACKAGES = ("lightning-gc", "torch", "triton", "pytorch-lightning", "nvidia-nccl-cu13", "numpy")


def machine() -> list[str]:
    """Return lines with the versions of packages, and the GPUs."""
    lines = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"{package} is not installed")
    lines.append(f"CUDA {torch.version.cuda}, ROCm {torch.version.hip}")
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        lines.append(f"GPU {index}: {gpu.name}, {gpu.multi_processor_count} multiprocessors")
    return lines


@functools.cache
def sources() -> str:
    """Return a text that changes with the package's sources: its version does not."""
    digest = hashlib.sha256()
    for folder in ("lightning_gc", "controllers"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:8]
