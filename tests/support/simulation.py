"""The same fit by real processes and by simulated workers."""

import functools
import types
from typing import Any

import numpy as np
import torch

from lightning_gc.lightning.for_pytorch_lightning import CompressionMonitor, SimulatedDDPStrategy
from tests.support.fitting import ddp, fit, unwarned
from tests.support.models import Plain, common_batches


def fit_case(
    strategy: Any,
    module: Any = Plain,
    batch_size: int = 4,
    data: Any = None,
    **settings: Any,
) -> dict[str, Any]:
    """Fit two epochs on an ordinary shuffled DataLoader."""
    callbacks = [CompressionMonitor(), *settings.pop("callbacks", [])]
    batches = data
    if data is None:
        batches = functools.partial(common_batches, size=batch_size, shuffle=True)
    settings = {"max_epochs": 2, "callbacks": callbacks, **settings}
    with unwarned():
        result = fit(strategy, module, batches, **settings)
    finite = [np.isfinite(each).all() for each in result.get("parameters", [])]
    assert all(finite), "nothing to compare"
    return result


def real(worker: int, workers: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit each case as one of several processes."""
    results = []
    for case in cases:
        case = dict(case)
        strategy = case.pop("real", ddp)(case.pop("compressor"), **case.pop("options", {}))
        case.pop("simulated", None)
        results.append(fit_case(strategy, devices=workers, **made(case)))
    return results


def simulated(workers: int, case: dict[str, Any]) -> dict[str, Any]:
    """Fit one case with simulated workers, on one thread, as the real ones have."""
    case = dict(case)
    options = case.pop("options", {})
    case.pop("real", None)
    made_by = case.pop("simulated", SimulatedDDPStrategy)
    strategy = made_by(case.pop("compressor"), workers=workers, **options)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return fit_case(strategy, **made(case))
    finally:
        torch.set_num_threads(threads)


def made(case: dict[str, Any]) -> dict[str, Any]:
    """Call what has to be made anew for each fit, in the process that it is for."""
    lazy = types.FunctionType
    return {name: value() if isinstance(value, lazy) else value for name, value in case.items()}
