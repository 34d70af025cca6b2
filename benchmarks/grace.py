"""GRACE's exchange under Lightning, from a checkout of the user's, to measure beside ours.

After each backward pass every parameter's gradient is exchanged by ``step`` of GRACE's
communicator, one after the other, as its training guide has it. Nothing of GRACE is copied here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_gc.bench.baselines import UnsynchronisedStrategy

SETTINGS: dict[str, dict[str, Any]] = {
    "GRACE topk, 1 %": {
        "compressor": "topk",
        "compress_ratio": 0.01,
        "memory": "residual",
        "communicator": "allgather",
    },
    "GRACE qsgd, 8 bits": {"compressor": "qsgd", "memory": "none", "communicator": "allgather"},
    "GRACE fp16": {"compressor": "fp16", "memory": "none", "communicator": "allreduce"},
}
"""Row -> arguments of GRACE's ``grace_from_params``."""
HELPER = "grace_dl/dist/helper.py"


def has_grace(checkout: Path) -> bool:
    """Whether a folder is a checkout of GRACE."""
    return (checkout / HELPER).is_file()


class GraceStrategy(UnsynchronisedStrategy):
    """Exchanges gradients by GRACE. Workers must begin with the same weights.

    Args:
        checkout: GRACE's folder, with ``grace_dl`` in it.
        name: one of ``SETTINGS``.
        settings: of ``DDPStrategy``.
    """

    def __init__(self, checkout: Path, name: str, **settings: Any) -> None:
        super().__init__(**settings)
        if str(checkout) not in sys.path:
            sys.path.insert(0, str(checkout))
        self._name = name
        self._exchange: Any = None

    def post_backward(self, closure_loss: Tensor) -> None:
        """Replace gradients by what GRACE makes of all workers'."""
        super().post_backward(closure_loss)
        if self._exchange is None:
            from grace_dl.dist.helper import grace_from_params

            self._exchange = grace_from_params(
                SETTINGS[self._name] | {"world_size": dist.get_world_size()}
            )
        assert self.model is not None
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                parameter.grad = self._exchange.step(parameter.grad, name)
